"""Tasks that hide lines in a haystack of sentences about nothing, and ask for them at the end.

RULER has a noise of five sentences that repeat, or essays. These are 8,192 different sentences,
made of the templates and words of words.yaml, one a line. A sample has them in random order, and
again in another order when all are used, which is after about 64,000 words.
"""

import abc
import dataclasses
import functools
import pathlib
import re

import numpy as np

from jaxsp.config import yaml_io
from jaxsp.tasks.task import Ids, PartTokenizer, Task, TooShortError

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """Texts of one sample. Introduction and needles are lines and end with a line break."""

    introduction: str
    needles: tuple[str, ...]
    """Lines to hide, in the order of the text."""
    question: str
    """End of the prompt, after which only the answer is a natural continuation."""
    answer: str
    """Answer, which begins with a space."""


class HaystackTask(Task):
    """Task with an introduction, a haystack with needles, and a question.

    As in RULER the question is at the end, and its text includes the beginning of the answer, but
    the introduction, the needles and the question have other words.
    """

    @abc.abstractmethod
    def draw(self, random: np.random.Generator) -> Question:
        """Draws the texts of a sample."""

    def make_sample(
        self,
        parts: PartTokenizer,
        random: np.random.Generator,
        *,
        max_tokens: int,
        depth: float | None,
    ) -> tuple[Ids, Ids]:
        question = self.draw(random)
        first = parts.start(question.introduction)
        needles = [parts.after_line(needle) for needle in question.needles]
        last, answer = parts.split(parts.after_line, question.question, question.answer)
        num_fixed = len(first) + sum(map(len, needles)) + len(last) + len(answer)
        if num_fixed > max_tokens:
            raise TooShortError(num_fixed)
        depths = [depth] if depth is not None else sorted(random.random(len(needles)).tolist())
        lines = _fill(parts, random, max_tokens - num_fixed)
        # RULER's depths count sentences; these are fractions of the haystack's tokens
        ends = np.cumsum([0, *map(len, lines)])
        for needle, depth in reversed([*zip(needles, depths, strict=True)]):
            lines.insert(int(np.abs(ends - depth * ends[-1]).argmin()), needle)
        return np.concatenate([first, *lines, last]), answer


def _fill(parts: PartTokenizer, random: np.random.Generator, num_tokens: int) -> list[Ids]:
    """Draws sentences until no further one fits. The last of them are short ones that fit into the
    remaining tokens."""
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
