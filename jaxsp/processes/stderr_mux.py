"""Merges stderr of the processes of a node."""

import dataclasses
import math
import os
import queue
import subprocess
import sys
import threading
import time

from jaxsp.processes import distributed

PEER_LINE_DELAY_S = 2.0
"""Delay of the lines of processes other than 0. A line that another process prints within this time
is printed once."""

_LOST_PEER_PHRASES = ("from coordination service", "detected fatal errors")
"""Parts of the first line that JAX prints before it aborts a process because another is gone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
    text: str
    index: int
    time_s: float


class StderrMultiplexer:
    """Prints stderr of child processes: that of process 0 unchanged, other lines with a prefix.

    An error that all processes find is printed once, and an error of a single process is not lost.
    """

    def __init__(self, children: dict[int, subprocess.Popen]):
        self._queue: queue.SimpleQueue[_Line] = queue.SimpleQueue()
        self._pending: list[_Line] = []
        self._printed: dict[str, _Line] = {}
        """Lines printed recently, by text."""
        self._readers: list[threading.Thread] = []
        for index, child in children.items():
            assert child.stderr is not None, "a pipe"
            arguments = (index, child.stderr.fileno())
            reader = threading.Thread(target=self._read_stderr, args=arguments, daemon=True)
            reader.start()
            self._readers.append(reader)

    def print_lines(self, *, min_age_s: float) -> None:
        """Prints lines of processes other than 0 that are old enough and were not printed yet."""
        while not self._queue.empty():
            line = self._queue.get()
            if line.index == 0:
                self._printed[line.text] = line
            else:
                self._pending.append(line)
        now = time.monotonic()
        while self._pending and now - self._pending[0].time_s >= min_age_s:
            line = self._pending.pop(0)
            same = self._printed.get(line.text, line)
            is_old = abs(line.time_s - same.time_s) > PEER_LINE_DELAY_S
            if same.index == line.index or is_old:
                self._printed[line.text] = line
                text = f"{distributed.line_prefix(line.index)}{line.text}"
                print(text, file=sys.stderr, flush=True)
        oldest_s = self._pending[0].time_s if self._pending else now
        for line in [*self._printed.values()]:
            if line.time_s < oldest_s - PEER_LINE_DELAY_S:
                del self._printed[line.text]

    def close(self, *, failed: int | None) -> None:
        """Prints the remaining lines after all processes have ended.

        JAX prints 30 lines in a process that misses another one. They are left out, except those of
        process `failed`.
        """
        for reader in self._readers:
            # A process that a child has started may keep the pipe open
            reader.join(PEER_LINE_DELAY_S)
        self.print_lines(min_age_s=math.inf)
        lines = self._pending
        self._pending = []
        lost_peer: set[int] = set()
        for line in lines:
            is_report = any(phrase in line.text for phrase in _LOST_PEER_PHRASES)
            if is_report and failed not in (None, line.index):
                lost_peer.add(line.index)
            if line.index not in lost_peer:
                self._pending.append(line)
        self.print_lines(min_age_s=0)

    def _read_stderr(self, index: int, stderr: int) -> None:
        rest = b""
        while data := os.read(stderr, 2**16):
            if index == 0:
                sys.stderr.buffer.write(data)
                sys.stderr.flush()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._add_line(index, line)
        if rest:
            self._add_line(index, rest)

    def _add_line(self, index: int, line: bytes) -> None:
        final_state = line.rpartition(b"\r")[2]  # of a progress bar
        text = final_state.decode(errors="replace").removeprefix(distributed.line_prefix(index))
        self._queue.put(_Line(text=text, index=index, time_s=time.monotonic()))
