"""Interface of evaluation tasks: prompts whose answers are found in them."""

import abc
import dataclasses

import numpy as np

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
    """Place of the needle in the haystack, from 0 (start) to 1 (end); None if there are several."""


class TooShortError(Exception):
    """Too few tokens for a sample."""

    def __init__(self, min_tokens: int):
        self.min_tokens = min_tokens
        """Smallest number that works for this sample."""
        super().__init__(f"must have at least {min_tokens} tokens")


class Task(abc.ABC):
    """An evaluation task; `registry.TASKS` has all of them."""

    has_depth: bool = False
    """True if the place of the needle is an axis of the results."""

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

        Args: depth: a number if the task has a depth, otherwise None.
        Raises: TooShortError.
        """
