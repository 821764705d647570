"""Answers to prompts: see `Generator`."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxsp import attention
from jaxsp.blocks.layers import Weights
from jaxsp.core.batch import Batch
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_count
from jaxsp.generation.programs import Programs
from jaxsp.memory import available_memory
from jaxsp.model.cached_layers import Answers
from jaxsp.runtime import device_mesh
from jaxsp.sharding import quantization
from jaxsp.sharding.sharding import Gather
from jaxsp.training.specs import StepSpec

MAX_ROWS = 64
"""Maximum number of prompts that a group answers at a time."""

MIN_TOKENS = 2**14
"""Tokens that a group may always have at a time: without gradients, a step of a few hundred tokens
has room for as many."""

WHOLE_FRACTION = 0.5
"""Maximum fraction of a device's free memory for whole weights. The rest is for the caches of
prompts and answers, and for the activations of prompts."""

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
        """Raises: UserError for a reward model, which has no tokens."""
        check_head(spec)
        self.spec = spec
        self._find_programs = functools.lru_cache(maxsize=None)(self._make_programs)

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
        Raises: UserError for prompts that are empty, or too long for the rows of the step.
        """
        sampling.check()
        self.check(prompts, max_new_tokens)
        gather, weights = self._copy_weights(master)
        answers: list[list[int]] = [[] for _ in prompts]
        # The longest first, so that memory runs out at the beginning if it does
        left = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        while left:
            programs = self.choose_programs(
                len(left),
                prompt_tokens=len(prompts[left[0]]),
                new_tokens=max_new_tokens,
                gather=gather,
            )
            numbers = left[: programs.num_rows]
            left = left[programs.num_rows :]
            run = _Run(programs, weights, numbers, sampling, max_new_tokens)
            batch = programs.make_batch([prompts[number] for number in numbers])
            run.answer(batch, answers, frozenset(stop_ids), on_token or _ignore_token)
        return answers

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Checks the lengths of prompts and answers. Raises: UserError."""
        limit = self.spec.config.data.row_tokens
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

    def _copy_weights(self, master: Weights) -> tuple[Gather, Weights]:
        """Copies weights in the compute dtype. Returns: what gathers them, too."""
        spec = self.spec
        if not self._has_whole_weights:
            return spec.gather, spec.gather.cast_once(spec.table, master)
        return spec.gather.for_whole(), spec.gather.gather_once(spec.table, master, spec.mesh)

    @functools.cached_property
    def _has_whole_weights(self) -> bool:
        """Chosen once, when training state, if there is some, is in memory."""
        spec = self.spec
        is_quantized = any(map(quantization.is_quantized, jax.tree.leaves(spec.table)))
        if spec.gather.num_shards == 1 or is_quantized:
            return False
        free = available_memory.find_free_bytes(spec.mesh.devices.flat)
        return spec.gather.whole_bytes(spec.table) <= WHOLE_FRACTION * free

    def choose_programs(
        self, num_prompts: int, *, prompt_tokens: int, new_tokens: int, gather: Gather
    ) -> Programs:
        """Programs for the first of several prompts, of which the longest has `prompt_tokens`.

        Args: gather: that of the form that the programs get weights in.
        """
        row_tokens = self._choose_row_tokens(prompt_tokens)
        rows = self._choose_rows(num_prompts, row_tokens + new_tokens)
        return self._find_programs(row_tokens, rows, gather)

    def _choose_row_tokens(self, prompt_tokens: int) -> int:
        """Length of the rows for prompts of at most this length, one of few.

        A power of two times what kernels and layouts need, and at most that of the step.
        """
        config = self.spec.config
        chunks = config.attention.chunks_per_device
        multiple = config.mesh.degree * (2 if chunks == "auto" else chunks) * _CHUNK_MULTIPLE
        row_tokens = multiple
        while row_tokens < prompt_tokens:
            row_tokens *= 2
        return min(row_tokens, config.data.row_tokens)

    def _choose_rows(self, num_prompts: int, tokens_per_row: int) -> int:
        """Number of rows of a group, a power of two."""
        config = self.spec.config
        num_tokens = config.data.row_tokens * config.batch.microbatch_rows
        limit = min(MAX_ROWS, max(1, max(num_tokens, MIN_TOKENS) // tokens_per_row))
        wanted = -(-num_prompts // device_mesh.num_groups(self.spec.mesh))
        rows = 1
        while rows < wanted and 2 * rows <= limit:
            rows *= 2
        return rows

    def _make_programs(self, row_tokens: int, rows: int, gather: Gather) -> Programs:
        """Makes the programs for rows of one length. Args: rows: rows of a group."""
        spec = self.spec
        config = spec.config
        data = {"row_tokens": row_tokens, "max_segments_per_row": 1}
        batch = {
            "rows_per_step": rows * device_mesh.num_groups(spec.mesh),
            "rows_per_microbatch": rows,
        }
        config = config.model_copy(
            update={
                "data": config.data.model_copy(update=data),
                "batch": config.batch.model_copy(update=batch),
            }
        )
        choice = attention.choose(config, spec.model, devices=list(spec.mesh.devices.flat))
        return Programs(dataclasses.replace(spec, config=config, attention=choice), gather)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Answers to prompts that fit into one batch of rows."""

    programs: Programs
    weights: Weights
    numbers: list[int]
    """Number of each prompt among all prompts."""
    sampling: Sampling
    max_new_tokens: int

    def answer(
        self,
        batch: Batch,
        answers: list[list[int]],
        stop_ids: frozenset[int],
        on_token: Callable[[int, int], None],
    ) -> None:
        """Adds the tokens to `answers`, until all have ended."""
        programs = self.programs
        logits, prompts, states = programs.prefill(self.weights, batch)
        cache = Answers(programs.make_slots(prompts, self.max_new_tokens), states)
        unfinished = set(self.numbers)
        tokens = self._choose(logits, 0)
        for number in range(self.max_new_tokens):
            following = None
            if number + 1 < self.max_new_tokens:
                # Dispatched before this token is known here: devices need not wait
                logits, cache = programs.decode(
                    self.weights, tokens, prompts, cache, np.int32(number)
                )
                following = self._choose(logits, number + 1)
            for prompt, token in zip(self.numbers, np.asarray(tokens).tolist(), strict=False):
                if prompt in unfinished:
                    answers[prompt].append(token)
                    on_token(prompt, token)
                    if token in stop_ids:
                        unfinished.remove(prompt)
            if not unfinished or following is None:
                return
            tokens = following

    def _choose(self, logits: jax.Array, position: int) -> jax.Array:
        """The next token of each row."""
        sampling = self.sampling
        numbers = np.zeros(self.programs.num_rows, np.int32)
        numbers[: len(self.numbers)] = self.numbers
        return self.programs.choose(
            logits,
            self.programs.put(numbers, PartitionSpec()),
            np.int32(position),
            seed=np.int32(sampling.seed),
            temperature=np.float32(sampling.temperature or 1.0),
            top_p=np.float32(sampling.top_p),
            is_greedy=sampling.temperature == 0,
        )


def _ignore_token(number: int, token: int) -> None:
    """Does nothing with a new token."""
