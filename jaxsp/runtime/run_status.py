"""What the run is doing, when it last showed a sign of life, and how long its steps take; read by other threads."""

import collections
import contextlib
import dataclasses
import pathlib
import statistics
import threading
import time
from collections.abc import Iterator

SLOW_STEP_S = 10.0
"""Behind a step that takes longer none is sent ahead: a stop would have to wait for both. The devices then idle between two
steps for as long as it takes to send one, some milliseconds: less than a thousandth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activity:
    """What the run is doing."""

    description: str
    last_progress: float = dataclasses.field(default_factory=time.monotonic)
    """The last sign of life."""
    is_watched: bool = True
    """Whether the next has to come in time."""
    expected_s: float | None = None
    """Until the next; None where nobody can know."""
    is_writing: bool = False
    """Bytes that reach files are signs of life."""
    expected_end: float | None = None
    """When it will have ended, as far as that is known."""


def read_bytes_written() -> int:
    """Bytes that this process has written to files so far; 0 where the kernel does not count them."""
    try:
        fields = pathlib.Path("/proc/self/io").read_text(encoding="ascii").split()
        return int(fields[fields.index("wchar:") + 1])
    except (OSError, ValueError):
        return 0


class RunStatus:
    """Written by the loop, and signs of life by the watchdog too; other threads read it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.activity = Activity(description="preparing", is_watched=False)
        self.num_finished: int | None = None
        """Steps that have ended, since step 0; None before training."""
        self.checkpoint_s: float | None = None
        """From the beginning of the last checkpoint until it was written."""
        self.evaluation_s: float | None = None
        """What the last evaluation took."""
        self._running: dict[int, int] = {}
        """Row lengths of the steps that were sent and have not ended."""
        self._durations_s: dict[int, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=20)
        )
        """Seconds of the last steps, by their row length."""

    def begin(
        self,
        description: str,
        *,
        is_watched: bool = True,
        expected_s: float | None = None,
        is_writing: bool = False,
        duration_s: float | None = None,
    ) -> None:
        """Notes what begins now. Args: takes_s: in all, where it was done before."""
        until = None if duration_s is None else time.monotonic() + duration_s
        with self._lock:
            self.activity = Activity(
                description=description,
                is_watched=is_watched,
                expected_s=expected_s,
                is_writing=is_writing,
                expected_end=until,
            )

    @contextlib.contextmanager
    def compiling(self, description: str) -> Iterator[None]:
        """Something that nobody knows the time of, in the middle of what the run is doing."""
        before = self.activity
        self.begin(f"compiling {description}", is_watched=False)
        yield
        with self._lock:
            self.activity = dataclasses.replace(before, last_progress=time.monotonic())

    def heartbeat(self) -> None:
        """Notes a sign of life."""
        with self._lock:
            self.activity = dataclasses.replace(self.activity, last_progress=time.monotonic())

    def waiting_for_step(self, num_finished: int) -> None:
        """Notes that the next step could begin."""
        self.num_finished = num_finished
        self.begin(f"step {num_finished + 1}", expected_s=self._expected_step_s(num_finished + 1))

    def dispatched(self, step: int, row_tokens: int) -> None:
        """Notes that a step was sent to the devices; it begins when the one before it ends."""
        self._running[step] = row_tokens
        if len(self._running) == 1:  # since the step before ended, it was waited for
            with self._lock:
                self.activity = dataclasses.replace(
                    self.activity, expected_s=self._expected_step_s(step)
                )

    def finished(self, step: int, seconds: float) -> None:
        """Notes that a step has ended, and how long it took."""
        self._durations_s[self._running.pop(step)].append(seconds)
        self.waiting_for_step(step)

    @property
    def step_s(self) -> float:
        """What the last steps took, at the middle of those of the row length that takes longest; 0 before the first."""
        return max(
            (statistics.median([*took]) for took in [*self._durations_s.values()]), default=0.0
        )

    @property
    def is_slow(self) -> bool:
        return self.step_s > SLOW_STEP_S

    @property
    def num_dispatched(self) -> int:
        """Steps sent to the devices, since step 0."""
        return (self.num_finished or 0) + len(self._running)

    def remaining_s(self) -> float:
        """Until the steps that were sent, or an evaluation, have ended, as far as such were met before."""
        if self.activity.expected_end is not None:
            return max(0.0, self.activity.expected_end - time.monotonic())
        expected = [self._expected_step_s(step) or 0.0 for step in [*self._running]]
        return (
            max(0.0, sum(expected) - (time.monotonic() - self.activity.last_progress))
            if expected
            else 0.0
        )

    def _expected_step_s(self, step: int) -> float | None:
        """The middle of what steps with rows as long took; before the step is sent, of those that take longest."""
        if step not in self._running:
            return self.step_s or None
        took = self._durations_s.get(self._running[step])
        return statistics.median([*took]) if took else None
