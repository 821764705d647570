"""Config section of logs: trackers and profiles."""

import importlib.util
from typing import Annotated, Any

import pydantic

from jaxsp.config import fields
from jaxsp.config.fields import Choice, ConfigSection, PositiveCount, with_examples
from jaxsp.core.errors import UserError
from jaxsp.run.trackers.mlflow_tracker import Mlflow
from jaxsp.run.trackers.tensorboard import TensorBoard
from jaxsp.run.trackers.tracker import Service, Tracker
from jaxsp.run.trackers.wandb_tracker import Wandb

TRACKERS = (TensorBoard, Wandb, Mlflow)

TRACKER = Choice(selector="type", types=TRACKERS, is_name=True)


class LoggingConfig(ConfigSection):
    """Logs in addition to metrics.jsonl."""

    trackers: Annotated[
        tuple[Annotated[Tracker, TRACKER], ...],
        with_examples("[tensorboard, wandb]", strict=False),
    ] = (TensorBoard(),)
    """Trackers that show the values of metrics.jsonl and eval.jsonl. An entry is a name, or a
    mapping of type and the fields of that tracker. A failing tracker neither ends the run nor
    delays a step."""
    profile_steps: Annotated[
        tuple[PositiveCount, PositiveCount] | None, with_examples("[3, 5]", strict=False)
    ] = None
    """First and last step to trace with JAX's profiler. The trace is in run.directory/profile, for
    XProf or Perfetto."""

    @pydantic.field_validator("trackers", mode="before")
    @classmethod
    def _check_trackers(cls, value: Any) -> Any:
        entries = [value] if isinstance(value, str) else value
        if isinstance(entries, list | tuple):
            names = [*filter(None, map(TRACKER.find, entries))]
            if len({*names}) < len(names):
                raise ValueError("must not name a tracker twice")
        return entries

    @pydantic.field_validator("profile_steps", mode="before")
    @classmethod
    def _check_profile_steps(cls, value: Any) -> Any:
        if value is None:
            return value
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(map(fields.is_count, value)) or value[0] > value[1]:
            raise ValueError("must be the first and the last step, counted from 1, or null")
        return value

    def check_installed(self) -> None:
        """Raises: UserError if the package of a tracker is not installed."""
        for tracker in self.trackers:
            name = tracker.type
            if isinstance(tracker, Service) and importlib.util.find_spec(tracker.package) is None:
                raise UserError(
                    f"logging.trackers = [{', '.join(each.type for each in self.trackers)}]: "
                    f"{name} needs the package {tracker.package}, which is not installed. "
                    f"Use pip install 'jaxsp[{name}]'."
                )
