"""Output of commands: streams that never fail, and texts without secrets.

What cannot be written is lost, and the command goes on: a reader such as `head` or `tee` ends, a
terminal closes, the disk of a log is full, or an encoding lacks a character. rich would end the
process with SystemExit when a reader has ended.
"""

import base64
import io
import os
import re
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any

from jaxsp.core import files

_full_disks: dict[int, str] = {}  # last such error of each file descriptor


class _OutputFile(io.FileIO):
    """File descriptor whose failed writes are lost."""

    def write(self, data: Any) -> int:
        try:
            num_written = super().write(data)
            if num_written is not None:  # None: full, and set not to block
                return num_written
        except OSError as error:
            if error.errno in files.DISK_FULL_ERRNOS:  # others: the reader has ended
                _full_disks[self.fileno()] = os.strerror(error.errno)
        return memoryview(data).nbytes


def find_full_disk() -> str | None:
    """Describes the full disk that lost output of stdout; None if there is none."""
    return _full_disks.get(1)


def open_output(fd: int, like: Any) -> io.TextIOWrapper:
    """Opens a stream to a file descriptor, with encoding and buffering of another stream."""
    file = _OutputFile(fd, "w", closefd=False)
    is_unbuffered = getattr(like, "write_through", False)  # python -u
    stream: Any = io.TextIOWrapper(
        file if is_unbuffered else io.BufferedWriter(file),
        encoding=getattr(like, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=getattr(like, "line_buffering", False),
        write_through=is_unbuffered,
    )
    stream.mode = "w"  # as Python's own
    return stream


def protect() -> None:
    """Replaces stdout and stderr by streams that never fail, unless something else has.
    Closed descriptors become /dev/null. Otherwise the next file would get XLA's messages."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number
    if sys.stdout is sys.__stdout__:
        sys.stdout = open_output(1, sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = open_output(2, sys.__stderr__)


_SECRET_NAME = re.compile(r"(^|_)(TOKEN|[A-Z]*KEY|PASSWORD|PASSWD|PASSPHRASE)$|SECRET")
_ADDRESS_NAME = re.compile(r"(^|_)(UR[IL]S?|ENDPOINT|DSN|PROXY|CONNECTION_STRING)(_|$)")
_URL = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]*://[^\s"'<>`]*""")


def strip_credentials(address: str, mark: str = "") -> str:
    """Returns an address without user, password, query and fragment.

    A password may contain any character that a URL should not have: everything before the last @ is
    left out. An address without a host, such as a path, may contain @.

    Args: mark: text in their place, with the separators @, ? and #.
    """
    scheme, separator, rest = address.partition("://") if "://" in address else ("", "", address)
    before, at, after = rest.rpartition("@")
    if at and (":" in before or (separator and not rest.startswith("/"))):
        rest = f"{mark}@{after}" if mark else after
    if separator and (query := re.search(r"[?#]", rest)):
        rest = rest[: query.start()] + (query[0] + mark if mark else "")
    return f"{scheme}{separator}{rest}"


def is_secret_name(name: str) -> bool:
    """True for the name of a variable or an option whose value is a secret."""
    is_text = name.lower().endswith(("pad_token", "bos_token", "eos_token", "unk_token"))
    return not is_text and _SECRET_NAME.search(name.upper()) is not None


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns a text with *** instead of secrets.

    Secrets are the values of variables such as WANDB_API_KEY, and user, password, query and
    fragment of URLs, those of variables and those in the text.
    """
    secrets: list[str] = []
    for name, value in environment.items():
        if is_secret_name(name):
            secrets.append(value)
        elif _ADDRESS_NAME.search(name.upper()):
            rest = value.partition("://")[2] or value
            userinfo, at, host = rest.rpartition("@")
            if at:
                basic = base64.b64encode(userinfo.encode()).decode()
                secrets += [userinfo, userinfo.partition(":")[2], basic]
            query = "".join(re.split(r"[?#]", host, maxsplit=1)[1:])
            secrets += [query, *(value for _, value in urllib.parse.parse_qsl(query))]
    forms: set[str] = set()  # as they may be written in a URL or in quotes
    for secret in secrets:
        forms |= {secret, secret.strip(), repr(secret)[1:-1]}
        forms |= {urllib.parse.quote(secret, safe=safe) for safe in ("", "/")}
        forms |= {urllib.parse.quote_plus(secret), urllib.parse.unquote(secret)}
        forms.add(urllib.parse.unquote_plus(secret))
    for form in sorted(forms, key=len, reverse=True):
        if len(form) >= 4:  # shorter ones are parts of many words
            text = text.replace(form, "***")
    return _URL.sub(lambda match: strip_credentials(match[0], "***"), text)
