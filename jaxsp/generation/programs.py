"""Compiled programs of generation: prefill of prompts, one more token, and its choice."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32

from jaxsp.blocks.layers import Weights
from jaxsp.core import axes
from jaxsp.core.batch import Batch
from jaxsp.model import cached_layers, decoder
from jaxsp.model.cached_layers import Answers, Arrays, Prompts
from jaxsp.sharding import sharding
from jaxsp.sharding.sharding import Gather, Shard
from jaxsp.training.specs import StepSpec

PER_TOKEN = PartitionSpec(axes.GROUPS, axes.SEQ)
PER_ROW = PartitionSpec(axes.GROUPS)

_BATCH: Any = Batch(
    **dict.fromkeys(("tokens_BL", "labels_BL", "positions_BL"), cast(Any, PER_TOKEN)),
    **dict.fromkeys(("starts_BM", "lengths_BM"), cast(Any, PER_ROW)),
)
_TOKENS: Any = PartitionSpec(None, axes.GROUPS, axes.SEQ)
_STATES: Any = PartitionSpec(None, axes.GROUPS)
_PROMPTS = Prompts(tokens=_TOKENS, lengths_B=cast(Any, PER_ROW))
_ANSWERS = Answers(tokens=_TOKENS, states=_STATES)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Functions for rows of one length. Each is compiled once for each shape of its inputs."""

    spec: StepSpec
    """Describes the rows of prompts: their length, the rows of a group, and attention."""
    gather: Gather
    """Gathers weights in the form that they are given in."""

    @property
    def num_rows(self) -> int:
        """Number of rows over the mesh."""
        return self.spec.global_microbatch_rows

    def make_batch(self, prompts: Sequence[Sequence[int]]) -> Batch:
        """Puts prompts on the mesh, each at the beginning of a row; other rows have one token."""
        row_tokens = self.spec.config.row_tokens
        tokens_BL = np.zeros((self.num_rows, row_tokens), np.int32)
        lengths_B1 = np.ones((self.num_rows, 1), np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BL[row, : len(prompt)] = prompt
            lengths_B1[row] = len(prompt)
        positions_L = np.arange(row_tokens, dtype=np.int32)
        positions_BL = np.where(positions_L < lengths_B1, positions_L, 0)
        order_L = self.spec.attend.layout.token_order(row_tokens)
        tokens = self.put(tokens_BL[:, order_L], PER_TOKEN)
        return Batch(
            tokens_BL=tokens,
            labels_BL=tokens,  # without a loss, any
            positions_BL=self.put(positions_BL[:, order_L], PER_TOKEN),
            starts_BM=self.put(np.zeros_like(lengths_B1), PER_ROW),
            lengths_BM=self.put(lengths_B1, PER_ROW),
        )

    def put(self, array: np.ndarray, spec: PartitionSpec) -> Any:
        """Puts an array on the mesh, of which each process has all."""
        place = NamedSharding(self.spec.mesh, spec)
        return jax.make_array_from_callback(array.shape, place, lambda index: array[index])

    @functools.cached_property
    def prefill(self) -> Callable[[Weights, Batch], tuple[Array, Prompts, Arrays]]:
        """(weights, prompts) -> (logits after each prompt, cache of prompts, states after them)."""

        def run(master: Weights, batch: Batch) -> tuple[Array, Prompts, Arrays]:
            spec = self.spec
            shards = self._make_shards(master)
            hidden_BD, prompts, states = cached_layers.prefill(
                shards,
                batch,
                config=spec.model,
                attend=spec.attend,
                gather=self.gather,
                dtype=spec.dtype,
                tile_tokens=spec.mlp_tile,
            )
            return self._compute_logits(shards, hidden_BD), prompts, states

        return jax.jit(self._on_mesh(run, (_BATCH,), (PER_ROW, _PROMPTS, _STATES)))

    @functools.cached_property
    def make_slots(self) -> Callable[[Prompts, int], Arrays]:
        """(prompts, number of new tokens) -> slots for them: on each device, a power of two."""

        def run(prompts: Prompts, num_tokens: int) -> Arrays:
            per_device = -(-num_tokens // self.spec.mesh.shape[axes.SEQ])
            num_slots = 1 << (per_device - 1).bit_length()
            make = functools.partial(cached_layers.make_slots, num_slots=num_slots)
            return jax.shard_map(
                make, mesh=self.spec.mesh, in_specs=(_PROMPTS,), out_specs=_TOKENS, check_vma=False
            )(prompts)

        return jax.jit(run, static_argnums=1)

    @functools.cached_property
    def decode(self) -> Callable[..., tuple[Array, Answers]]:
        """(weights, tokens, prompts, answers, number of tokens before) -> (logits after the tokens,
        answers with them). It reuses the memory of the old answers."""

        def run(
            master: Weights, tokens_B: Array, prompts: Prompts, answers: Answers, number: Array
        ) -> tuple[Array, Answers]:
            spec = self.spec
            shards = self._make_shards(master)
            hidden_BD, answers = cached_layers.decode(
                shards,
                tokens_B,
                prompts,
                answers,
                number,
                config=spec.model,
                attend=spec.attend,
                gather=self.gather,
                dtype=spec.dtype,
            )
            return self._compute_logits(shards, hidden_BD), answers

        inputs = (PER_ROW, _PROMPTS, _ANSWERS, PartitionSpec())
        on_mesh = self._on_mesh(run, inputs, (PER_ROW, _ANSWERS))
        return jax.jit(on_mesh, donate_argnums=3)

    @functools.cached_property
    def choose(self) -> Callable[..., Int32[Array, "B"]]:
        """`choose_tokens`, whose result is whole on every device."""
        whole = NamedSharding(self.spec.mesh, PartitionSpec())
        return jax.jit(choose_tokens, static_argnames="is_greedy", out_shardings=whole)

    def _on_mesh(
        self, local: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any
    ) -> Callable[..., Any]:
        """Runs a function of each device's shards of the weights and of other inputs."""
        spec = self.spec
        weights = jax.tree.map(
            lambda param: sharding.partition_spec(param, self.gather.num_shards), spec.table
        )
        on_mesh = jax.shard_map(
            local,
            mesh=spec.mesh,
            in_specs=(weights, *inputs),
            out_specs=outputs,
            check_vma=False,
        )

        def run(*arguments: Any) -> Any:
            # GPUs would multiply float32 matrices in TF32, with 10 bits of mantissa
            with jax.default_matmul_precision("float32" if spec.dtype == jnp.float32 else None):
                return on_mesh(*arguments)

        return run

    def _make_shards(self, master: Weights) -> Weights:
        make = lambda _, value: Shard(value=value, grad_holder=None)
        return jax.tree.map(make, self.spec.table, master)

    def _compute_logits(self, shards: Weights, hidden_BD: Array) -> Float32[Array, "B V"]:
        spec = self.spec
        head_VD = self.gather.all_gather(decoder.lm_head(spec.table), decoder.lm_head(shards))
        products_BV = jnp.einsum(
            "BD,VD->BV", hidden_BD, head_VD, preferred_element_type=jnp.float32
        )
        return decoder.transform_logits(spec.model, products_BV)


def choose_tokens(
    logits_BV: Float32[Array, "B V"],
    numbers_B: Int32[Array, "B"],
    position: Int32[Array, ""],
    *,
    seed: Int32[Array, ""],
    temperature: Float32[Array, ""],
    top_p: Float32[Array, ""],
    is_greedy: bool,
) -> Int32[Array, "B"]:
    """The next token of each row: the likeliest one, or a sample that does not depend on the mesh.

    Args:
        numbers_B: number of each prompt among all prompts.
        position: number of tokens of the answers before.
    """
    if is_greedy:
        return logits_BV.argmax(-1).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.key(seed), position)
    draw = lambda number: jax.random.gumbel(
        jax.random.fold_in(key, number), logits_BV.shape[1:], jnp.float32
    )
    scaled_BV = logits_BV / temperature
    sorted_BV = jnp.flip(jnp.sort(scaled_BV, axis=-1), -1)
    probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    num_kept_B1 = jnp.maximum((before_BV < top_p).sum(-1, keepdims=True), 1)
    least_B1 = jnp.take_along_axis(sorted_BV, num_kept_B1 - 1, axis=-1)
    kept_BV = jnp.where(scaled_BV >= least_B1, scaled_BV, -jnp.inf)
    return (kept_BV + jax.vmap(draw)(numbers_B)).argmax(-1).astype(jnp.int32)
