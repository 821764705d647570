"""JSON Lines files that lose no record to a full or failing disk, or to a killed process."""

import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import IO, Any

from jaxsp.core import files
from jaxsp.system import distributed

DAMAGED_SUFFIX = ".damaged"


class AppendFile:
    """File to which records are appended, each of them completely or not at all.

    While it cannot be written (full disk, failing network), records wait in memory until it can.
    Both are printed once.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._pending = bytearray()
        self._file: IO[bytes] | None = None
        self._error: OSError | None = None
        self._partial_begin: int | None = None
        """Place of a part of a record that could not be removed; None if there is none."""
        self._write()

    def add(self, record: bytes) -> None:
        """Appends a record, or keeps it in memory if the file cannot be written."""
        self._pending += record
        self._write()

    def sync(self) -> None:
        """Makes all records survive a power failure. Raises: OSError if that is impossible now."""
        self._write()
        if self._error is not None:
            text = f"{self._error.strerror}, in writing {self._path.name}"
            raise OSError(self._error.errno, text)
        assert self._file is not None, "a file that is not open has an error"
        try:
            os.fsync(self._file.fileno())
        except OSError:
            self._close_file()
            raise

    def close(self) -> None:
        """Writes the remaining records, and prints how much is lost if that is not possible."""
        self._write()
        if self._error is not None:
            lost = f"{len(self._pending):,} bytes ARE LOST: {self._error.strerror}"
            distributed.log(f"{self._path}: {lost}")
        self._close_file()

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = self._open()
            with _lock(self._file):
                self._write_pending(self._file)
        except OSError as error:
            if self._error is None:
                problem = f"CANNOT BE WRITTEN: {error.strerror}. Records wait in memory"
                distributed.log(f"{self._path} {problem}")
            self._error = error
            if error.errno not in files.DISK_FULL_ERRNOS:
                self._close_file()  # its handle may be stale
            return
        if self._error is not None:
            distributed.log(f"{self._path} is written again, and no record is missing")
        self._error = None

    def _write_pending(self, file: IO[bytes]) -> None:
        end = file.seek(0, os.SEEK_END)
        if self._partial_begin is not None:
            # unless another process has appended a line since
            if self._partial_begin < end <= self._partial_begin + len(self._pending):
                end = file.truncate(self._partial_begin)
            self._partial_begin = None
        num_written = 0
        try:
            while num_written < len(self._pending):
                num_written += file.write(self._pending[num_written:])
        except OSError:
            self._partial_begin = end
            file.truncate(end)
            self._partial_begin = None
            raise
        self._pending.clear()

    def _open(self) -> IO[bytes]:
        return self._path.open("ab", buffering=0)

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


@contextlib.contextmanager
def _lock(file: IO[bytes]) -> Iterator[None]:
    """Context in which no other process appends: jaxsp.eval writes to the files of a run too."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def to_line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def append_record(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Appends a record as a line to a file, which may be new or end in the middle of a line.
    Raises: OSError if the disk is full."""
    line = to_line(record)
    with path.open("ab+", buffering=0) as file, _lock(file):
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        while line:  # a write to an almost full disk writes a part, and the next one fails
            line = line[file.write(line) :]


def truncate_after(path: pathlib.Path, step: int, *, has_regular_steps: bool = False) -> None:
    """Removes lines of steps after `step`; moves damaged ones to a file beside it, and prints both
    damage and a missing end. The file may not exist.

    Args: has_regular_steps: True if the steps of the lines have equal distances.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept: list[bytes] = []
    steps: list[int] = []
    damaged: list[bytes] = []
    for line in lines:
        fields = files.parse_json(line) if line.endswith(b"\n") else None
        line_step = (fields or {}).get("step")
        if not isinstance(line_step, int):
            # the last line of a killed run may be incomplete
            match = re.match(rb'{"step": (\d+),', line)
            if line.endswith(b"\n") or (match and float(match[1]) <= step):
                damaged.append(line.rstrip(b"\r\n") + b"\n")
        elif line_step <= step:
            kept.append(line)
            steps.append(line_step)
    if damaged:
        copy = path.with_name(f"{path.name}{DAMAGED_SUFFIX}")
        with copy.open("ab") as file:
            file.writelines(damaged)
            file.flush()
            os.fsync(file.fileno())
        number = f"{len(damaged)} of {len(lines)} lines"
        distributed.log(f"{path}: {number} are damaged, and now in {copy.name}")
    distances = (after - before for before, after in itertools.pairwise(steps[-10:]))
    if has_regular_steps and steps and step - steps[-1] >= max([1, *distances]):
        distributed.log(f"{path}: ends at step {steps[-1]}, but the checkpoint is of step {step}")
    if kept != lines:
        files.write_atomic(path, b"".join(kept))
