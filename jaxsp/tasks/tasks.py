"""Tasks that a config may choose, modeled on RULER's (NVIDIA/RULER), and their config section.

As in RULER, keys of needles are pairs of an adjective and a noun, values have 7 digits, and the
defaults are 4 keys, 4 values or 4 queries. Different from RULER: words and haystack are jaxsp's
own; questions ask for a defined order, because the whole answer must be the greedy one, where RULER
counts the values that the generated text contains in any order. Haystacks of needles only
(`niah_multikey_2` and 3) and UUIDs are left out.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import numpy as np

from jaxsp.config import yaml_io
from jaxsp.config.fields import HERE, Choice, ConfigSection, PositiveCount, with_examples
from jaxsp.tasks import haystack
from jaxsp.tasks.haystack import HaystackTask, Question
from jaxsp.tasks.task import Ids, PartTokenizer, Task, TooShortError, draw_words

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


class VariableTracking(HaystackTask):
    """All variables in a chain of assignments of one value (vt).

    As in RULER, one chain of 4 hops is spread over the haystack in its order, names have 5 capital
    letters, and values 5 digits. All names are asked for. Different from RULER: in the order of the
    assignments, because the whole answer must be the greedy one; and the prompt has no solved
    example before the text.
    """

    task: Literal["variable_tracking"] = "variable_tracking"

    def draw(self, random: np.random.Generator) -> Question:
        names = [word.upper() for word in draw_words(random, 5, num_letters=5)]
        value = random.integers(10_000, 100_000)
        sources = [str(value), *(f"VAR {name}" for name in names[:-1])]
        return Question(
            introduction="Track the assignments of variables in this text.\n",
            needles=tuple(
                f"VAR {name} = {source}\n" for name, source in zip(names, sources, strict=True)
            ),
            question=f"Question: Which variables have the value {value}, in the order of their "
            f"assignments?\nAnswer: The {len(names)} variables are",
            answer=f" {', '.join(names)}",
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
        introduction = "Count how often each coded word occurs in this text.\n"
        first = np.concatenate([parts.start(introduction), parts.after_line("Text:")])
        question = "\nQuestion: Which three words, apart from the dots, occur most often in the "
        question += "text, the most frequent first?\nAnswer: The three words are"
        last, answer = parts.split(parts.after_word, question, ",".join(words[1:4]))
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


TASKS = (Needle, MultiKey, MultiValue, MultiQuery, VariableTracking, FrequentWords)

TASK = Choice(selector="task", types=TASKS)


class EvalConfig(ConfigSection):
    """Evaluations in addition to the loss on data.eval."""

    tasks: Annotated[
        tuple[Annotated[Task, TASK], ...],
        with_examples("[{task: needle, lengths: [4096, 32768]}]", strict=False),
    ] = ()
    """Retrieval tasks to measure at each evaluation."""
    long_ppl: bool = False
    """Also compute LongPPL of each eval set (Fang et al. 2024): perplexity of tokens that depend on
    far context: those whose loss falls by more than 2 to below 2 if the model sees more than the
    4,096 tokens before them. Takes a pass over five times the tokens."""

    def find_problems(self) -> Iterator[str]:
        """Checks that no task has a length twice, because results are named by both."""
        owners: dict[tuple[str, int], int] = {}
        for number, task in enumerate(self.tasks):
            repeated: list[int] = []
            rest: list[int] = []
            for length in task.lengths:
                is_first = owners.setdefault((task.task, length), number) == number
                (rest if is_first and length not in rest else repeated).append(length)
            for length in repeated[:1]:
                name = f"{HERE}.tasks.{number}"
                suggestion = f"Use {name}.lengths={yaml_io.format_value(rest)}"
                yield (
                    f"{name}.lengths = {yaml_io.format_value(list(task.lengths))}: must have each "
                    f"length once for each task, and {HERE}.tasks.{owners[task.task, length]} "
                    f"has {length} for {task.task}. {suggestion if rest else f'Leave {name} out'}."
                )
