"""Haystacks: sentences about nothing, with needles at chosen places.

RULER has a noise of five sentences that repeat, or essays. These are 8,192 different sentences,
made of the templates and words of words.yaml, one a line. A sample has them in random order, and
again in another order when all are used, which is after about 64,000 words.
"""

import functools
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from jaxsp.config import yaml_io
from jaxsp.tasks.part_tokenizer import Ids, PartTokenizer

_NUM_SENTENCES = 8192

_MAX_MISSES = 50
"""Number of sentences that are tried for the last tokens and do not fit."""


@functools.cache
def read_words() -> dict[str, list[str]]:
    """Words by their use, and the templates of sentences."""
    text = pathlib.Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
    content = yaml_io.load(text)
    return {
        name: words.split() if isinstance(words, str) else words for name, words in content.items()
    }


@functools.cache
def make_sentences() -> tuple[str, ...]:
    """Lines of all haystacks, the same for every seed."""
    words = read_words()
    random = np.random.default_rng(0)

    def draw(slot: re.Match[str]) -> str:
        choices = words[slot[1]]
        return choices[random.integers(len(choices))]

    sentences: dict[str, None] = {}
    while len(sentences) < _NUM_SENTENCES:
        template = words["sentences"][random.integers(len(words["sentences"]))]
        sentences[re.sub(r"\{(\w+)\}", draw, template) + "\n"] = None
    return tuple(sentences)


def fill(parts: PartTokenizer, random: np.random.Generator, num_tokens: int) -> list[Ids]:
    """Draws sentences until no further one fits.

    The last of them are short ones that fit into the remaining tokens.
    """
    sentences = make_sentences()
    lines: list[Ids] = []
    misses = 0
    while True:
        for index in random.permutation(len(sentences)):
            line = parts.after_line(sentences[index])
            if len(line) <= num_tokens:
                lines.append(line)
                num_tokens -= len(line)
            else:
                misses += 1
            if num_tokens == 0 or misses == _MAX_MISSES:
                return lines


def insert(lines: Sequence[Ids], needles: Sequence[Ids], depths: Sequence[float]) -> list[Ids]:
    """Inserts needles between sentences.

    RULER counts sentences; these depths are fractions of the haystack's tokens, rounded to the
    nearest end of a sentence.

    Args: depths: depth of each needle, in ascending order.
    """
    ends = np.cumsum([0, *map(len, lines)])
    result = list(lines)
    for needle, depth in reversed(list(zip(needles, depths, strict=True))):
        place = int(np.abs(ends - depth * ends[-1]).argmin())
        result.insert(place, needle)
    return result
