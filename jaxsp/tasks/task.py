"""Base class of evaluation tasks: prompts whose answers are found in them."""

import abc
import dataclasses
import string
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from jaxtyping import Int32

from jaxsp.config.fields import ConfigSection, NonNegativeCount, PositiveCount, with_examples
from jaxsp.core.errors import UserError

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
        the platform. Those of different depths have different questions.

        Args:
            tokenize: tokenizer without special tokens.
            length: maximum number of tokens of prompt, answer and reserved tokens, such as BOS.
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
