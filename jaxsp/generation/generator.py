"""Answers to prompts: see `Generator`."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxsp import attention
from jaxsp.blocks.layers import Weights
from jaxsp.core import axes
from jaxsp.core.batch import Batch
from jaxsp.core.errors import UserError
from jaxsp.generation.programs import PER_ROW, PER_TOKEN, Programs
from jaxsp.model.cached_layers import Prompts
from jaxsp.runtime import device_mesh
from jaxsp.training.specs import StepSpec

MAX_ROWS = 64
"""Maximum number of prompts that a group answers at a time."""

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


class Generator:
    """Answers prompts with the weights of a training step, sharded as in training.

    Prompts of similar lengths are answered together, in rows of a few lengths, so that few programs
    are compiled. A group's rows have at most as many tokens as in a microbatch of the step, if they
    are several.
    """

    def __init__(self, spec: StepSpec):
        """Raises: UserError for a reward model, which has no tokens."""
        if spec.model.has_scores:
            raise UserError(
                "objective.type = reward: a reward model scores texts and generates none. Use a "
                "model that was trained with another objective."
            )
        self._spec = spec
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
        self._check(prompts, max_new_tokens)
        answers: list[list[int]] = [[] for _ in prompts]
        # The longest first, so that memory runs out at the beginning if it does
        left = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        while left:
            row_tokens = self._choose_row_tokens(len(prompts[left[0]]))
            rows = self._choose_rows(len(left), row_tokens + max_new_tokens)
            num_rows = rows * device_mesh.num_groups(self._spec.mesh)
            batch = _Prompts(left[:num_rows], [prompts[number] for number in left[:num_rows]])
            left = left[num_rows:]
            programs = self._find_programs(row_tokens, rows)
            run = _Run(programs, master, batch, sampling, max_new_tokens, num_rows)
            run.answer(answers, frozenset(stop_ids), on_token or (lambda number, token: None))
        return answers

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        limit = self._spec.config.data.max_row_tokens
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens = {max_new_tokens}: must be at least 1.")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(
                    f"prompt {number}: has no tokens. Use a prompt with at least one, for example "
                    "the token that texts begin with."
                )
            needed = len(prompt) + max_new_tokens
            if needed > limit:
                raise UserError(
                    f"prompt {number}: has {len(prompt):,} tokens, and with {max_new_tokens:,} new "
                    f"ones needs {needed:,}, but data.row_tokens is {limit:,}. Use a "
                    f"data.row_tokens of at least {needed:,}, or fewer tokens."
                )

    def _choose_row_tokens(self, prompt_tokens: int) -> int:
        """Length of the rows for prompts of at most this length, one of few.

        A power of two times what kernels and layouts need, and at most that of the step.
        """
        config = self._spec.config
        chunks = config.attention.chunks_per_device
        multiple = config.mesh.degree * (2 if chunks == "auto" else chunks) * _CHUNK_MULTIPLE
        row_tokens = multiple
        while row_tokens < prompt_tokens:
            row_tokens *= 2
        return min(row_tokens, config.data.max_row_tokens)

    def _choose_rows(self, num_prompts: int, tokens_per_row: int) -> int:
        """Number of rows of a group, a power of two."""
        config = self._spec.config
        budget = config.data.max_row_tokens * config.batch.microbatch_rows
        limit = min(MAX_ROWS, max(1, budget // tokens_per_row))
        wanted = -(-num_prompts // device_mesh.num_groups(self._spec.mesh))
        rows = 1
        while rows < wanted and 2 * rows <= limit:
            rows *= 2
        return rows

    def _make_programs(self, row_tokens: int, rows: int) -> Programs:
        """Makes the programs for rows of one length. Args: rows: rows of a group."""
        spec = self._spec
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
        return Programs(dataclasses.replace(spec, config=config, attention=choice))


@dataclasses.dataclass(frozen=True)
class _Prompts:
    """Prompts that are answered together."""

    numbers: list[int]
    """Number of each among all prompts."""
    tokens: list[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Answers to prompts that fit into one batch of rows."""

    programs: Programs
    master: Weights
    prompts: _Prompts
    sampling: Sampling
    max_new_tokens: int
    num_rows: int

    def answer(
        self,
        answers: list[list[int]],
        stop_ids: frozenset[int],
        on_token: Callable[[int, int], None],
    ) -> None:
        """Adds the tokens to `answers`, until all have ended."""
        programs = self.programs
        logits, caches = programs.prefill(self.master, self._make_batch())
        seq = programs.spec.mesh.shape[axes.SEQ]
        cache = programs.make_empty_answers(caches, _round_up(self.max_new_tokens, seq))
        prompts = Prompts(
            tokens={kind: of_kind.tokens for kind, of_kind in caches.items()},
            lengths_B=self._put(self._lengths_B, PER_ROW),
        )
        del caches  # the states, which decoding replaces
        unfinished = set(self.prompts.numbers)
        tokens = self._choose(logits, 0)
        for number in range(self.max_new_tokens):
            following = None
            if number + 1 < self.max_new_tokens:
                # Dispatched before this token is known here: devices need not wait
                logits, cache = programs.decode(
                    self.master, tokens, prompts, cache, jnp.int32(number)
                )
                following = self._choose(logits, number + 1)
            for prompt, token in zip(self.prompts.numbers, np.asarray(tokens), strict=False):
                if prompt in unfinished:
                    answers[prompt].append(int(token))
                    on_token(prompt, int(token))
                    if int(token) in stop_ids:
                        unfinished.remove(prompt)
            if not unfinished or following is None:
                return
            tokens = following

    @functools.cached_property
    def _lengths_B(self) -> np.ndarray:
        """Tokens of each prompt; 1 for rows without a prompt, whose answers nobody reads."""
        lengths = [len(tokens) for tokens in self.prompts.tokens]
        return np.array(lengths + [1] * (self.num_rows - len(lengths)), np.int32)

    def _choose(self, logits: jax.Array, position: int) -> jax.Array:
        sampling = self.sampling
        numbers = np.zeros(self.num_rows, np.int32)
        numbers[: len(self.prompts.numbers)] = self.prompts.numbers
        return self.programs.choose(
            logits,
            self._put(numbers, PartitionSpec()),
            jnp.int32(position),
            seed=jnp.int32(sampling.seed),
            temperature=jnp.float32(sampling.temperature or 1.0),
            top_p=jnp.float32(sampling.top_p),
            is_greedy=sampling.temperature == 0,
        )

    def _make_batch(self) -> Batch:
        """Rows of the prompts, each one segment at the beginning of a row."""
        spec = self.programs.spec
        row_tokens = spec.config.data.max_row_tokens
        tokens_BL = np.zeros((self.num_rows, row_tokens), np.int32)
        for row, prompt in enumerate(self.prompts.tokens):
            tokens_BL[row, : len(prompt)] = prompt
        positions_L = np.arange(row_tokens, dtype=np.int32)
        positions_BL = np.where(positions_L < self._lengths_B[:, None], positions_L, 0)
        order_L = spec.attend.layout.token_order(row_tokens)
        tokens = self._put(tokens_BL[:, order_L], PER_TOKEN)
        return Batch(
            tokens_BL=tokens,
            labels_BL=tokens,  # without a loss, any
            positions_BL=self._put(positions_BL[:, order_L], PER_TOKEN),
            starts_BM=self._put(np.zeros((self.num_rows, 1), np.int32), PER_ROW),
            lengths_BM=self._put(self._lengths_B[:, None], PER_ROW),
        )

    def _put(self, array: np.ndarray, spec: PartitionSpec) -> Any:
        """Puts an array on the mesh, of which each process has all."""
        place = NamedSharding(self.programs.spec.mesh, spec)
        return jax.make_array_from_callback(array.shape, place, lambda index: array[index])


def _round_up(max_new_tokens: int, seq: int) -> int:
    """Slots for new tokens on each device, a power of two."""
    slots = 1
    while slots * seq < max_new_tokens:
        slots *= 2
    return slots
