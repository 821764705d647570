"""What the run is doing, when it last showed a sign of life, and how long its steps take; read by other threads."""

import collections
import contextlib
import dataclasses
import pathlib
import statistics
import threading
import time
from collections.abc import Iterator

SLOW_S = 10.0
"""Behind a step that takes longer none is sent ahead: a stop would have to wait for both. The devices then idle between two
steps for as long as it takes to send one, some milliseconds: less than a thousandth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doing:
    """What the run is doing."""

    what: str
    since: float = dataclasses.field(default_factory=time.monotonic)
    """The last sign of life."""
    watched: bool = True
    """Whether the next has to come in time."""
    expected_s: float | None = None
    """Until the next; None where nobody can know."""
    writes: bool = False
    """Bytes that reach files are signs of life."""
    until: float | None = None
    """When it will have ended, as far as that is known."""


def written() -> int:
    """Bytes that this process has written to files so far; 0 where the kernel does not count them."""
    try:
        fields = pathlib.Path("/proc/self/io").read_text(encoding="ascii").split()
        return int(fields[fields.index("wchar:") + 1])
    except (OSError, ValueError):
        return 0


class Pace:
    """Written by the loop, and signs of life by the watchdog too; other threads read it."""

    def __init__(self) -> None:
        self._writing = threading.RLock()
        self.now = Doing(what="preparing", watched=False)
        self.num_ended: int | None = None
        """Steps that have ended, since step 0; None before training."""
        self.save_s: float | None = None
        """From the beginning of the last checkpoint until it was written."""
        self.evaluation_s: float | None = None
        """What the last evaluation took."""
        self._running: dict[int, int] = {}
        """Row lengths of the steps that were sent and have not ended."""
        self._took: dict[int, collections.deque[float]] = collections.defaultdict(lambda: collections.deque(maxlen=20))
        """Seconds of the last steps, by their row length."""

    def does(
        self,
        what: str,
        *,
        watched: bool = True,
        expected_s: float | None = None,
        writes: bool = False,
        takes_s: float | None = None,
    ) -> None:
        """Notes what begins now. Args: takes_s: in all, where it was done before."""
        until = None if takes_s is None else time.monotonic() + takes_s
        with self._writing:
            self.now = Doing(what=what, watched=watched, expected_s=expected_s, writes=writes, until=until)

    @contextlib.contextmanager
    def compiles(self, what: str) -> Iterator[None]:
        """Something that nobody knows the time of, in the middle of what the run is doing."""
        before = self.now
        self.does(f"compiling {what}", watched=False)
        yield
        with self._writing:
            self.now = dataclasses.replace(before, since=time.monotonic())

    def alive(self) -> None:
        """Notes a sign of life."""
        with self._writing:
            self.now = dataclasses.replace(self.now, since=time.monotonic())

    def waits(self, num_ended: int) -> None:
        """Notes that the next step could begin."""
        self.num_ended = num_ended
        self.does(f"step {num_ended + 1}", expected_s=self._expected(num_ended + 1))

    def sent(self, step: int, row_tokens: int) -> None:
        """Notes that a step was sent to the devices; it begins when the one before it ends."""
        self._running[step] = row_tokens
        if len(self._running) == 1:  # since the step before ended, it was waited for
            with self._writing:
                self.now = dataclasses.replace(self.now, expected_s=self._expected(step))

    def ended(self, step: int, seconds: float) -> None:
        """Notes that a step has ended, and how long it took."""
        self._took[self._running.pop(step)].append(seconds)
        self.waits(step)

    @property
    def step_s(self) -> float:
        """What the last steps took, at the middle of those of the row length that takes longest; 0 before the first."""
        return max((statistics.median([*took]) for took in [*self._took.values()]), default=0.0)

    @property
    def is_slow(self) -> bool:
        return self.step_s > SLOW_S

    @property
    def num_sent(self) -> int:
        """Steps sent to the devices, since step 0."""
        return (self.num_ended or 0) + len(self._running)

    def rest_s(self) -> float:
        """Until the steps that were sent, or an evaluation, have ended, as far as such were met before."""
        if self.now.until is not None:
            return max(0.0, self.now.until - time.monotonic())
        expected = [self._expected(step) or 0.0 for step in [*self._running]]
        return max(0.0, sum(expected) - (time.monotonic() - self.now.since)) if expected else 0.0

    def _expected(self, step: int) -> float | None:
        """The middle of what steps with rows as long took; before the step is sent, of those that take longest."""
        if step not in self._running:
            return self.step_s or None
        took = self._took.get(self._running[step])
        return statistics.median([*took]) if took else None
