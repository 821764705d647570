"""Removes secrets from texts of trackers, stores and other libraries before they are printed."""

import base64
import os
import re
import urllib.parse
from collections.abc import Mapping

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
