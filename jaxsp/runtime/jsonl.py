"""Files that records are added to, one by one, and that lose none of them to a full disk or a kill."""

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
"""What a disk, a quota or a file that is full answers."""


def _print_error(words: str) -> None:
    with distributed.ignore_broken_pipe():
        print(words, file=sys.stderr, flush=True)


class AppendFile:
    """A file that records are added to, each of them whole or not at all.

    While the disk is full they wait in memory: that is said once, and they are written as soon as there is room again.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._pending = path, bytearray()
        self._file = path.open("ab", buffering=0)
        self._is_full = False

    def add(self, record: bytes) -> None:
        self._pending += record
        self._write()

    def sync(self) -> None:
        """Makes all that was added outlive a power cut. Raises: OSError where it finds no room."""
        self._write()
        if self._pending:
            raise OSError(
                errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, and {self._path.name} waits for it"
            )
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._write()
        if self._pending:
            _print_error(
                f"{self._path}: {len(self._pending):,} bytes of it ARE LOST, the disk is still full"
            )
        self._file.close()

    def _write(self) -> None:
        done = 0
        self._end = self._file.seek(0, os.SEEK_END)  # jaxsp.eval adds lines too
        try:
            while done < len(self._pending):
                done += self._file.write(self._pending[done:])
        except OSError as error:
            if error.errno not in _DISK_FULL_ERRNOS:
                raise
            self._file.truncate(self._end)  # what is there of a record
            if not self._is_full:
                _print_error(
                    f"{self._path} CANNOT BE WRITTEN: {error.strerror}. What belongs there waits for room"
                )
            self._is_full = True
            return
        if self._is_full:
            _print_error(f"{self._path} is written again, nothing is missing")
        self._is_full = False
        self._pending.clear()


def append_record(path: pathlib.Path, record: "DataclassInstance") -> None:
    """Writes an evaluation as a line of a file that may be there, and may end in the middle of a line."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(dataclasses.asdict(record), allow_nan=False).encode() + b"\n")


def truncate_after(path: pathlib.Path, step: int) -> None:
    """Takes from a file of lines those of steps after `step`, and any that was cut short; does nothing where there is none."""

    def is_kept(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):  # whatever a damaged disk has made of it
            return False

    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if is_kept(line)]
        if kept != lines:
            partial = path.with_name(f"{path.name}.partial")
            with partial.open("wb") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
