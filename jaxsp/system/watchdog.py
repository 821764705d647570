"""Watchdog: ends a process that hangs, and writes a heartbeat file for external monitors."""

import json
import math
import os
import pathlib
import platform
import threading
import time
from datetime import timedelta

from jaxsp.core import durations, exit_codes, files
from jaxsp.system import distributed, run_status
from jaxsp.system.run_status import Activity, RunStatus

HEARTBEAT_INTERVAL_S = 5.0
"""Time between two heartbeats, and between two checks for progress."""

MESSAGE_TIMEOUT_S = 10.0
"""Time limit for printing the stacks of a process that hangs."""

# Times without progress that count as a hang, unless run.step_timeout is set
MIN_TIMEOUT_S = 600.0
TIMEOUT_FACTOR = 10
"""Multiple of the expected time."""
MAX_TIMEOUT_S = 86_400.0
"""Limit for a step whose duration is unknown."""

MIN_CPU_USE = 0.05
"""Minimum CPU seconds per second of a process whose CPU devices compute.

Threads that all wait for each other use none: XLA may run independent collectives in different
orders on different devices.
"""

_MIN_WRITTEN_BYTES = 2**20
"""Bytes written between two checks that count as progress of a write; heartbeats are smaller."""


class Watchdog:
    """Context in which a thread checks the status of a run for progress.

    Without progress in time, it prints the stacks of all threads and ends all processes with exit
    code 75. It needs the GIL for that. If code hangs while it holds the GIL, the other processes
    detect it, and the heartbeat stops.

    Args:
        step_timeout: run.step_timeout.
        heartbeat_file: file that is rewritten every few seconds; None: no file.
        has_cpu_devices: JAX's devices are CPUs, all of this process. A step of unknown duration,
            such as the first, then makes progress as long as this process uses CPU time.
    """

    def __init__(
        self,
        status: RunStatus,
        *,
        step_timeout: timedelta | None = None,
        heartbeat_file: pathlib.Path | None = None,
        has_cpu_devices: bool = False,
    ):
        self._status = status
        self._step_timeout_s = None if step_timeout is None else step_timeout.total_seconds()
        self._has_cpu_devices = has_cpu_devices
        self._interval_s = min(HEARTBEAT_INTERVAL_S, (self._step_timeout_s or math.inf) / 4)
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if heartbeat_file is not None:  # in a thread that an unresponsive disk may block
            args = (heartbeat_file,)
            self._threads.append(
                threading.Thread(target=self._write_heartbeats, args=args, daemon=True)
            )
        self._bytes_written = 0
        self._cpu_s = time.process_time()

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end = "ended" if kind is None else "failed"
        self._status.activity = Activity(description=end, is_watched=False)
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def choose_timeout(self, activity: Activity) -> tuple[float, str]:
        """Seconds without progress that count as a hang, and the rule that they follow."""
        if not activity.is_watched:
            return math.inf, ""
        if self._step_timeout_s is not None:
            return self._step_timeout_s, "run.step_timeout"
        if activity.expected_s is not None:
            rule = f"{TIMEOUT_FACTOR} times the expected time"
            return max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * activity.expected_s), rule
        rule = "no step has finished"
        if self._has_cpu_devices:  # the minimum is enough, because CPU use is progress too
            return MIN_TIMEOUT_S, f"{rule}, and this process uses no CPU time"
        if activity.estimated_s is None:
            return MAX_TIMEOUT_S, rule
        return max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * activity.estimated_s), rule

    def _watch(self) -> None:
        last_check = time.monotonic()
        while not self._closed.wait(self._interval_s):
            since_check_s = time.monotonic() - last_check
            if since_check_s > 2 * self._interval_s + HEARTBEAT_INTERVAL_S:
                self._status.heartbeat()  # the whole process was suspended
            last_check = time.monotonic()
            self._check_activity()

    def _check_activity(self) -> None:
        activity = self._status.activity
        bytes_before = self._bytes_written
        self._bytes_written = run_status.read_bytes_written() if activity.is_writing else 0
        used_s = time.process_time() - self._cpu_s
        self._cpu_s += used_s
        has_written = self._bytes_written > bytes_before + _MIN_WRITTEN_BYTES
        is_unlimited = activity.expected_s is None and self._step_timeout_s is None
        is_computing = self._has_cpu_devices and used_s > MIN_CPU_USE * self._interval_s
        if (activity.is_writing and has_written) or (is_unlimited and is_computing):
            self._status.heartbeat()
            return
        idle_s = time.monotonic() - activity.last_progress
        limit_s, rule = self.choose_timeout(activity)
        if idle_s <= limit_s:
            return
        text = (
            f"{activity.description}: no progress for {durations.describe(round(idle_s))}; "
            f"the limit is {durations.describe(round(limit_s))} ({rule}). "
            f"Exiting with code {exit_codes.HUNG}: the same command resumes from the "
            "last checkpoint. Stacks of all threads:"
        )
        # In a thread: stderr may be a file on an unresponsive disk
        printer = threading.Thread(target=distributed.log_stacks, args=(text,), daemon=True)
        printer.start()
        printer.join(MESSAGE_TIMEOUT_S)
        distributed.abort_job(exit_codes.HUNG)

    def _write_heartbeats(self, file: pathlib.Path) -> None:
        """Writes the heartbeat file, at last after the end of the run.

        A full disk must not end a run with nothing to save yet.
        """
        is_closed = is_broken = False
        while True:
            activity = self._status.activity
            fields = {
                "host": platform.node(),
                "pid": os.getpid(),
                "step": self._status.num_finished,
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
