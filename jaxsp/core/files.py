"""Files: paths and URLs in the config, atomic writes, reads of regular files, and checksums."""

import contextlib
import errno
import json
import os
import pathlib
import re
import stat
import zlib
from typing import Any

from jaxsp.core.errors import UserError

_MODEL_FILES = "*.json *.jinja *.model* *.safetensors *.tiktoken *.txt".split()
_MODEL_FILES += ["additional_chat_templates", "additional_chat_templates/*"]
"""Patterns of the files that are read from a folder of a model, a tokenizer or an adapter."""

PARTIAL_SUFFIX = ".partial"
_CHECKSUM_SUFFIX = ".crc32"

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errno values of a full disk, an exceeded quota, or a file as large as allowed."""

_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, None)
"""errno values that mean a damaged or missing file. Others are machine faults."""


def write_atomic(path: pathlib.Path, content: str | bytes, *, is_durable: bool = True) -> None:
    """Writes a small file so that readers see either the old content or the new one, as a whole.
    Args: is_durable: make it survive a power failure, which takes a disk some milliseconds."""
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    if is_durable:
        sync_dir(path.parent)


def to_json(result: dict[str, Any]) -> str:
    """Numbers as JSON. Raises: ValueError for those that are not finite."""
    return json.dumps(result, indent=1, allow_nan=False) + "\n"


def write_json(path: pathlib.Path, result: dict[str, Any]) -> None:
    """Writes numbers as JSON. Raises: as `to_json`."""
    write_atomic(path, to_json(result))


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the fields of a JSON file; None if it does not exist or is damaged.
    Raises: OSError if it cannot be read for another reason, such as permissions."""
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
    Damage can cause any error in a library that parses the file."""
    if isinstance(error, OSError):
        return error.errno in _DAMAGE_ERRNOS
    return not isinstance(error, MemoryError)


def sync_dir(folder: pathlib.Path) -> None:
    """Makes new names in a folder survive a power failure, where the file system supports it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def write_checksum(path: pathlib.Path) -> None:
    """Writes the checksum of a file beside it."""
    write_atomic(path.with_name(path.name + _CHECKSUM_SUFFIX), _compute_checksum(path))


def is_intact(path: pathlib.Path) -> bool:
    """True if a file has the checksum beside it. Reads the whole file, 2 GB per second."""
    try:
        checksum = path.with_name(path.name + _CHECKSUM_SUFFIX).read_bytes()
        return checksum == _compute_checksum(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _compute_checksum(path: pathlib.Path) -> bytes:
    """CRC-32 and size of a file, as a line."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
        return b"%08x %d\n" % (checksum, file.tell())


def read_text(path: str | pathlib.Path) -> str:
    """Reads a file of UTF-8 text. Raises: OSError or ValueError, also for a pipe or a device."""
    path = pathlib.Path(path)
    check_regular(path)
    return path.read_text(encoding="utf-8")


def check_regular(path: pathlib.Path) -> None:
    """Raises: OSError for anything except a file or a folder; ValueError for an invalid name."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "must be a regular file, not a pipe or a device", str(path))


def check_model_folder(folder: pathlib.Path) -> None:
    """Checks that the files in a model's folder are regular files, and inside of it.

    An archive can contain a symbolic link to a secret, which exports would copy. The hub's cache
    has links into its blobs. Raises: UserError for others.
    """
    root = folder.resolve()
    allowed = {root}
    if root.parent.name == "snapshots":
        allowed.add((root.parents[1] / "blobs").resolve())
    for path in sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern)):
        target = pathlib.Path(os.path.realpath(path))
        is_copied = path.suffix != ".safetensors"  # weights are only read
        if is_copied and allowed.isdisjoint((target, *target.parents)):
            raise UserError(
                f"{path} is a link to {target}, outside of its folder. If you trust it, replace "
                "the link by a copy."
            )
        if target.exists():
            try:
                check_regular(target)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}.") from None


def expand_user(text: str) -> pathlib.Path:
    """Returns the path with a leading `~` or `~name` replaced by that user's home folder.
    Raises: UserError for a user who does not exist, and for a name that no file can have."""
    try:
        # pathlib drops a leading ./, so ./~x would become ~x
        path = pathlib.Path(text).expanduser() if text.startswith("~") else pathlib.Path(text)
    except RuntimeError:
        raise UserError(
            f"{pathlib.Path(text).parts[0]} must be the home folder of a user of this machine. "
            f"Write the whole path, or ./{text} for a name that begins with ~."
        ) from None
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > 255:
        raise UserError(
            f"file names must have at most 255 bytes, and one has {longest}. Correct the path."
        )
    return path


def cache_dir() -> pathlib.Path:
    """Folder of copies and caches: `$XDG_CACHE_HOME/jaxsp`, or `~/.cache/jaxsp`."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "jaxsp")


def is_path(name: str) -> bool:
    """True if a name must be a path: hub names have at most one slash, in the middle."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def check_folder(path: pathlib.Path) -> None:
    """Checks that a path is a folder, or that nothing known prevents creating one there.

    Raises: UserError for a file, and for a path that the system refuses: circular links, names that
        are too long, folders without permission.
    """
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise UserError("is a file. Name a folder.")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(f"cannot be used: {error.strerror}. Name another folder.") from None


def is_url(text: str) -> bool:
    """True if a text begins like a URL, of an object store or not."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def check_url(url: str) -> None:
    """Checks the form of a URL. Raises: UserError with the rule and an example."""
    scheme, _, path = url.partition("://")
    if scheme not in ("s3", "gs"):  # each has an extra in pyproject.toml
        raise UserError("must be a path or begin with s3:// or gs://. Use s3://bucket/path.")
    example = f"{scheme}://bucket/path"
    if re.search(r"[@?#]", path):
        raise UserError(
            "must have only a bucket and a path, without credentials or options, which come from "
            f"the environment. Use {example}."
        )
    parts = path.rstrip("/").split("/")
    if len(parts) < 2 or not all(parts) or {".", ".."} & set(parts):
        raise UserError(f"must name a bucket and a path in it. Use {example}.")
