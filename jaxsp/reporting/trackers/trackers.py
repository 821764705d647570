"""Trackers of a run, and the numbers that they receive."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxsp.config.schema import Config
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.reporting.trackers.logging_config import LoggingConfig
from jaxsp.reporting.trackers.tracker import (
    IDS_FILE,
    Client,
    Outcome,
    TrackedRun,
    Tracker,
    print_failure,
)
from jaxsp.runtime import run_paths


class Trackers:
    """Context of a run's trackers."""

    def __init__(self, config: Config, *, from_step: int, is_resume: bool):
        """Starts the trackers in process 0. Args: is_resume: False for a run that is new there."""
        directory = run_paths.local_dir(config.run)
        saved = files.read_json(directory / IDS_FILE) if is_resume else None
        run = TrackedRun(directory=directory, config=config, from_step=from_step, ids=saved or {})
        self.outcome: Outcome = "finished"
        """End of the run, if no exception ends it."""
        self._clients: dict[str, Client] = {}
        for tracker in config.logging.trackers if jax.process_index() == 0 else ():
            self._try(tracker.type, self._start, tracker, run)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        outcome = self.outcome if kind is None else "failed"
        for name, client in list(self._clients.items()):
            self._try(name, client.close, outcome)

    def log(self, line: Mapping[str, Any]) -> None:
        """Records the numbers of a line of metrics.jsonl, eval.jsonl or tasks.jsonl."""
        numbers = name_numbers(line)
        for name, client in list(self._clients.items()):
            self._try(name, client.log, numbers, line["step"])

    def _start(self, tracker: Tracker, run: TrackedRun) -> None:
        self._clients[tracker.type] = tracker.start(run)

    def _try(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a tracker, and leaves it out from then on if it fails."""
        try:
            call(*arguments)
        except Exception as error:  # the clients raise errors of many kinds
            self._clients.pop(name, None)
            print_failure(name, f"{type(error).__name__}: {error}")


def check_installed(config: LoggingConfig) -> None:
    """Raises: UserError if the package of a tracker is not installed."""
    names = ", ".join(tracker.type for tracker in config.trackers)
    for package in filter(None, (tracker.package for tracker in config.trackers)):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"logging.trackers = [{names}]: {package} needs the package {package}, which is "
                f"not installed. Use pip install 'jaxsp[{package}]'."
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
