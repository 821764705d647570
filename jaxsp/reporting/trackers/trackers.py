"""Trackers of a run: interface, names, and the numbers that they receive."""

import abc
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from jaxsp.config.run_schema import LoggingConfig
from jaxsp.config.schema import Config
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.processes import distributed, redaction
from jaxsp.runtime import run_paths

IDS_FILE = "trackers.json"
"""File of a run directory with the ids of the run in its trackers."""

DEFAULT_PROJECT = "jaxsp"

TRACKERS = {
    "tensorboard": "tensorboard.TensorBoardTracker",
    "wandb": "wandb_tracker.WandbTracker",
    "mlflow": "mlflow_tracker.MlflowTracker",
}
"""Module and class of each value of logging.trackers, which is also its extra and its package."""

Outcome = Literal["finished", "stopped", "failed"]
"""End of a process: all steps are done, it was stopped and can be resumed, or it failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Facts about a run for its trackers."""

    directory: pathlib.Path
    config: Config
    from_step: int
    """Last step whose numbers were recorded by an earlier process."""
    ids: dict[str, Any]
    """Ids of a resumed run by tracker."""

    def find_project(self, variable: str) -> str:
        """Returns logging.project, else the value of a tracker's variable, else the default."""
        return self.config.logging.project or os.environ.get(variable) or DEFAULT_PROJECT

    def find_name(self, variable: str) -> str:
        """Returns logging.run_name, else the value of a variable, else the run directory's name."""
        name = self.config.logging.run_name or os.environ.get(variable)
        return name or self.directory.resolve().name

    def keep_id(self, tracker: str, run_id: str) -> None:
        """Keeps the id of the run in a tracker for processes that resume it. Raises: OSError."""
        self.ids[tracker] = run_id
        files.write_json(self.directory / IDS_FILE, self.ids)


class Tracker(abc.ABC):
    """Program or service that shows the numbers of a run.

    Each method may raise any exception: the run then continues without the tracker.
    """

    @abc.abstractmethod
    def __init__(self, run: TrackedRun):
        """Starts the run in the tracker, or continues it."""

    @abc.abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Records numbers by name. Must return within a second, also if a server hangs."""

    @abc.abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Completes the record of this process."""


class Trackers:
    """Context of a run's trackers."""

    def __init__(self, config: Config, *, from_step: int, is_resume: bool):
        """Starts the trackers in process 0. Args: is_resume: False for a run that is new there."""
        directory = run_paths.local_dir(config.run)
        saved = files.read_json(directory / IDS_FILE) if is_resume else None
        run = TrackedRun(directory=directory, config=config, from_step=from_step, ids=saved or {})
        self.outcome: Outcome = "finished"
        """End of the run, if no exception ends it."""
        self._trackers: dict[str, Tracker] = {}
        for name in config.logging.trackers if jax.process_index() == 0 else ():
            self._try(name, self._start, name, run)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        outcome = self.outcome if kind is None else "failed"
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.close, outcome)

    def log(self, line: Mapping[str, Any]) -> None:
        """Records the numbers of a line of metrics.jsonl, eval.jsonl or tasks.jsonl."""
        numbers = name_numbers(line)
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.log, numbers, line["step"])

    def _start(self, name: str, run: TrackedRun) -> None:
        self._trackers[name] = _load(name)(run)

    def _try(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a tracker, and leaves it out from then on if it fails."""
        try:
            call(*arguments)
        except Exception as error:  # the clients raise errors of many kinds
            self._trackers.pop(name, None)
            print_failure(name, f"{type(error).__name__}: {error}")


def print_failure(name: str, text: str) -> None:
    """Prints a line about a tracker that fails, without secrets. Args: text: time and reason."""
    text = textwrap.shorten(redaction.redact(text), 300)
    distributed.log(f"{name}: OFF for this process, metrics.jsonl has all values: {text}")


def check_installed(config: LoggingConfig) -> None:
    """Raises: UserError if the package of a tracker is not installed."""
    for name in config.trackers:
        # jaxsp itself requires what tensorboard needs
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.trackers = [{', '.join(config.trackers)}]: {name} needs the package "
                f"{name}, which is not installed. Use pip install 'jaxsp[{name}]'."
            )


def name_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line by name: the group, such as train or eval/NAME, and field."""
    group = "train"
    if "task" in line:
        group = f"task/{line['task']}/{line['length']}"
    elif "data" in line:
        group = f"eval/{line['data']}"
    fields = dict(line)
    for field, value in line.items():
        if isinstance(value, dict):
            fields |= {f"{field}/{name}": number for name, number in value.items()}
    return {
        f"{group}/{name}": float(value)
        for name, value in fields.items()
        if name not in ("step", "length") and isinstance(value, int | float)
    }


def _load(name: str) -> type[Tracker]:
    module, _, class_name = TRACKERS[name].partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), class_name)
