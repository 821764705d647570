"""JSON Lines files that lose no record to a full disk or a killed process."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from jaxsp.runtime import distributed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AppendFile:
    """File to which records are appended, each of them completely or not at all.

    While the disk is full, records wait in memory, and are written as soon as there is space again.
    Both are printed once.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._pending = bytearray()
        self._file = path.open("ab", buffering=0)
        self._is_full = False

    def add(self, record: bytes) -> None:
        """Appends a record, or keeps it in memory if the disk is full."""
        self._pending += record
        self._write()

    def sync(self) -> None:
        """Makes all records outlive a power cut. Raises: OSError if the disk is full."""
        self._write()
        if self._pending:
            reason = f"{os.strerror(errno.ENOSPC)}, needed by {self._path.name}"
            raise OSError(errno.ENOSPC, reason)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes the remaining records, and prints how much is lost if the disk is still full."""
        self._write()
        if self._pending:
            distributed.log(
                f"{self._path}: {len(self._pending):,} bytes ARE LOST, since the disk is still full"
            )
        self._file.close()

    def _write(self) -> None:
        try:
            with _lock(self._file):
                self._write_or_truncate()
        except OSError as error:
            if error.errno not in _DISK_FULL_ERRNOS:
                raise
            if not self._is_full:
                distributed.log(
                    f"{self._path} CANNOT BE WRITTEN: {error.strerror}. "
                    "Records wait in memory until there is space"
                )
            self._is_full = True
            return
        if self._is_full:
            distributed.log(f"{self._path} is written again, and no record is missing")
        self._is_full = False

    def _write_or_truncate(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        num_written = 0
        try:
            while num_written < len(self._pending):
                num_written += self._file.write(self._pending[num_written:])
        except OSError:
            self._file.truncate(end)  # removes a partial record
            raise
        self._pending.clear()


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


def to_line(record: "DataclassInstance") -> bytes:
    """Returns the line of a record."""
    return json.dumps(dataclasses.asdict(record), allow_nan=False).encode() + b"\n"


def append_record(path: pathlib.Path, record: "DataclassInstance") -> None:
    """Appends a record as a line to a file, which may be new or end in the middle of a line.

    Raises: OSError if the disk is full.
    """
    line = to_line(record)
    with path.open("ab+", buffering=0) as file, _lock(file):
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        while line:  # a write to an almost full disk writes a part, and the next one fails
            line = line[file.write(line) :]


def truncate_after(path: pathlib.Path, step: int) -> None:
    """Removes lines of steps after `step`, and damaged lines, from a file that may not exist."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_of_step(line, step)]
    if kept == lines:
        return
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _is_of_step(line: bytes, last_step: int) -> bool:
    """True for a complete line of a step up to the last one."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= last_step
    except (ValueError, TypeError, KeyError):  # a damaged disk can leave anything
        return False
