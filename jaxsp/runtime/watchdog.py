"""Ends a process that hangs, and keeps a heartbeat for whoever looks at the run from outside."""

import json
import math
import os
import pathlib
import platform
import threading
import time
from types import TracebackType

from jaxsp.config import schema, yaml_io
from jaxsp.core import durations
from jaxsp.runtime import distributed, run_dir, run_status

BEAT_S = 5.0
"""Between two heartbeats, and two looks at the signs of life."""

WORDS_S = 10.0
"""For its last words."""

LEAST_S = 600.0
"""Nothing counts as hung earlier, unless run.step_timeout says so."""

TIMES = 10
"""Nor earlier than so many times what a step takes."""

_WRITTEN = 2**20
"""Bytes that reach files between two looks and are more than heartbeats."""


class Watchdog:
    """A thread that looks at the pace of a run, from when it is entered until it is left.

    Where no sign of life comes in time, it prints the stacks of all threads and ends all processes with processes.AGAIN. It
    needs Python's lock for that: code that holds it and hangs is seen by the other processes, and in the heartbeat.
    """

    def __init__(self, settings: schema.Run, pace: run_status.Pace, *, beats: bool):
        self._settings, self._pace, self._beats = settings, pace, beats
        self._path = pathlib.Path(settings.directory) / run_dir.HEARTBEAT
        timeout = settings.step_timeout
        self._between_s = BEAT_S if timeout is None else min(BEAT_S, 60 * timeout / 4)
        self._left = threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if beats:  # another thread: a disk that does not answer holds it
            self._threads.append(threading.Thread(target=self._beat_on, name="heartbeat", daemon=True))
        self._written = 0
        self._is_broken = False

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join()
        self._pace.does("ended" if kind is None else "failed", watched=False)
        self._beat()

    def limit_s(self, doing: run_status.Doing) -> float:
        """Seconds until the next sign of life that are too many."""
        if not doing.watched:
            return math.inf
        if self._settings.step_timeout is not None:
            return 60 * self._settings.step_timeout
        return math.inf if doing.expected_s is None else max(LEAST_S, TIMES * doing.expected_s)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._left.wait(self._between_s):
            if time.monotonic() - looked > 2 * self._between_s + BEAT_S:  # all of this process was stopped, not only the run
                self._pace.alive()
            looked = time.monotonic()
            self._look()

    def _beat_on(self) -> None:
        self._beat()
        while not self._left.wait(self._between_s):
            self._beat()

    def _look(self) -> None:
        doing = self._pace.now
        before, self._written = self._written, run_status.written() if doing.writes else 0
        if doing.writes and self._written > before + _WRITTEN:
            self._pace.alive()
            return
        silent_s, limit_s = time.monotonic() - doing.since, self.limit_s(doing)
        if silent_s > limit_s:
            by = "run.step_timeout" if self._settings.step_timeout is not None else f"{TIMES} times the usual"
            silent, limit = (durations.describe(round(value)) for value in (silent_s, limit_s))
            words = (
                f"{doing.what}: no sign of life for {silent}, and {limit} are too many ({by}). Where each thread "
                f"is, is below. Ends with exit code {distributed.AGAIN}: the same command goes on from the last checkpoint."
            )
            # in a thread: where they go may be a file on the disk that does not answer
            speaks = threading.Thread(target=_say, args=(words,), daemon=True)
            speaks.start()
            speaks.join(WORDS_S)
            distributed.fail(distributed.AGAIN)

    def _beat(self) -> None:
        """Writes the heartbeat; a full disk does not end a run that has nothing to save yet."""
        if not self._beats:
            return
        doing = self._pace.now
        fields = {
            "host": platform.node(),
            "pid": os.getpid(),
            "step": self._pace.num_ended,
            "doing": doing.what,
            "silent_s": round(time.monotonic() - doing.since, 1),
            "written_at": time.time(),
        }
        try:
            yaml_io.write(self._path, json.dumps(fields) + "\n")
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                distributed.say(f"{self._path}: cannot be written: {error.strerror}; the run goes on without a heartbeat")
            self._is_broken = True


def _say(words: str) -> None:
    distributed.say(words)
    distributed.say_stacks()
