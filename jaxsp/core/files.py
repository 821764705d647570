"""Small files that are written atomically and may be damaged, and checksums of large ones."""

import contextlib
import errno
import json
import os
import pathlib
import zlib
from typing import Any

PARTIAL_SUFFIX = ".partial"

CHECKSUM_SUFFIX = ".crc32"
"""Suffix of the file with the checksum of a large file."""

_BLOCK_BYTES = 2**20

_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, None)
"""errno values that mean a damaged or missing file. Others are machine faults."""


def write_atomic(path: pathlib.Path, content: str | bytes, *, is_durable: bool = True) -> None:
    """Writes a small file so that readers see either the old content or the new one, as a whole.

    Args: is_durable: also after a power failure, which takes a disk some milliseconds.
    """
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    if is_durable:
        sync_dir(path.parent)


def write_json(path: pathlib.Path, result: dict[str, Any]) -> None:
    """Writes numbers as JSON. Raises: ValueError for those that are not finite."""
    write_atomic(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the fields of a JSON file; None if it does not exist or is damaged.

    Raises: OSError if it cannot be read for another reason, such as permissions.
    """
    try:
        return parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def parse_json(content: bytes | str | None) -> dict[str, Any] | None:
    """Returns the fields of a JSON object; None for anything else that a bad disk can leave."""
    try:
        fields = json.loads(content or b"")
    except (ValueError, RecursionError):  # not JSON; not UTF-8; a number or a nesting too large
        return None
    return fields if isinstance(fields, dict) else None


def is_damage(error: Exception) -> bool:
    """True for an error that a damaged or missing file may cause; False for a machine fault.

    Damage can cause any error in a library that parses the file.
    """
    if isinstance(error, OSError):
        return error.errno in _DAMAGE_ERRNOS
    return not isinstance(error, MemoryError)


def sync(path: pathlib.Path) -> None:
    """Makes a file's content survive a power failure. Raises: OSError."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_dir(folder: pathlib.Path) -> None:
    """Makes new names in a folder survive a power failure, where the file system supports it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def write_checksum(path: pathlib.Path, *, content: pathlib.Path | None = None) -> None:
    """Writes the checksum of a file beside it.

    Args: content: file that gets the name `path` afterwards; default: `path`.
    """
    text = f"{_compute_checksum(content or path)}\n"
    write_atomic(_checksum_file(path), text)


def is_intact(path: pathlib.Path) -> bool:
    """True if a file has the checksum beside it. Reads the whole file, 2 GB per second."""
    try:
        return _checksum_file(path).read_text(encoding="ascii") == f"{_compute_checksum(path)}\n"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return False


def remove_with_checksum(path: pathlib.Path) -> None:
    """Removes a file and its checksum, if they exist. Raises: OSError."""
    path.unlink(missing_ok=True)
    _checksum_file(path).unlink(missing_ok=True)


def _checksum_file(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}{CHECKSUM_SUFFIX}")


def _compute_checksum(path: pathlib.Path) -> str:
    """CRC-32 and size of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
        return f"{checksum:08x} {file.tell()}"
