"""Trackers by name, and the trackers of a run."""

import functools
import importlib
import importlib.util
import pathlib
import time
from collections.abc import Sequence

from jaxsp.config.run_schema import LoggingConfig
from jaxsp.core.errors import UserError
from jaxsp.processes import distributed
from jaxsp.reporting.trackers import tracker
from jaxsp.reporting.trackers.background import BackgroundTracker
from jaxsp.reporting.trackers.tracker import Outcome, Point, TrackedRun, Tracker

FINISH_TIMEOUT_S = 10.0
"""Time limit for all trackers to receive the last values, and at most run.shutdown_grace."""

LOCAL_TIMEOUT_S = 300.0
"""The same for a tracker on this machine's disk, which a busy machine may delay."""

SEND_TIMEOUT_S = 600.0
"""The same for a run that is done already."""

STOP_TIMEOUT_S = 3.0
"""The same for a run that was asked to stop, whose checkpoint has taken its part of the grace."""

TRACKERS = {
    "tensorboard": "tensorboard.TensorBoardTracker",
    "wandb": "wandb_tracker.WandbTracker",
    "mlflow": "mlflow_tracker.MlflowTracker",
}
"""Module and class of each value of logging.trackers, which is also its extra and its package."""


def load(name: str) -> type[Tracker]:
    """Imports a tracker's class."""
    module, _, class_name = TRACKERS[name].partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), class_name)


def check_installed(config: LoggingConfig) -> None:
    """Raises: UserError if the package of a tracker is not installed."""
    for name in config.trackers:
        # jaxsp itself requires what tensorboard needs
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.trackers = [{', '.join(config.trackers)}]: {name} needs the package "
                f"{name}, which is not installed. Use pip install 'jaxsp[{name}]'."
            )


def describe(run: TrackedRun, names: tuple[str, ...]) -> str:
    """Describes where trackers keep or send the numbers, for the banner."""
    return "; ".join(filter(None, (load(name).describe(run) for name in names)))


class Trackers:
    """Context of a run's trackers: those on this machine's disk directly, others through threads.

    Args: limit_s: time limit at the end; None: by the outcome.
    """

    def __init__(self, run: TrackedRun, names: tuple[str, ...], *, limit_s: float | None = None):
        self._run = run
        self._names = names
        self._limit_s = limit_s
        self._direct: list[Tracker] = []
        self._threads: list[tuple[Tracker, BackgroundTracker]] = []
        self.outcome: Outcome = "finished"
        """End of the run, if no exception ends it."""

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._finish(self.outcome if kind is None else "failed")

    def start(self, *paths: pathlib.Path) -> None:
        """Starts all trackers. The files, those of `tracker.read_points`, have no lines of steps
        that the run repeats."""
        self._run.write_complete([])
        read_points = functools.partial(tracker.read_points, *paths)
        for name in self._names:
            new = load(name)(self._run)
            if new.needs_thread:
                self._threads.append((new, BackgroundTracker(name, new, read_points)))
            else:
                new.start()
                self._direct.append(new)

    def log(self, point: Point) -> None:
        """Records a point whose line has been written."""
        for direct in self._direct:
            direct.log([point])
        for _, thread in self._threads:
            thread.log(point)

    def sync(self) -> None:
        """Makes the points in local files survive a power failure. Raises: OSError."""
        for direct in self._direct:
            direct.sync()

    def _finish(self, outcome: Outcome) -> None:
        """Finishes all trackers, in a limited time."""
        for direct in self._direct:
            direct.finish(outcome)
        limit_s = self._limit_s
        if limit_s is None:
            limit_s = STOP_TIMEOUT_S if outcome == "stopped" else FINISH_TIMEOUT_S
            limit_s = min(limit_s, self._run.shutdown_grace.total_seconds())
        began = time.monotonic()
        for _, thread in self._threads:
            thread.request_finish(outcome)
        complete = []
        for remote, thread in self._threads:
            is_waited_for = remote.is_local and outcome == "finished"
            if thread.join(began + (LOCAL_TIMEOUT_S if is_waited_for else limit_s)):
                complete.append(thread.name)
        if outcome == "finished":
            self._run.write_complete(complete)


def send_missing(run: TrackedRun, names: tuple[str, ...], paths: Sequence[pathlib.Path]) -> None:
    """Sends the values of a run that is done to trackers that do not have all of them.

    Args: paths: files of `tracker.read_points`.
    """
    complete = run.complete
    missing = tuple(name for name in names if load(name).needs_thread and name not in complete)
    if not missing:
        return
    with Trackers(run, missing, limit_s=SEND_TIMEOUT_S) as trackers:
        trackers.start(*paths)
        last_points = {point.group: point for point in tracker.read_points(*paths)}
        for point in last_points.values():
            trackers.log(point)
    for name in run.complete:
        distributed.log(f"{name}: has all values of this run")
    run.write_complete([*complete, *run.complete])
