"""Trackers by name, and the trackers of a run."""

import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax

from jaxsp.config.run_schema import LoggingConfig
from jaxsp.core.errors import UserError
from jaxsp.reporting.trackers.background import BackgroundTracker
from jaxsp.reporting.trackers.line_reader import LineReader
from jaxsp.reporting.trackers.tracker import Outcome, Point, TrackedRun, Tracker
from jaxsp.runtime import distributed

FINISH_TIMEOUT_S = 10.0
"""Time limit for all trackers to receive the last values, and at most run.shutdown_grace."""

LOCAL_TIMEOUT_S = 300.0
"""The same for a tracker on this machine's disk, which a busy machine may delay."""

SEND_TIMEOUT_S = 600.0
"""The same for a run that is done already."""

STOP_TIMEOUT_S = 3.0
"""The same for a run that was asked to stop, whose checkpoint has taken its part of the grace."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """A value of logging.trackers."""

    module: str
    """Module with `make_tracker(run)` and, if the tracker is remote, `describe(run)`."""
    package: str = ""
    """Package that the extra of the tracker's name installs; empty if jaxsp requires it."""
    is_remote: bool = True
    """True if it may block or fail, so that a thread of its own must send the values."""

    def load(self) -> ModuleType:
        """Imports the module."""
        return importlib.import_module(self.module)


TRACKERS = {
    "tensorboard": TrackerKind(module=f"{__package__}.tensorboard", is_remote=False),
    "wandb": TrackerKind(module=f"{__package__}.wandb_tracker", package="wandb"),
    "mlflow": TrackerKind(module=f"{__package__}.mlflow_tracker", package="mlflow"),
}


def check_installed(config: LoggingConfig) -> None:
    """Raises: UserError if the package of a tracker is not installed."""
    for name in config.trackers:
        package = TRACKERS[name].package
        if package and importlib.util.find_spec(package) is None:
            raise UserError(
                f"logging.trackers = [{', '.join(config.trackers)}]: {name} needs the package "
                f"{package}, which is not installed. Use pip install 'jaxsp[{name}]'."
            )


def describe(run: TrackedRun, names: tuple[str, ...]) -> str:
    """Describes where remote trackers keep or send the numbers; only process 0 has trackers."""
    if jax.process_index() > 0:
        return ""
    remote = [TRACKERS[name] for name in names if TRACKERS[name].is_remote]
    return "; ".join(kind.load().describe(run) for kind in remote)


class Trackers:
    """The trackers of a run: those on this machine's disk directly, others through threads.

    Use: `open_trackers`.
    """

    def __init__(self, run: TrackedRun, names: tuple[str, ...]):
        self._run = run
        self._names = names
        self._direct: list[Tracker] = []
        self._remote: list[BackgroundTracker] = []
        self.outcome: Outcome = "finished"
        """End of the run, if no exception ends it."""

    def start(self, metrics: pathlib.Path, evals: pathlib.Path) -> None:
        """Starts all trackers. The files have no lines of steps that the run repeats."""
        if self._run.complete:
            self._run.write_complete([])
        for name in self._names:
            tracker: Any = TRACKERS[name].load().make_tracker(self._run)
            if TRACKERS[name].is_remote:
                remote = BackgroundTracker(
                    name,
                    tracker,
                    lambda: LineReader(metrics, evals),
                    from_step=self._run.from_step,
                )
                remote.start()
                self._remote.append(remote)
            else:
                tracker.start()
                self._direct.append(tracker)

    def log(self, point: Point) -> None:
        """Records a point whose line has been written."""
        for tracker in self._direct:
            tracker.log([point])
        for remote in self._remote:
            remote.notify()

    def sync(self) -> None:
        """Makes the points in local files survive a power failure. Raises: OSError."""
        for tracker in self._direct:
            tracker.sync()

    def finish(self, outcome: Outcome, *, limit_s: float | None = None) -> None:
        """Finishes all trackers, in a limited time. Args: limit_s: None: by the outcome."""
        for tracker in self._direct:
            tracker.finish(outcome)
        if limit_s is None:
            limit_s = STOP_TIMEOUT_S if outcome == "stopped" else FINISH_TIMEOUT_S
            limit_s = min(limit_s, self._run.shutdown_grace.total_seconds())
        deadline = time.monotonic() + limit_s
        for remote in self._remote:
            remote.request_finish(outcome)
        for remote in self._remote:
            is_waited_for = remote.is_local and outcome == "finished"
            if is_waited_for and not remote.wait(deadline):
                distributed.log(f"{remote.name}: waiting until its file has all values")
            remote.join(time.monotonic() + LOCAL_TIMEOUT_S if is_waited_for else deadline)
        if outcome == "finished":
            names = [remote.name for remote in self._remote if remote.is_finished]
            if names:
                self._run.write_complete([*self._run.complete, *names])


def send_missing(
    run: TrackedRun, names: Sequence[str], *, metrics: pathlib.Path, evals: pathlib.Path
) -> None:
    """Sends the numbers of a run that is done to remote trackers that do not have all of them."""
    complete = run.complete
    missing = [name for name in names if TRACKERS[name].is_remote and name not in complete]
    if not missing:
        return
    trackers = Trackers(run, tuple(missing))
    trackers.start(metrics, evals)
    run.write_complete(complete)
    trackers.finish("finished", limit_s=SEND_TIMEOUT_S)
    for name in missing:
        if name in run.complete:
            distributed.log(f"{name}: has all values of this run")


@contextlib.contextmanager
def open_trackers(run: TrackedRun, names: tuple[str, ...]) -> Iterator[Trackers]:
    """Context of the trackers of a run, which finishes them at its end."""
    trackers = Trackers(run, names)
    try:
        yield trackers
    except BaseException:
        trackers.finish("failed")
        raise
    trackers.finish(trackers.outcome)
