"""Ends a process that hangs, and keeps a heartbeat for whoever looks at the run from outside."""

import json
import math
import os
import pathlib
import platform
import threading
import time
from types import TracebackType

from jaxsp.config import yaml_io
from jaxsp.config.schema import RunConfig
from jaxsp.core import durations
from jaxsp.runtime import distributed, run_dir, run_status
from jaxsp.runtime.run_status import Activity, RunStatus

HEARTBEAT_INTERVAL_S = 5.0
"""Between two heartbeats, and two looks at the signs of life."""

MESSAGE_TIMEOUT_S = 10.0
"""For its last words."""

MIN_TIMEOUT_S = 600.0
"""Nothing counts as hung earlier, unless run.step_timeout says so."""

TIMEOUT_FACTOR = 10
"""Nor earlier than so many times what a step takes."""

_MIN_WRITTEN_BYTES = 2**20
"""Bytes that reach files between two looks and are more than heartbeats."""


class Watchdog:
    """A thread that looks at the pace of a run, from when it is entered until it is left.

    Where no sign of life comes in time, it prints the stacks of all threads and ends all processes with processes.AGAIN. It
    needs Python's lock for that: code that holds it and hangs is seen by the other processes, and in the heartbeat.
    """

    def __init__(self, config: RunConfig, status: RunStatus, *, has_heartbeat: bool):
        self._config, self._status, self._has_heartbeat = config, status, has_heartbeat
        self._path = pathlib.Path(config.directory) / run_dir.HEARTBEAT_FILE
        self._interval_s = HEARTBEAT_INTERVAL_S
        if config.step_timeout is not None:
            quarter_s = config.step_timeout.total_seconds() / 4
            self._interval_s = min(HEARTBEAT_INTERVAL_S, quarter_s)
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if has_heartbeat:  # another thread: a disk that does not answer holds it
            self._threads.append(
                threading.Thread(target=self._run_heartbeat, name="heartbeat", daemon=True)
            )
        self._bytes_written = 0
        self._is_broken = False

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._status.begin("ended" if kind is None else "failed", is_watched=False)
        self._write_heartbeat()

    def timeout_s(self, activity: Activity) -> float:
        """Seconds until the next sign of life that are too many."""
        if not activity.is_watched:
            return math.inf
        if self._config.step_timeout is not None:
            return self._config.step_timeout.total_seconds()
        return (
            math.inf
            if activity.expected_s is None
            else max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * activity.expected_s)
        )

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(self._interval_s):
            if (
                time.monotonic() - looked > 2 * self._interval_s + HEARTBEAT_INTERVAL_S
            ):  # all of this process was stopped, not only the run
                self._status.heartbeat()
            looked = time.monotonic()
            self._check_activity()

    def _run_heartbeat(self) -> None:
        self._write_heartbeat()
        while not self._closed.wait(self._interval_s):
            self._write_heartbeat()

    def _check_activity(self) -> None:
        doing = self._status.activity
        before, self._bytes_written = (
            self._bytes_written,
            run_status.read_bytes_written() if doing.is_writing else 0,
        )
        if doing.is_writing and self._bytes_written > before + _MIN_WRITTEN_BYTES:
            self._status.heartbeat()
            return
        silent_s, limit_s = time.monotonic() - doing.last_progress, self.timeout_s(doing)
        if silent_s > limit_s:
            by = (
                "run.step_timeout"
                if self._config.step_timeout is not None
                else f"{TIMEOUT_FACTOR} times the usual"
            )
            silent, limit = (durations.describe(round(value)) for value in (silent_s, limit_s))
            words = (
                f"{doing.description}: no sign of life for {silent}, and {limit} are too many ({by}). Where each thread "
                f"is, is below. Ends with exit code {distributed.EXIT_HUNG}: the same command goes on from the last checkpoint."
            )
            # in a thread: where they go may be a file on the disk that does not answer
            speaks = threading.Thread(target=_print_stacks, args=(words,), daemon=True)
            speaks.start()
            speaks.join(MESSAGE_TIMEOUT_S)
            distributed.abort_job(distributed.EXIT_HUNG)

    def _write_heartbeat(self) -> None:
        """Writes the heartbeat; a full disk does not end a run that has nothing to save yet."""
        if not self._has_heartbeat:
            return
        doing = self._status.activity
        fields = {
            "host": platform.node(),
            "pid": os.getpid(),
            "step": self._status.num_finished,
            "doing": doing.description,
            "silent_s": round(time.monotonic() - doing.last_progress, 1),
            "written_at": time.time(),
        }
        try:
            yaml_io.write_atomic(self._path, json.dumps(fields) + "\n")
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                distributed.log(
                    f"{self._path}: cannot be written: {error.strerror}; the run goes on without a heartbeat"
                )
            self._is_broken = True


def _print_stacks(words: str) -> None:
    distributed.log(words)
    distributed.log_stacks()
