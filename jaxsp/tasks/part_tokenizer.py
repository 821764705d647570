"""Tokenizes a long text in parts, each as it is tokenized inside the text."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

Ids = Int32[np.ndarray, "_"]


class PartTokenizer:
    """Tokenizes parts of a text, each once.

    A long prompt repeats sentences of a pool, so its tokens are those of its parts, joined. They
    are also the tokens of the whole text if no token crosses the boundary between two parts. That
    holds for parts that begin after a line break or with a space: the splitting expressions of
    byte-level BPE (GPT-2, Llama 3, Qwen) end there, and tokens of SentencePiece have spaces only at
    their beginning. Each part is tokenized after a short text whose tokens are then removed.
    Otherwise tokenizers that begin every text with a space (Llama 2) would add one to each part.
    If a tokenizer merges across such a boundary, the part has its tokens without the context: other
    tokens than those of the whole text, for the same characters.
    """

    def __init__(self, tokenize: Callable[[str], list[int]]):
        self._tokenize = tokenize
        self._cache: dict[tuple[str, str], Ids] = {}

    def start(self, text: str) -> Ids:
        """Tokenizes the beginning of the whole text."""
        return self._tokenize_after("", text)

    def after_line(self, text: str) -> Ids:
        """Tokenizes a part that begins a line."""
        return self._tokenize_after("Text.\n", text)

    def after_word(self, text: str) -> Ids:
        """Tokenizes a part that begins with a space or a line break, after a letter or a dot."""
        return self._tokenize_after("Text", text)

    def split(
        self, tokenize_part: Callable[[str], Ids], question: str, answer: str
    ) -> tuple[Ids, Ids]:
        """Tokenizes the last part of the prompt with its answer, and splits them.

        The answer begins with a space, which belongs to its first token or is a token of its own.
        The answer's tokens are those that differ from the tokens of the question without it, so
        they are what the model would write. If a tokenizer merges the end of the question with the
        answer, that token belongs to the answer.
        """
        asked = tokenize_part(question)
        whole = tokenize_part(question + answer)
        num_common = _count_common(asked, whole)
        return whole[:num_common], whole[num_common:]

    def _tokenize_after(self, context: str, text: str) -> Ids:
        key = (context, text)
        if key not in self._cache:
            before = np.array(self._tokenize(context) if context else [], np.int32)
            whole = np.array(self._tokenize(context + text), np.int32)
            if _count_common(before, whole) == len(before):
                self._cache[key] = whole[len(before) :]
            else:
                self._cache[key] = np.array(self._tokenize(text), np.int32)
        return self._cache[key]


def _count_common(first: Ids, second: Ids) -> int:
    """Number of tokens at the beginning that are equal."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
