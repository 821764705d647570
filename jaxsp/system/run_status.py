"""Status of a run for other threads: activity, last progress, and durations of steps."""

import collections
import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Iterator

SLOW_STEP_S = 10.0
"""Steps slower than this are not dispatched ahead, so that a shutdown waits for one step, not two.

The devices then idle between two steps for the milliseconds that a dispatch takes: less than a
thousandth of the step.
"""


@dataclasses.dataclass(kw_only=True)
class Activity:
    """Current activity of a run. While it lasts, only `last_progress` changes."""

    description: str
    is_watched: bool = True
    """True if the next sign of progress has a time limit."""
    expected_s: float | None = None
    """Expected seconds from one sign of progress to the next; None if unknown."""
    estimated_s: float | None = None
    """Upper estimate of these seconds by arithmetic, where they are unknown; None if there is none.
    """
    is_writing: bool = False
    """True if bytes written to files are progress."""
    duration_s: float | None = None
    """Seconds that it took last time; None if unknown."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    last_progress: float = dataclasses.field(default_factory=time.monotonic)


def read_bytes_written() -> int:
    """Bytes that this process has written to files so far; 0 if the kernel does not count them."""
    try:
        fields = pathlib.Path("/proc/self/io").read_text(encoding="ascii").split()
        return int(fields[fields.index("wchar:") + 1])
    except (OSError, ValueError):
        return 0


class RunStatus:
    """Status of a run: the training loop writes it, the watchdog adds signs of progress."""

    def __init__(self) -> None:
        self.activity = Activity(description="preparing", is_watched=False)
        self.num_finished: int | None = None
        """Number of finished steps since step 0; None before training."""
        self.checkpoint_s: float | None = None
        """Seconds from the start of the last checkpoint until it was written."""
        self.evaluation_s: float | None = None
        self._num_running = 0
        """Number of steps that are dispatched and not finished."""
        self._durations_s: collections.deque[float] = collections.deque(maxlen=20)
        """Seconds of the last steps."""

    @contextlib.contextmanager
    def compiling(self, description: str) -> Iterator[None]:
        """Context of a compilation, of unknown duration, in the middle of an activity."""
        interrupted = self.activity
        self.activity = Activity(description=f"compiling {description}", is_watched=False)
        try:
            yield
        finally:
            interrupted.last_progress = time.monotonic()
            self.activity = interrupted

    def begin_writing(self, description: str) -> None:
        """Records the start of a write. Its signs of progress are expected as often as steps."""
        self.activity = Activity(description=description, expected_s=self.step_s, is_writing=True)

    def heartbeat(self) -> None:
        """Records a sign of progress."""
        self.activity.last_progress = time.monotonic()

    def waiting_for_step(self, num_finished: int) -> None:
        """Records that the next step can start."""
        self.num_finished = num_finished
        description = f"step {num_finished + 1}"
        self.activity = Activity(description=description, expected_s=self.step_s or None)

    def dispatched(self, *, estimated_s: float | None = None) -> None:
        """Records the dispatch of a step, which starts when the step before it is finished.

        Args: estimated_s: upper estimate of its duration; None if there is none.
        """
        self._num_running += 1
        if self._num_running == 1:  # it has started already
            self.activity.estimated_s = estimated_s
            self.activity.expected_s = self.step_s or None

    def finished(self, step: int, seconds: float) -> None:
        """Records the end of a step, and its duration."""
        self._num_running -= 1
        self._durations_s.append(seconds)
        self.waiting_for_step(step)

    @property
    def step_s(self) -> float:
        """Median seconds of the last steps; 0 before the first step."""
        return statistics.median([*self._durations_s] or [0.0])

    @property
    def is_slow(self) -> bool:
        """True if the next step must not be dispatched ahead."""
        return self.step_s > SLOW_STEP_S

    @property
    def num_dispatched(self) -> int:
        """Number of dispatched steps since step 0."""
        return (self.num_finished or 0) + self._num_running

    def remaining_s(self) -> float:
        """Expected seconds until the dispatched steps, or an evaluation, are finished.

        Steps and evaluations of unknown duration count as 0.
        """
        activity = self.activity
        if activity.duration_s is not None:
            return max(0.0, activity.began + activity.duration_s - time.monotonic())
        expected_s = self._num_running * self.step_s
        return max(0.0, activity.last_progress + expected_s - time.monotonic())
