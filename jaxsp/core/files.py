"""Small files: atomic writes, and reads of regular files only."""

import errno
import json
import os
import pathlib
import stat
from typing import Any

from jaxsp.core.errors import UserError

_MODEL_FILES = "*.json *.jinja *.model* *.safetensors *.tiktoken *.txt".split()
_MODEL_FILES += ["additional_chat_templates", "additional_chat_templates/*"]
"""Patterns of the files that are read from a folder of a model, a tokenizer or an adapter."""

PARTIAL_SUFFIX = ".partial"


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes a small file so that readers see either the old text or the new one, as a whole."""
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: pathlib.Path, result: dict[str, Any]) -> None:
    """Writes numbers as JSON. Raises: ValueError for those that are not finite."""
    write_atomic(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def read_text(path: str | pathlib.Path) -> str:
    """Reads a file of UTF-8 text. Raises: OSError or ValueError, also for a pipe or a device.

    A pipe would be waited for, and /dev/zero read until memory ends.
    """
    path = pathlib.Path(path)
    check_regular(path)
    return path.read_text(encoding="utf-8")


def check_regular(path: pathlib.Path) -> None:
    """Raises: OSError for anything except a file or a folder; ValueError for an invalid name."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "must be a regular file, not a pipe or a device", str(path))


def check_model_folder(folder: pathlib.Path, *, error_prefix: str) -> None:
    """Checks that the files in a model's folder are regular files, and inside of it.

    An archive can contain a symbolic link to a secret, which exports would copy. The hub's cache
    has links into its blobs.

    Raises: UserError
    """
    resolved = folder.resolve()
    allowed = [resolved]
    if resolved.parent.name == "snapshots":
        allowed.append((resolved.parents[1] / "blobs").resolve())
    for path in sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern)):
        target = pathlib.Path(os.path.realpath(path))
        if not any(target.is_relative_to(parent) for parent in allowed):
            raise UserError(
                f"{error_prefix} {path} is a link to {target}, outside of its folder. If you trust "
                "it, replace the link by a copy."
            )
        if target.exists():
            try:
                check_regular(target)
            except OSError as error:
                raise UserError(f"{error_prefix} {path}: {error.strerror}.") from None
