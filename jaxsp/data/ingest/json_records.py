"""Reads JSON records from lines or from one array; reports duplicate keys and invalid UTF-8.

An array is read as a stream, because its file may be larger than memory.
"""

import codecs
import collections
import io
import json
import re
from collections.abc import Iterator
from typing import Any

_CHUNK_BYTES = 2**20
"""Minimum bytes to read from an array at a time."""

_TAIL_CHARS = 16
"""Characters before the end of the text within which a JSON value may be cut: `-Infinity` and
`\\ud83d\\ude00` have 9 and 12."""

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


def is_array(stream: io.BufferedReader) -> bool:
    return _ArrayText(stream).peek() == "["


def read_array(stream: io.BufferedReader) -> Iterator[tuple[int, Any, str | None]]:
    """Yields number, record and problem of each element, with little more than one in memory.

    Raises: ValueError if the stream is not one complete array.
    """
    text = _ArrayText(stream)
    number = 0
    separator = text.take("[")
    if text.peek() == "]":
        separator = text.take("]")
    while separator != "]":
        number += 1
        yield number, *text.decode_value()
        separator = text.take(",]")
    if text.peek():
        raise ValueError(f"expected nothing after the array, not {text.peek()}")


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


class _ArrayText:
    """Text of a JSON array, read from a stream as needed."""

    def __init__(self, stream: io.BufferedReader):
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape").decode
        self._decoder = _Decoder()
        self._text = ""
        self._place = 0
        self._is_complete = False

    def peek(self) -> str:
        """Returns the next character that is not a space; empty at the end."""
        while True:
            match = _WHITESPACE.match(self._text, self._place)
            assert match is not None, "no spaces match too"
            self._place = match.end()
            if self._place < len(self._text) or self._is_complete:
                return self._text[self._place : self._place + 1]
            self._read_more()

    def take(self, expected: str) -> str:
        character = self.peek()
        if not character:
            raise ValueError("the array has no end")
        if character not in expected:
            raise ValueError(f"expected {' or '.join(expected)}, not {character}")
        self._place += 1
        return character

    def decode_value(self) -> tuple[Any, str | None]:
        if not self.peek():
            raise ValueError("the array has no end")
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                is_near_end = error.pos > len(self._text) - _TAIL_CHARS
                is_cut = is_near_end or error.msg.startswith("Unterminated string")
                if self._is_complete or not is_cut:
                    raise
            else:
                # a number at the end may go on
                if end < len(self._text) or self._is_complete:
                    problem = utf8_problem(self._text[self._place : end])
                    self._place = end
                    return value, self._decoder.pop_problem() or problem
            self._decoder.pop_problem()
            self._read_more()

    def _read_more(self) -> None:
        # doubles the text, so that a long record is parsed a few times, not once per chunk
        rest = self._text[self._place :]
        chunk = self._stream.read(max(_CHUNK_BYTES, len(rest)))
        self._text = rest + self._decode(chunk, final=not chunk)
        self._place = 0
        self._is_complete = not chunk
