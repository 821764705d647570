"""The decoder: embedding, a scan over stacked layers, last norm; and the table of all its parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxsp import attention
from jaxsp.core import batch
from jaxsp.model import layers
from jaxsp.model.config import ModelConfig


@functools.lru_cache(maxsize=4)
def table(config: ModelConfig) -> layers.Weights:
    """The parameter table: a nested dict like the weights', with a `layers.Parameter` for each leaf.

    Example: {"embedding": ..., "head": ..., "layers": {"attention": {"q": {"weight": ...}, ...}, ...}, "norm": ...}.
    """

    def stacked(row: layers.Parameter) -> layers.Parameter:
        return dataclasses.replace(row, hf_name="model.layers.{layer}." + row.hf_name, num_layers=config.num_layers)

    return {**_rows(layers.Ends(config)), "layers": jax.tree.map(stacked, _rows(layers.Block(config)))}


def head(tree: layers.Weights) -> Any:
    """The leaf that turns hidden states into logits: the embedding's, where the two are tied."""
    return tree["head"] if "head" in tree else tree["embedding"]


def hidden_states(
    shards: layers.Weights,
    rows: batch.Batch,
    *,
    config: ModelConfig,
    attend: attention.Attend,
    gather: layers.Gather,
    dtype: jnp.dtype,
) -> Float[Array, "B l D"]:
    """What the head reads: this device's tokens after the last norm.

    Args:
        shards: this device's part of the weights, float32, like `table`; whole weights exist for one layer at a time.
        rows: this device's part of a turn.
    Memory: the backward pass keeps each layer's input and attention's output and log-sum-exp; the rest of a layer is
        computed again, attention is not, and gathered weights are never kept.
    """
    params = table(config)
    x_BlD = lookup(gather, params["embedding"], shards["embedding"], rows.tokens_BL, dtype)

    def layer(x_BlD: Array, shards: layers.Weights) -> tuple[Array, None]:
        block = nnx.merge(_skeleton(config), gather(params["layers"], shards))
        return block(x_BlD, layers.angles(rows.positions_BL, config), attend, rows.starts_BM, rows.lengths_BM), None

    kept = jax.checkpoint_policies.save_only_these_names(*attention.RESIDUALS)
    x_BlD, _ = jax.lax.scan(jax.checkpoint(layer, policy=kept, prevent_cse=False), x_BlD, shards["layers"])
    norm = nnx.merge(_norm_skeleton(config), gather(params["norm"], shards["norm"]))
    return norm(x_BlD)


def lookup(
    gather: layers.Gather, row: layers.Parameter, shard: Array, tokens_Bl: Int32[Array, "B l"], dtype: jnp.dtype
) -> Float[Array, "B l D"]:
    """Embeddings of tokens; the gradient of the table is summed over tokens in float32.

    In bfloat16 a token that occurs 39,643 times would get gradient 256: adding 1 to 256 gives 256 there.
    """

    @jax.custom_vjp
    def embed(shard: Array) -> Array:
        return gather.join(row, shard)[tokens_Bl].astype(dtype)

    def backward(_: None, dx_BlD: Array) -> tuple[Array]:
        gradient_VD = jnp.zeros(row.shape, jnp.float32).at[tokens_Bl].add(dx_BlD.astype(jnp.float32))
        return (gather.split(row, gradient_VD),)

    embed.defvjp(lambda shard: (embed(shard), None), backward)
    return embed(shard)


@functools.lru_cache(maxsize=4)
def _skeleton(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(layers.Block(config))[0]


@functools.lru_cache(maxsize=4)
def _norm_skeleton(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(layers.Ends(config).norm)[0]


def _rows(module: nnx.Module) -> layers.Weights:
    state = nnx.split(module)[1]
    return nnx.to_pure_dict(jax.tree.map(lambda leaf: leaf.row, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
