"""Tasks with needles: access codes of keys, as RULER's `niah` tasks (NVIDIA/RULER).

As in RULER, keys are pairs of an adjective and a noun, values have 7 digits, and the defaults are
4 keys, 4 values or 4 queries. Different from RULER: words and haystack are jaxsp's own; questions
ask for a defined order, because the whole answer must be the greedy one, where RULER counts the
values that the generated text contains in any order. Haystacks of needles only (`niah_multikey_2`
and 3) and UUIDs are left out.
"""

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from jaxsp.config.fields import PositiveCount, with_examples
from jaxsp.tasks import haystack
from jaxsp.tasks.haystack import HaystackTask, Question

_INTRODUCTION = "Remember the access codes in this text.\n"

_NUM_NEEDLES = 4
"""Number of keys, values or queries of the tasks with several."""


class Needle(HaystackTask):
    """One access code hidden in filler sentences (niah_single)."""

    task: Literal["needle"] = "needle"
    depths: Annotated[PositiveCount, with_examples(11)] = 11
    """Number of depths of the needle, equally spaced from the start to the end of the text; 1: the
    middle."""

    def list_depths(self) -> Sequence[float | None]:
        if self.depths == 1:
            return (0.5,)
        return [index / (self.depths - 1) for index in range(self.depths)]

    def draw(self, random: np.random.Generator) -> Question:
        return _ask_for_one(random, num_keys=1)


class MultiKey(HaystackTask):
    """One of four codes with different keys (niah_multikey_1)."""

    task: Literal["multi_key"] = "multi_key"

    def draw(self, random: np.random.Generator) -> Question:
        return _ask_for_one(random, num_keys=_NUM_NEEDLES)


class MultiValue(HaystackTask):
    """Four codes of one key, in the order of the text (niah_multivalue)."""

    task: Literal["multi_value"] = "multi_value"

    def draw(self, random: np.random.Generator) -> Question:
        (key,) = _draw_keys(random, 1)
        values = _draw_values(random, _NUM_NEEDLES)
        return Question(
            introduction=_INTRODUCTION,
            needles=tuple(f"An access code of {key} is {value}.\n" for value in values),
            question=f"Question: What are the {_NUM_NEEDLES} access codes of {key}, in the order "
            f"of the text?\nAnswer: The {_NUM_NEEDLES} access codes are",
            answer=f" {', '.join(values)}",
        )


class MultiQuery(HaystackTask):
    """The codes of four keys, in the order of the question (niah_multiquery)."""

    task: Literal["multi_query"] = "multi_query"

    def draw(self, random: np.random.Generator) -> Question:
        keys = _draw_keys(random, _NUM_NEEDLES)
        values = _draw_values(random, _NUM_NEEDLES)
        order = random.permutation(_NUM_NEEDLES)
        *firsts, last = [keys[index] for index in order]
        return Question(
            introduction=_INTRODUCTION,
            needles=_format_needles(keys, values),
            question=f"Question: What are the access codes of {', '.join(firsts)} and {last}, in "
            f"this order?\nAnswer: The {_NUM_NEEDLES} access codes are",
            answer=f" {', '.join(values[index] for index in order)}",
        )


def _ask_for_one(random: np.random.Generator, *, num_keys: int) -> Question:
    """Asks for the code of one of several keys with the words of its needle."""
    keys = _draw_keys(random, num_keys)
    values = _draw_values(random, num_keys)
    asked = int(random.integers(num_keys))
    return Question(
        introduction=_INTRODUCTION,
        needles=_format_needles(keys, values),
        question=f"Question: What is the access code of {keys[asked]}?\n"
        f"Answer: The access code of {keys[asked]} is",
        answer=f" {values[asked]}",
    )


def _format_needles(keys: Sequence[str], values: Sequence[str]) -> tuple[str, ...]:
    pairs = zip(keys, values, strict=True)
    return tuple(f"The access code of {key} is {value}.\n" for key, value in pairs)


def _draw_keys(random: np.random.Generator, number: int) -> list[str]:
    """Draws different keys, such as amber-falcon."""
    words = haystack.read_words()
    pairs = [*itertools.product(words["key_adjectives"], words["key_nouns"])]
    return ["-".join(pairs[index]) for index in random.choice(len(pairs), number, False)]


def _draw_values(random: np.random.Generator, number: int) -> list[str]:
    """Draws different numbers of 7 digits."""
    values: dict[str, None] = {}
    while len(values) < number:
        values[str(random.integers(1_000_000, 10_000_000))] = None
    return list(values)
