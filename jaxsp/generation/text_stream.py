"""Text of an answer while its tokens arrive."""

from typing import Any

_INCOMPLETE = "\ufffd"
"""Character of bytes that are no whole character yet."""


class TextStream:
    """Decodes tokens one after another.

    The text of a token depends on those around it: one character may be several tokens.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._length = 0
        """Characters that were returned."""

    def add(self, token: int) -> str:
        """Returns the text that a token completes; empty inside of a character."""
        self._ids.append(token)
        text = decode(self._tokenizer, self._ids)
        return "" if text.endswith(_INCOMPLETE) else self._take(text)

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        return self._take(decode(self._tokenizer, self._ids))

    def _take(self, text: str) -> str:
        new = text[self._length :]
        self._length = len(text)
        return new


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Text of an answer, without special tokens and as it was tokenized."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
