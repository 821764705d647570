"""Frequent words: the most frequent of many coded words, as RULER's `fwe` (NVIDIA/RULER)."""

import bisect
import math
from typing import Literal

import numpy as np

from jaxsp.tasks.task import Ids, PartTokenizer, Task, TooShortError, draw_words

_INTRODUCTION = "Count how often each coded word occurs in this text.\n"

_QUESTION = (
    "\nQuestion: Which three words, apart from the dots, occur most often in the text, the most "
    "frequent first?\nAnswer: The three words are"
)

_DOTS = " ..."

_MIN_DOTS = 32
"""Smallest number of dots for which ranks 2 to 5 have different counts: 8, 3, 2, 1. They also
differ for every larger number."""


class FrequentWords(Task):
    """The three most frequent of many coded words (fwe).

    Their counts fall with the square of their rank; ranks 2 to 4 are asked for.

    As in RULER, words have 6 random letters, counts follow a zeta distribution with exponent 2 and
    are rounded down, and the most frequent word is replaced by dots, which do not count. Different
    from RULER: the order of the answer is defined, the most frequent first, and shorter texts than
    those where ranks 2 to 5 have different counts are refused; the vocabulary is not cut at a word
    per 50 tokens, which would change texts of less than about 600 tokens.
    """

    task: Literal["frequent_words"] = "frequent_words"

    def make_sample(
        self,
        parts: PartTokenizer,
        random: np.random.Generator,
        *,
        max_tokens: int,
        depth: float | None,
    ) -> tuple[Ids, Ids]:
        assert depth is None
        word_random, order_random = random.spawn(2)
        num_words = math.isqrt(max(max_tokens, _MIN_DOTS)) + 1
        words = [f" {word}" for word in draw_words(word_random, num_words, num_letters=6)]
        words[0] = _DOTS
        first = np.concatenate([parts.start(_INTRODUCTION), parts.after_line("Text:")])
        answer_text = ",".join(words[1:4])
        last, answer = parts.split(parts.after_word, _QUESTION, answer_text)
        ids = [parts.after_word(word) for word in words]
        sizes = np.array([*map(len, ids)])
        num_fixed = len(first) + len(last) + len(answer)
        min_tokens = num_fixed + int(sizes @ _count(_MIN_DOTS, num_words))
        if max_tokens < min_tokens:
            raise TooShortError(min_tokens)
        num_tokens = max_tokens - num_fixed
        # the largest number for which all words fit
        num_dots = _MIN_DOTS + bisect.bisect(
            range(_MIN_DOTS + 1, num_tokens + 1),
            num_tokens,
            key=lambda number: sizes @ _count(number, num_words),
        )
        ranks = np.repeat(np.arange(num_words), _count(num_dots, num_words))
        order_random.shuffle(ranks)
        if ranks[-1] == 0:
            # the line break after dots could be a part of their token
            other = int(ranks.argmax())
            ranks[-1] = ranks[other]
            ranks[other] = 0
        return np.concatenate([first, *(ids[rank] for rank in ranks), last]), answer


def _count(num_dots: int, num_words: int) -> np.ndarray:
    """Number of times each word occurs, first the dots, which are the most frequent."""
    return num_dots // np.arange(1, num_words + 1) ** 2
