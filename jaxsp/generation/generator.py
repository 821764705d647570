"""Answers to prompts, and to the beginnings of documents of eval sets, to read during a run."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxsp.blocks.layers import Weights
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_count
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.documents import Documents
from jaxsp.data.packing import Segments
from jaxsp.generation.programs import Programs
from jaxsp.model.cached_layers import Answers
from jaxsp.sharding import quantization
from jaxsp.sharding.sharding import Gather
from jaxsp.system import device_memory, device_mesh
from jaxsp.training.specs import StepSpec

MAX_ROWS = 64
"""Maximum number of prompts that a group answers at a time."""

MIN_TOKENS = 2**14
"""Tokens that a group may always have at a time: without gradients, a step of a few hundred tokens
has room for as many."""

WHOLE_FRACTION = 0.5
"""Maximum fraction of a device's free memory for whole weights; the rest is for caches and
activations."""

_CHUNK_MULTIPLE = 64
"""Divisor of the tokens of a chunk of a row of prompts: that of cuDNN's kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the next token."""

    temperature: float = 0.0
    """Divisor of the logits; 0: the likeliest token, without sampling."""
    top_p: float = 1.0
    """Samples come from the likeliest tokens whose probabilities sum up to at least this."""
    seed: int = 0

    def check(self) -> None:
        """Raises: UserError for values that make no distribution."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature = {self.temperature}: must be a number of at least 0. Use 0 for the "
                "likeliest tokens, or 1 for samples of the model's distribution."
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p = {self.top_p}: must be above 0 and at most 1. Use 1 to sample from all "
                "tokens."
            )
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed = {self.seed}: must be at least 0 and below 2**31. Use 0.")


def check_head(spec: StepSpec) -> None:
    """Raises: UserError for a reward model, which has no tokens."""
    if spec.model.has_scores:
        raise UserError(
            "objective.type = reward: a reward model scores texts and generates none. Use a model "
            "that was trained with another objective."
        )


class Generator:
    """Answers prompts with the weights of a training step.

    Every device holds all weights if they fit into WHOLE_FRACTION of its free memory. If not, or if
    some are quantized, they stay sharded as in training, and are gathered for each token.

    Prompts of similar lengths are answered together, in rows of a few lengths, so that few programs
    are compiled. A group's rows have at most as many tokens as in a microbatch of the step, or
    MIN_TOKENS, if they are several.
    """

    def __init__(self, spec: StepSpec):
        check_head(spec)
        self.spec = spec
        self._programs: dict[tuple[int, int, Gather], Programs] = {}

    def generate(
        self,
        master: Weights,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        sampling: Sampling = Sampling(),
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Returns the tokens of the answers, in the order of the prompts.

        An answer ends with one of `stop_ids`, which is part of it, or after `max_new_tokens`. All
        processes must call it together, and get the same answers.

        Args: on_token: called with the number of the prompt and each new token.
        """
        sampling.check()
        self.check(prompts, max_new_tokens)
        spec = self.spec
        gather = spec.gather
        master = spec.select_own(master)
        if self._has_whole_weights:
            gather = gather.for_whole()
            weights = spec.gather.gather_once(spec.table, master, spec.mesh)
        else:
            weights = gather.cast_once(spec.table, master)
        answers: list[list[int]] = [[] for _ in prompts]

        def add_token(number: int, token: int) -> None:
            answers[number].append(token)
            if on_token is not None:
                on_token(number, token)

        # The longest first, so that memory runs out at the beginning if it does
        left = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        while left:
            longest = len(prompts[left[0]])
            programs = self.choose_programs(
                len(left), prompt_tokens=longest, new_tokens=max_new_tokens, gather=gather
            )
            numbers = left[: programs.num_rows]
            left = left[programs.num_rows :]
            _answer(
                programs,
                weights,
                {number: prompts[number] for number in numbers},
                max_new_tokens=max_new_tokens,
                stop_ids=frozenset(stop_ids),
                sampling=sampling,
                on_token=add_token,
            )
        return answers

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Checks the lengths of prompts and answers. Raises: UserError."""
        limit = self.spec.config.row_tokens
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens = {max_new_tokens}: must be at least 1. Use 128.")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(
                    f"prompt {number}: has no tokens. Use a prompt with at least one, for example "
                    "the token that texts begin with."
                )
            needed = len(prompt) + max_new_tokens
            if needed > limit:
                enough = limit << ((needed - 1) // limit).bit_length()
                raise UserError(
                    f"prompt {number}: has {format_count(len(prompt), 'token')}, and with "
                    f"{max_new_tokens:,} new ones needs {needed:,}, but data.row_tokens is "
                    f"{limit:,}. Use data.row_tokens={enough}, or fewer tokens."
                )

    @functools.cached_property
    def _has_whole_weights(self) -> bool:
        """Chosen once, when training state, if there is some, is in memory."""
        spec = self.spec
        is_quantized = any(map(quantization.is_quantized, jax.tree.leaves(spec.table)))
        if spec.gather.num_shards == 1 or is_quantized:
            return False
        free = device_memory.find_free_bytes(spec.mesh.devices.flat)
        return spec.gather.whole_bytes(spec.table) <= WHOLE_FRACTION * free

    def choose_programs(
        self, num_prompts: int, *, prompt_tokens: int, new_tokens: int, gather: Gather
    ) -> Programs:
        """Programs for the next prompts; the longest has `prompt_tokens`.

        Rows have one of few lengths: a power of two times what kernels and layouts need, and at
        most that of the step. Their number in a group is a power of two.
        """
        spec = self.spec
        config = spec.config
        chunks = config.attention.chunks_per_device
        row_tokens = config.mesh.degree * (2 if chunks == "auto" else chunks) * _CHUNK_MULTIPLE
        while row_tokens < prompt_tokens:
            row_tokens *= 2
        row_tokens = min(row_tokens, config.row_tokens)
        num_tokens = config.row_tokens * config.microbatch_rows
        max_rows = max(1, max(num_tokens, MIN_TOKENS) // (row_tokens + new_tokens))
        num_groups = device_mesh.num_groups(spec.mesh)
        wanted = -(-num_prompts // num_groups)
        rows = 1
        while rows < wanted and 2 * rows <= min(MAX_ROWS, max_rows):
            rows *= 2
        key = (row_tokens, rows, gather)
        if key not in self._programs:
            changed = spec.respec(
                row_tokens=row_tokens,
                max_segments=1,
                rows_per_step=rows * num_groups,
                rows_per_microbatch=rows,
            )
            self._programs[key] = Programs(changed, gather)
        return self._programs[key]


def _answer(
    programs: Programs,
    weights: Weights,
    prompts: Mapping[int, Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling,
    on_token: Callable[[int, int], None],
) -> None:
    """Calls `on_token` with the tokens of answers to one batch, by the number of the prompt."""
    numbers = np.zeros(programs.num_rows, np.int32)
    numbers[: len(prompts)] = [*prompts]
    choose = functools.partial(
        programs.choose,
        seed=np.int32(sampling.seed),
        temperature=np.float32(sampling.temperature or 1.0),
        top_p=np.float32(sampling.top_p),
        is_greedy=sampling.temperature == 0,
    )
    row_numbers = programs.put(numbers, PartitionSpec())
    batch = programs.make_batch([*prompts.values()])
    logits, cached, states = programs.prefill(weights, batch)
    cache = Answers(programs.make_slots(cached, max_new_tokens), states)
    unfinished = set(prompts)
    tokens = choose(logits, row_numbers, np.int32(0))
    for number in range(max_new_tokens):
        following = None
        if number + 1 < max_new_tokens:
            # Dispatched before this token is known here: devices need not wait
            logits, cache = programs.decode(weights, tokens, cached, cache, np.int32(number))
            following = choose(logits, row_numbers, np.int32(number + 1))
        for prompt, token in zip(prompts, np.asarray(tokens).tolist(), strict=False):
            if prompt in unfinished:
                on_token(prompt, token)
                if token in stop_ids:
                    unfinished.remove(prompt)
        if not unfinished or following is None:
            return
        tokens = following


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
