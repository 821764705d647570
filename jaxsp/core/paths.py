"""Checks of paths, and of URLs of object stores (s3://bucket/path), in the config."""

import os
import pathlib
import re
import stat

from jaxsp.core.errors import UserError


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
