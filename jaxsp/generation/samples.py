"""Answers to the beginnings of documents of eval sets, to read while a run trains."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsp.blocks.layers import Weights
from jaxsp.core.batch import NO_LABEL
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.documents import Documents
from jaxsp.data.packing import Segments
from jaxsp.generation.generator import Generator
from jaxsp.training.specs import StepSpec

MAX_NEW_TOKENS = 64

MAX_TEXT_TOKENS = 256
"""Maximum tokens of the prompt in a document that has none of its own."""

MAX_PROMPT_CHARS = 2000
"""Characters of a prompt in samples.jsonl: its end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleFields:
    """One line of samples.jsonl: the answer to the beginning of one document of an eval set.

    The prompt ends before the document's first loss token. In a document in which every token has
    a loss, it is the first half, at most 256 tokens. Texts contain special tokens.
    """

    step: int
    """Training steps of the weights."""
    data: str
    """Name of the eval set."""
    sample: int
    """Number of the sample in its eval set, from 0."""
    prompt: str
    """Prompt; of a long one, the last 2,000 characters."""
    answer: str
    """Greedy answer of at most 64 tokens."""
    reference: str
    """Continuation in the document, of at most as many tokens, up to its next token without a
    loss."""


class Sample(NamedTuple):
    """Tokens of a document, divided into a prompt and what follows."""

    prompt: list[int]
    reference: list[int]


class SampleGenerator:
    """Answers the first documents of each eval set; False if there are none to answer."""

    def __init__(
        self,
        spec: StepSpec,
        eval_sets: Sequence[PackedDataset],
        *,
        count: int,
        tokenizer: Any,
        stop_ids: Collection[int],
    ):
        self._stop_ids = stop_ids
        self._tokenizer = tokenizer
        self._max_new_tokens = min(MAX_NEW_TOKENS, spec.config.row_tokens // 2)
        limit = spec.config.row_tokens - self._max_new_tokens
        self._samples = [
            (data.name, number, sample)
            for data in (eval_sets if count else ())
            for number, sample in enumerate(
                select_samples(data.documents, count, limit, self._max_new_tokens)
            )
        ]
        self._generator = Generator(spec) if self._samples else None

    def __bool__(self) -> bool:
        return self._generator is not None

    def run(
        self, master: Weights, *, num_steps: int, on_token: Callable[[], None] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """Yields a line for each sample. Args: num_steps: training steps of the weights."""
        if self._generator is None:
            return
        answers = self._generator.generate(
            master,
            [sample.prompt for _, _, sample in self._samples],
            max_new_tokens=self._max_new_tokens,
            stop_ids=self._stop_ids,
            on_token=lambda number, token: on_token(),
        )
        decode = self._tokenizer.decode
        for (name, number, sample), answer in zip(self._samples, answers, strict=True):
            fields = SampleFields(
                step=num_steps,
                data=name,
                sample=number,
                prompt=decode(sample.prompt)[-MAX_PROMPT_CHARS:],
                answer=decode(answer),
                reference=decode(sample.reference),
            )
            yield dataclasses.asdict(fields)


def select_samples(
    documents: Documents, count: int, max_prompt_tokens: int, max_new_tokens: int
) -> list[Sample]:
    """Samples of the first document of `count` records. Longer prompts lose their beginning."""
    samples = []
    for number in range(0, len(documents.lengths), documents.per_record)[:count]:
        length = int(documents.lengths[number])
        if length < 2:
            continue
        whole = Segments(
            document=np.array([number]), offset=np.array([0]), length=np.array([length])
        )
        row = documents.read_slice(whole, 0, length)
        has_loss = row["labels"] != NO_LABEL  # of the next token
        first = int(np.argmax(has_loss)) + 1
        if first == 1:
            first = max(1, min(length // 2, MAX_TEXT_TOKENS))
        ends = np.flatnonzero(~has_loss[first - 1 :])
        end = min(first + int(ends[0]) if len(ends) else length, first + max_new_tokens)
        prompt = row["tokens"][max(0, first - max_prompt_tokens) : first].tolist()
        samples.append(Sample(prompt=prompt, reference=row["tokens"][first:end].tolist()))
    return samples
