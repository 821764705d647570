"""Checks of messages in tests: fields, values, numbers, names and suggestions, in any wording."""

import contextlib
import pathlib
import re
from collections.abc import Iterator

import pytest

from jaxsp.core.errors import UserError


def read_banner(directory: pathlib.Path) -> str:
    """Returns the banner of a run in one line, however it is wrapped."""
    return " ".join((directory / "banner.txt").read_text(encoding="utf-8").split())


def containing(*parts: object) -> str:
    """Returns a regular expression for text with these parts in this order, in one line.

    A part that begins or ends with a digit is not found in a longer number: 4 is not in 14, 4.5 or
    4,000.

    Example: `pytest.raises(UserError, match=messages.containing("mesh.seq = 6", 1, "2 or 4"))`.
    """
    return ".*".join(map(_pattern, map(str, parts)))


def _pattern(part: str) -> str:
    before = r"(?<![\d.,])" if part[0].isdigit() else ""
    after = r"(?![.,]?\d)" if part[-1].isdigit() else ""
    return before + re.escape(part) + after


def assert_names(message: object, *parts: str, start: str = "") -> None:
    """Asserts that a message starts with `start`, and then contains every part, in any order.

    A part is a whole word or number, and case is ignored: "list" is not in "listed".
    """
    text = " ".join(str(message).split())
    assert text.startswith(start), f"{start!r} does not start: {text}"
    missing = [part for part in parts if not _word(part).search(text[len(start) :])]
    assert not missing, f"{missing} not in: {text}"


@contextlib.contextmanager
def assert_refused(*parts: str, start: str = "") -> Iterator[None]:
    """Asserts that a UserError is raised whose message has these parts, as in `assert_names`."""
    with pytest.raises(UserError) as raised:
        yield
    assert_names(raised.value, *parts, start=start)


def _word(part: str) -> re.Pattern[str]:
    before = r"(?<!\w)" if re.match(r"\w", part) else ""
    after = r"(?!\w)" if re.search(r"\w$", part) else ""
    return re.compile(before + _pattern(part) + after, re.IGNORECASE)


def numbers(message: object) -> list[float]:
    """Returns the numbers in a message in order, those with separators of thousands too."""
    actual = re.findall(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)", str(message))
    return [float(number.replace(",", "")) for number in actual]
