"""Checks of paths in the config."""

import os
import pathlib
import stat

from jaxsp.core.errors import UserError

_MAX_NAME_BYTES = 255


def expand_user(text: str, *, field: str | None = None) -> pathlib.Path:
    """Returns the path with a leading `~` or `~name` replaced by that user's home folder.

    Raises: UserError for a user who does not exist, and for a name that no file can have.
    """
    try:
        return expand_home(text)
    except ValueError as error:
        prefix = f"{field} = {text}: " if field else ""
        raise UserError(f"{prefix}{error}.") from None


def expand_home(text: str) -> pathlib.Path:
    """Replaces a leading `~` like `expand_user`. Raises: ValueError, for a field's validator."""
    try:
        # pathlib drops a leading ./, so ./~x would become ~x
        path = pathlib.Path(text).expanduser() if text.startswith("~") else pathlib.Path(text)
    except RuntimeError:
        home = pathlib.Path(text).parts[0]
        raise ValueError(
            f"{home} must be the home folder of a user of this machine. "
            f"Write the whole path, or ./{text} for a name that begins with ~"
        ) from None
    longest = max((os.fsencode(part) for part in path.parts), key=len, default=b"")
    if len(longest) > _MAX_NAME_BYTES:
        raise ValueError(
            f"file names must have at most {_MAX_NAME_BYTES} bytes, and one has {len(longest)}. "
            "Correct the path"
        )
    return path


def is_path(name: str) -> bool:
    """True if a name must be a path: hub names have at most one slash, in the middle."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def check_folder(path: pathlib.Path, *, field: str) -> None:
    """Checks that a path is a folder, or that nothing known prevents creating one there.

    Raises: UserError for a file, and for a path that the system refuses: circular links, names that
        are too long, folders without permission.
    """
    try:
        is_file = not stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(
            f"{field} = {path}: cannot be used: {error.strerror}. Name another folder."
        ) from None
    if is_file:
        raise UserError(f"{field} = {path}: is a file. Name a folder.")
