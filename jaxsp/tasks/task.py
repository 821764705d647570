"""Base class of evaluation tasks: prompts whose answers are found in them."""

import abc
import dataclasses
import string
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np

from jaxsp.config.fields import ConfigSection, NonNegativeCount, PositiveCount, with_examples
from jaxsp.core.errors import UserError
from jaxsp.tasks.part_tokenizer import Ids, PartTokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A prompt and its answer. The model is scored on the tokens of the answer."""

    prompt_ids: Ids
    """Tokens of the prompt, without a BOS token."""
    answer_ids: Ids
    """Tokens that greedy decoding must write after the prompt. They end with the answer's last
    word: a period, a line break or an end token after it is a matter of style."""
    length: int
    """Maximum number of tokens, which the sample approaches: prompt, answer and reserved tokens."""
    depth: float | None
    """Depth of the needle in the haystack, from 0 (start) to 1 (end); None if there are several."""


class TooShortError(Exception):
    """Too few tokens for a sample."""

    def __init__(self, min_tokens: int):
        super().__init__(f"must have at least {min_tokens} tokens")
        self.min_tokens = min_tokens


class Task(ConfigSection, abc.ABC):
    """Retrieval task: each prompt contains its answer."""

    task: str
    """Retrieval task modeled on RULER, with jaxsp's own words and sentences. Results are the
    fraction of answers that greedy decoding reproduces token for token, and the mean loss of the
    answers' tokens. They are not RULER's score, which accepts other words around the answer."""
    lengths: Annotated[
        tuple[PositiveCount, ...],
        with_examples("[4096, 32768, 131072]", min_length=1, strict=False),
    ]
    """Lengths of prompt and answer together, in tokens. Samples of all lengths have the same
    questions."""
    samples: PositiveCount = 20
    """Number of samples for each length, and for each depth of needle."""
    seed: NonNegativeCount = 0
    """Seed for keys, values and sentences."""

    def list_depths(self) -> Sequence[float | None]:
        """Depths of the needle that are an axis of the results, from 0 (start) to 1 (end)."""
        return (None,)

    @abc.abstractmethod
    def make_sample(
        self,
        parts: PartTokenizer,
        random: np.random.Generator,
        *,
        max_tokens: int,
        depth: float | None,
    ) -> tuple[Ids, Ids]:
        """Makes a prompt and its answer, of almost max_tokens together.

        The question must not depend on max_tokens, so that lengths are compared by the same
        questions, and `TooShortError.min_tokens` is right.
        Args: depth: one of `list_depths`. Raises: TooShortError.
        """

    def make_samples(
        self,
        tokenize: Callable[[str], list[int]],
        *,
        length: int,
        reserved_tokens: int = 0,
        field: str = "length",
    ) -> list[Sample]:
        """Makes the samples of one length, one depth after another.

        They depend on the seed, the task, the depth and the tokenizer, and not on the process or
        the platform. Those of different lengths have the same questions; those of different depths
        have different ones.

        Args:
            tokenize: tokenizer without special tokens.
            length: maximum number of tokens of prompt, answer and reserved tokens.
            reserved_tokens: number of tokens that the caller adds, such as BOS.
            field: name of the field that has the length, for errors.
        """
        parts = PartTokenizer(tokenize)
        task_key = zlib.crc32(self.task.encode())  # Python's hash differs between processes
        samples = []
        min_length = 0
        for depth in self.list_depths():
            depth_key = 0 if depth is None else 1 + round(depth * 1e6)
            for index in range(self.samples):
                random = np.random.default_rng([self.seed, task_key, depth_key, index])
                try:
                    prompt_ids, answer_ids = self.make_sample(
                        parts, random, max_tokens=length - reserved_tokens, depth=depth
                    )
                except TooShortError as error:
                    min_length = max(min_length, error.min_tokens + reserved_tokens)
                    continue
                samples.append(
                    Sample(prompt_ids=prompt_ids, answer_ids=answer_ids, length=length, depth=depth)
                )
        if min_length:
            raise UserError(
                f"{field} = {length}: must be at least {min_length}, the tokens of the shortest "
                f"prompts and answers of {self.task} with this tokenizer. Use {min_length} or more."
            )
        return samples


def draw_words(random: np.random.Generator, number: int, *, num_letters: int) -> list[str]:
    """Draws different words of lower-case letters.

    A larger number continues the same words, for the same state of the generator.
    """
    words: dict[str, None] = {}
    while len(words) < number:
        letters = random.integers(len(string.ascii_lowercase), size=num_letters)
        words["".join(string.ascii_lowercase[letter] for letter in letters)] = None
    return list(words)
