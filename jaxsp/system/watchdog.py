"""Status of a run, and the watchdog that ends a process without progress.

It also writes a heartbeat file for external monitors.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import platform
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from jaxsp.core import files, units
from jaxsp.core.errors import ExitCode
from jaxsp.system import distributed

HEARTBEAT_INTERVAL_S = 5.0  # time between two heartbeats, and between two checks for progress
MESSAGE_TIMEOUT_S = 10.0  # time limit for printing the stacks of a process that hangs

# Times without progress that count as a hang, unless run.step_timeout is set
MIN_TIMEOUT_S = 600.0
TIMEOUT_FACTOR = 10  # multiple of the expected time
MAX_TIMEOUT_S = 86_400.0  # limit for a step whose duration is unknown

_MIN_WRITTEN_BYTES = 2**20
"""Bytes written between two checks that count as progress of a write; heartbeats are smaller."""

SLOW_STEP_S = 10.0
"""Steps slower than this are not dispatched ahead, so that a shutdown waits for one step, not two.
The devices then idle between two steps for the milliseconds that a dispatch takes: less than a
thousandth of the step."""


@dataclasses.dataclass(kw_only=True)
class Activity:
    """Current activity of a run. While it lasts, only `last_progress` changes."""

    description: str
    is_watched: bool = True
    """True if the next sign of progress has a time limit."""
    expected_s: float | None = None
    """Seconds from one sign of progress to the next, at most; None: unknown."""
    is_writing: bool = False
    """True if bytes written to files are progress."""
    duration_s: float | None = None
    """Seconds that the activity took last time."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    last_progress: float = dataclasses.field(default_factory=time.monotonic)


def read_bytes_written() -> int:
    """Bytes that this process has written to files so far; 0 if the kernel does not count them."""
    try:
        fields = pathlib.Path("/proc/self/io").read_text(encoding="ascii").split()
        return int(fields[fields.index("wchar:") + 1])
    except (OSError, ValueError):
        return 0


@dataclasses.dataclass(eq=False)
class RunStatus:
    """Status of a run: the training loop writes it, the watchdog adds signs of progress."""

    activity: Activity = dataclasses.field(
        default_factory=lambda: Activity(description="preparing", is_watched=False)
    )
    num_finished: int | None = None
    """Number of finished steps since step 0; None before training."""
    checkpoint_s: float | None = None
    """Seconds from the start of the last checkpoint until it was written."""
    evaluation_s: float | None = None
    _num_running: int = 0  # steps that are dispatched and not finished
    _durations_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=20)
    )

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
        Args: estimated_s: upper estimate of its duration, for the first one."""
        self._num_running += 1
        if self._num_running == 1:  # it has started already
            self.activity.expected_s = self.step_s or estimated_s

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
        """Expected seconds until the dispatched steps, or an evaluation, are finished; 0 if their
        duration is unknown."""
        activity = self.activity
        if activity.duration_s is not None:
            return max(0.0, activity.began + activity.duration_s - time.monotonic())
        expected_s = self._num_running * self.step_s
        return max(0.0, activity.last_progress + expected_s - time.monotonic())


class Watchdog:
    """Context in which a thread checks the status of a run for progress.

    Without progress in time, it prints the stacks of all threads and ends all processes with exit
    code 75. It needs the GIL for that. If code hangs while it holds the GIL, the other processes
    detect it, and the heartbeat stops.
    """

    def __init__(
        self,
        status: RunStatus,
        *,
        step_timeout: timedelta | None = None,
        heartbeat_file: pathlib.Path | None = None,
    ):
        self.status = status
        self.step_timeout = step_timeout
        self._closed = threading.Event()
        self._bytes_written = 0
        self._interval_s = HEARTBEAT_INTERVAL_S
        if step_timeout is not None:
            self._interval_s = min(self._interval_s, step_timeout.total_seconds() / 4)
        calls = [self._watch]
        if heartbeat_file is not None:  # in a thread that an unresponsive disk may block
            calls.append(functools.partial(self._write_heartbeats, heartbeat_file))
        self._threads = [
            threading.Thread(target=call, name="watchdog", daemon=True) for call in calls
        ]

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end = "ended" if kind is None else "failed"
        self.status.activity = Activity(description=end, is_watched=False)
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def choose_timeout(self, activity: Activity) -> tuple[float, str]:
        """Seconds without progress that count as a hang, and the rule that they follow."""
        if not activity.is_watched:
            return math.inf, ""
        if self.step_timeout is not None:
            return self.step_timeout.total_seconds(), "run.step_timeout"
        if activity.expected_s is None:
            return MAX_TIMEOUT_S, "no step has finished"
        seconds = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * activity.expected_s)
        return seconds, f"{TIMEOUT_FACTOR} times the expected time"

    def _watch(self) -> None:
        last_check = time.monotonic()
        while not self._closed.wait(self._interval_s):
            since_check_s = time.monotonic() - last_check
            if since_check_s > 2 * self._interval_s + HEARTBEAT_INTERVAL_S:
                self.status.heartbeat()  # the whole process was suspended
            last_check = time.monotonic()
            self._check_activity()

    def _check_activity(self) -> None:
        activity = self.status.activity
        bytes_before = self._bytes_written
        self._bytes_written = read_bytes_written()
        if activity.is_writing and self._bytes_written > bytes_before + _MIN_WRITTEN_BYTES:
            self.status.heartbeat()
            return
        idle_s = time.monotonic() - activity.last_progress
        limit_s, rule = self.choose_timeout(activity)
        if idle_s <= limit_s:
            return
        text = (
            f"{activity.description}: no progress for {units.format_seconds(round(idle_s))}; "
            f"the limit is {units.format_seconds(round(limit_s))} ({rule}). "
            f"Exiting with code {ExitCode.HUNG}: the same command resumes from the "
            "last checkpoint. Stacks of all threads:"
        )
        # In a thread: stderr may be a file on an unresponsive disk
        printer = threading.Thread(target=distributed.log_stacks, args=(text,), daemon=True)
        printer.start()
        printer.join(MESSAGE_TIMEOUT_S)
        distributed.abort_job(ExitCode.HUNG)

    def _write_heartbeats(self, file: pathlib.Path) -> None:
        """Writes the heartbeat file, at last after the end of the run.
        A full disk must not end a run with nothing to save yet."""
        is_closed = is_broken = False
        while True:
            activity = self.status.activity
            fields = {
                "host": platform.node(),
                "pid": os.getpid(),
                "step": self.status.num_finished,
                "activity": activity.description,
                "idle_s": round(time.monotonic() - activity.last_progress, 1),
                "written_at": time.time(),
            }
            try:
                files.write_atomic(file, json.dumps(fields) + "\n", is_durable=False)
                is_broken = False
            except OSError as error:
                if not is_broken:
                    distributed.log(
                        f"{file}: cannot be written: {error.strerror}; "
                        "the run continues without a heartbeat"
                    )
                is_broken = True
            if is_closed:
                return
            is_closed = self._closed.wait(self._interval_s)
