"""Standard streams that never fail: what cannot be written is lost, and the command goes on.

A reader such as `head` or `tee` ends, a terminal closes, the disk of a log is full, or an encoding
lacks a character. rich would end the process with SystemExit when a reader has ended.
"""

import io
import os
import sys
from typing import Any

from jaxsp.core import files

_full_disks: dict[int, str] = {}  # last such error of each file descriptor


class _OutputFile(io.FileIO):
    """File descriptor whose failed writes are lost."""

    def write(self, data: Any) -> int:
        try:
            num_written = super().write(data)
            if num_written is not None:  # None: full, and set not to block
                return num_written
        except OSError as error:
            if error.errno in files.DISK_FULL_ERRNOS:  # others: the reader has ended
                _full_disks[self.fileno()] = os.strerror(error.errno)
        return memoryview(data).nbytes


def find_full_disk() -> str | None:
    """Describes the full disk that lost output of stdout; None if there is none."""
    return _full_disks.get(1)


def open_output(fd: int, like: Any) -> io.TextIOWrapper:
    """Opens a stream to a file descriptor, with encoding and buffering of another stream."""
    file = _OutputFile(fd, "w", closefd=False)
    is_unbuffered = getattr(like, "write_through", False)  # python -u
    stream: Any = io.TextIOWrapper(
        file if is_unbuffered else io.BufferedWriter(file),
        encoding=getattr(like, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=getattr(like, "line_buffering", False),
        write_through=is_unbuffered,
    )
    stream.mode = "w"  # as Python's own
    return stream


def protect() -> None:
    """Replaces stdout and stderr by streams that never fail, unless something else has.
    Closed descriptors become /dev/null. Otherwise the next file would get XLA's messages."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number
    if sys.stdout is sys.__stdout__:
        sys.stdout = open_output(1, sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = open_output(2, sys.__stderr__)
