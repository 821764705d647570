"""Small files: atomic writes, reads of regular files only; and checksums of large ones."""

import contextlib
import errno
import json
import os
import pathlib
import stat
import tempfile
import zlib
from typing import Any

from jaxsp.core.errors import UserError

_MODEL_FILES = "*.json *.jinja *.model* *.safetensors *.tiktoken *.txt".split()
_MODEL_FILES += ["additional_chat_templates", "additional_chat_templates/*"]
"""Patterns of the files that are read from a folder of a model, a tokenizer or an adapter."""

PARTIAL_SUFFIX = ".partial"

CHECKSUM_SUFFIX = ".crc32"
"""Suffix of the file with the checksum of a large file."""

_BLOCK_BYTES = 2**20

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errno values of a full disk, an exceeded quota, or a file as large as allowed."""

_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, None)
"""errno values that mean a damaged or missing file. Others are machine faults."""


def write_atomic(path: pathlib.Path, content: str | bytes, *, is_durable: bool = True) -> None:
    """Writes a small file so that readers see either the old content or the new one, as a whole.

    Args: is_durable: make it survive a power failure, which takes a disk some milliseconds.
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


def write_output(path: pathlib.Path, content: str) -> None:
    """Writes a file that a user named. It may be a link, or a device such as /dev/stdout."""
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.write(content)
    else:
        write_atomic(pathlib.Path(os.path.realpath(path)), content)


def to_json(result: dict[str, Any]) -> str:
    """Numbers as JSON. Raises: ValueError for those that are not finite."""
    return json.dumps(result, indent=1, allow_nan=False) + "\n"


def write_json(path: pathlib.Path, result: dict[str, Any]) -> None:
    """Writes numbers as JSON. Raises: as `to_json`."""
    write_atomic(path, to_json(result))


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


def open_scratch() -> int:
    """Opens a file without a name, and returns its descriptor.

    It is in memory, except in builds of Python without memfd_create, such as conda's.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jaxsp")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_text(path: str | pathlib.Path) -> str:
    """Reads a file of UTF-8 text. Raises: OSError or ValueError, also for a pipe or a device.

    A pipe would be waited for, and /dev/zero read until memory runs out.
    """
    path = pathlib.Path(path)
    check_regular(path)
    return path.read_text(encoding="utf-8")


def check_regular(path: pathlib.Path) -> None:
    """Raises: OSError for anything except a file or a folder; ValueError for an invalid name."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "must be a regular file, not a pipe or a device", str(path))


def check_model_folder(folder: pathlib.Path, *, error_prefix: str = "") -> None:
    """Checks that the files in a model's folder are regular files, and inside of it.

    An archive can contain a symbolic link to a secret, which exports would copy. The hub's cache
    has links into its blobs.

    Raises: UserError
    """
    error_prefix += " " if error_prefix else ""
    resolved = folder.resolve()
    allowed = [resolved]
    if resolved.parent.name == "snapshots":
        allowed.append((resolved.parents[1] / "blobs").resolve())
    for path in sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern)):
        target = pathlib.Path(os.path.realpath(path))
        # weights are read as such, and never copied
        is_copied = path.suffix != ".safetensors"
        if is_copied and not any(target.is_relative_to(parent) for parent in allowed):
            raise UserError(
                f"{error_prefix}{path} is a link to {target}, outside of its folder. If you trust "
                "it, replace the link by a copy."
            )
        if target.exists():
            try:
                check_regular(target)
            except OSError as error:
                raise UserError(f"{error_prefix}{path}: {error.strerror}.") from None
