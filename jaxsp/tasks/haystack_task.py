"""Base class of tasks that hide lines in a haystack and ask for them at the end."""

import abc
import dataclasses

import numpy as np

from jaxsp.tasks import haystack
from jaxsp.tasks.part_tokenizer import Ids, PartTokenizer
from jaxsp.tasks.task import Task, TooShortError


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
        lines = haystack.fill(parts, random, max_tokens - num_fixed)
        return np.concatenate([first, *haystack.insert(lines, needles, depths), last]), answer
