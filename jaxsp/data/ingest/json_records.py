"""Reads JSON records from lines or from one array; reports duplicate keys and invalid UTF-8."""

import collections
import io
import json
import re
from collections.abc import Iterator
from typing import Any

_WHITESPACE = re.compile(r"[ \t\r\n]*")


def read_lines(stream: io.BufferedReader) -> Iterator[tuple[int, Any, str | None]]:
    """Yields line number, record and problem of each line that is not empty."""
    decoder = _Decoder()
    for number, line in enumerate(stream, 1):
        record = None
        problem = None
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if not text:
                continue
            record = decoder.decode(text)
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text ({error})."
        except (ValueError, RecursionError) as error:
            problem = (
                f"is not JSON ({error}); each line must be one record, or a .json file one array "
                "of records."
            )
        duplicates = decoder.pop_problem()
        yield number, record, problem or duplicates


def read_array(text: str) -> Iterator[tuple[int, Any, str | None]]:
    """Yields number, record and problem of each element.
    Args: text: with surrogates in place of bytes that are not UTF-8.
    Raises: ValueError if the text is not one complete array."""
    decoder = _Decoder()
    place = 0

    def peek() -> str:
        """Returns the next character that is not a space; empty at the end."""
        nonlocal place
        match = _WHITESPACE.match(text, place)
        assert match is not None, "no spaces match too"
        place = match.end()
        return text[place : place + 1]

    def take(expected: str) -> str:
        nonlocal place
        character = peek()
        if not character:
            raise ValueError("the array has no end")
        if character not in expected:
            raise ValueError(f"expected {' or '.join(expected)}, not {character}")
        place += 1
        return character

    number = 0
    separator = take("[")
    if peek() == "]":
        separator = take("]")
    while separator != "]":
        number += 1
        if not peek():
            raise ValueError("the array has no end")
        begin = place
        record, place = decoder.raw_decode(text, begin)
        problem = decoder.pop_problem() or utf8_problem(text[begin:place])
        yield number, record, problem
        separator = take(",]")
    if peek():
        raise ValueError(f"expected nothing after the array, not {peek()}")


def utf8_problem(text: str) -> str | None:
    """Returns the problem of text with surrogates in place of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8 text."
    return None


class _Decoder(json.JSONDecoder):
    """Decodes JSON, and records keys that an object has twice: json silently keeps the last."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._build_object)
        self._duplicates: list[str] = []

    def _build_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            counts = collections.Counter(name for name, _ in pairs)
            self._duplicates += [name for name in result if counts[name] > 1]
        return result

    def pop_problem(self) -> str | None:
        problem = f"has {self._duplicates[0]} twice." if self._duplicates else None
        self._duplicates.clear()
        return problem
