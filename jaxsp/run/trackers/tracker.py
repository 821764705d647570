"""Base classes of trackers: what the config selects, and what receives the numbers of a run."""

import abc
import dataclasses
import os
import pathlib
import textwrap
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from jaxsp.config.fields import ConfigSection, with_examples
from jaxsp.core import files
from jaxsp.system import distributed, output

IDS_FILE = "trackers.json"
"""File of a run directory with the ids of the run in its trackers."""

Outcome = Literal["finished", "stopped", "failed"]
"""End of a process: all steps are done, it was stopped and can be resumed, or it failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Facts about a run for its trackers."""

    directory: pathlib.Path
    config: dict[str, Any]
    """The whole config, as JSON values."""
    shutdown_grace: timedelta
    from_step: int
    """Last step whose numbers were recorded by an earlier process."""
    ids: dict[str, Any]
    """Ids of a resumed run by tracker."""

    def keep_id(self, tracker: str, run_id: str) -> None:
        """Keeps the id of the run in a tracker for processes that resume it. Raises: OSError."""
        self.ids[tracker] = run_id
        files.write_json(self.directory / IDS_FILE, self.ids)


class Client(abc.ABC):
    """Connection of a run to a tracker. If a method raises, the run continues without it."""

    @abc.abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Records numbers by name. Must return within a second, also if a server hangs."""

    @abc.abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Completes the record of this process."""


class Tracker(ConfigSection, abc.ABC):
    """Program or service that shows the numbers of a run."""

    type: str
    """Tracker that shows the run's metrics."""

    folder: ClassVar[str | None] = None
    """Folder of the run directory with its files, for the banner."""

    @abc.abstractmethod
    def start(self, run: TrackedRun) -> Client:
        """Starts the run in the tracker, or continues it. May raise any exception."""


class Service(Tracker):
    """Tracker with projects and names of runs. Its extra has the name of its type."""

    package: ClassVar[str]
    """Module that must be installed."""
    project: Annotated[str | None, with_examples("long-context", min_length=1)] = None
    """Project in wandb, or experiment in mlflow. null: the environment variable WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME, or jaxsp if it is not set."""
    run_name: Annotated[str | None, with_examples("qwen3-64k", min_length=1)] = None
    """Name of the run. null: the environment variable WANDB_NAME or MLFLOW_RUN_NAME, or the name of
    run.directory if it is not set."""

    def find_project(self, variable: str) -> str:
        """project, else the value of a variable of the environment, else the default."""
        return self.project or os.environ.get(variable) or "jaxsp"

    def find_name(self, variable: str, run: TrackedRun) -> str:
        """Returns run_name, else the value of a variable, else the run directory's name."""
        return self.run_name or os.environ.get(variable) or run.directory.resolve().name


def print_failure(name: str, text: str) -> None:
    """Prints a line about a tracker that fails, without secrets. Args: text: time and reason."""
    text = textwrap.shorten(output.redact(text), 300)
    distributed.log(f"{name}: OFF for this process, metrics.jsonl has all values: {text}")
