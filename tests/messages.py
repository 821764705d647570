"""Assertions about messages that survive a rewrite of the wording."""

import re
from typing import Any


def assert_names(message: Any, *parts: str, start: str = "") -> None:
    """Asserts that a message starts with `start`, and then contains every part, in any order.

    Parts are fields, values, places, numbers and suggestions, and a noun where nothing else
    distinguishes two errors. A part must be a whole word or number: 8 is not in 128 or 1,008.
    """
    text = " ".join(str(message).split())
    assert text.startswith(start), f"{start!r} does not start: {text}"
    missing = [part for part in parts if not _pattern(part).search(text[len(start) :])]
    assert not missing, f"{missing} not in: {text}"


def numbers(message: Any) -> list[float]:
    """Returns the numbers in a message in order, without separators of thousands."""
    return [float(found.replace(",", "")) for found in _NUMBER.findall(str(message))]


_NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\w)|(?<![\w.])\d+(?:\.\d+)?")


def _pattern(part: str) -> re.Pattern[str]:
    before = r"(?<!\w)(?<!\d[.,])" if re.match(r"\w", part) else ""
    after = r"(?!\w)(?![.,]\d)" if re.search(r"\w$", part) else ""
    return re.compile(before + re.escape(part) + after, re.IGNORECASE)
