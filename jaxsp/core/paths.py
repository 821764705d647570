"""Paths in the config."""

import os
import pathlib

from jaxsp.core import errors

_MAX_NAME_BYTES = 255
"""Longest name of a file or folder on Linux."""


def expand_user(text: str, *, field: str) -> pathlib.Path:
    """Returns the path with a leading `~` or `~name` replaced by that user's home folder.

    Raises: UserError for a user who does not exist, and for a name that no file can have.
    """
    try:
        # pathlib drops a leading ./, so that ./~x would be taken for ~x
        path = pathlib.Path(text).expanduser() if text.startswith("~") else pathlib.Path(text)
    except RuntimeError:
        home = pathlib.Path(text).parts[0]
        raise errors.UserError(
            f"{field} = {text}: {home} is not a user's home folder on this machine. "
            f"Write the whole path, or ./{text} for a name that begins with ~."
        ) from None
    longest = max((os.fsencode(part) for part in path.parts), key=len, default=b"")
    if len(longest) > _MAX_NAME_BYTES:
        raise errors.UserError(
            f"{field} = {text}: has a name of {len(longest)} bytes; a file's name has at most "
            f"{_MAX_NAME_BYTES}. Correct the path."
        )
    return path
