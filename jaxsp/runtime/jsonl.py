"""JSON Lines files that lose no record to a full disk or a killed process."""

import dataclasses
import errno
import json
import os
import pathlib
import sys
from typing import TYPE_CHECKING

from jaxsp.runtime import distributed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors for a disk, a quota or a file that is full."""


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
            _print_error(
                f"{self._path}: {len(self._pending):,} bytes ARE LOST, since the disk is still full"
            )
        self._file.close()

    def _write(self) -> None:
        num_written = 0
        end = self._file.seek(0, os.SEEK_END)  # jaxsp.eval appends lines too
        try:
            while num_written < len(self._pending):
                num_written += self._file.write(self._pending[num_written:])
        except OSError as error:
            if error.errno not in _DISK_FULL_ERRNOS:
                raise
            self._file.truncate(end)  # removes a partial record
            if not self._is_full:
                _print_error(
                    f"{self._path} CANNOT BE WRITTEN: {error.strerror}. "
                    "Records wait in memory until there is space"
                )
            self._is_full = True
            return
        if self._is_full:
            _print_error(f"{self._path} is written again, and no record is missing")
        self._is_full = False
        self._pending.clear()


def _print_error(text: str) -> None:
    with distributed.ignore_broken_pipe():
        print(text, file=sys.stderr, flush=True)


def append_record(path: pathlib.Path, record: "DataclassInstance") -> None:
    """Appends a record as a line to a file, which may be new or end in the middle of a line."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(dataclasses.asdict(record), allow_nan=False).encode() + b"\n")


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
