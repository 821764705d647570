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
from jaxsp.model import layers, remat, tiling
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
    how: remat.Remat,
    tile: int,
) -> Float[Array, "B l D"]:
    """What the head reads: this device's tokens after the last norm.

    Args:
        shards: this device's part of the weights, like `table`; whole weights exist for one layer at a time.
        rows: this device's part of a turn.
        how: what the backward pass keeps of each layer, and what it computes again.
        tile: tokens of a device that go through what is before attention, and what is after it, at a time.
    """
    params = table(config)
    x_BlD = lookup(gather, params["embedding"], shards["embedding"], rows.tokens_BL, dtype)
    tiled = functools.partial(tiling.tiled, gather=gather, tile=tile)
    before, after = _skeleton(config)
    tables = attend.tables(rows.starts_BM, rows.lengths_BM, share_tokens=rows.tokens_BL.shape[1])

    def layer(x_BlD: Array, shards: layers.Weights) -> tuple[Array, None]:
        x_BlD = remat.named_input(x_BlD)
        q_BlHK, k_BlGK, v_BlGK = tiled(
            lambda weights, *inputs: nnx.merge(before, weights)(*inputs),
            params["layers"]["before"],
            shards["before"],
            (x_BlD, rows.positions_BL),
        )
        out_BlHK = attend(q_BlHK, k_BlGK, v_BlGK, rows.starts_BM, rows.lengths_BM, tables)
        x_BlD = tiled(
            lambda weights, *inputs: nnx.merge(after, weights)(*inputs),
            params["layers"]["after"],
            shards["after"],
            (x_BlD, out_BlHK),
        )
        return x_BlD, None

    x_BlD, _ = jax.lax.scan(remat.layer(layer, how), x_BlD, shards["layers"])
    norm = nnx.merge(_norm_skeleton(config), gather(params["norm"], shards["norm"]))
    return norm(x_BlD)


def lookup(
    gather: layers.Gather, row: layers.Parameter, shard: Any, tokens_Bl: Int32[Array, "B l"], dtype: jnp.dtype
) -> Float[Array, "B l D"]:
    """Embeddings of tokens; the gradient of the table is summed over tokens in float32.

    In bfloat16 a token that occurs 39,643 times would get gradient 256: adding 1 to 256 gives 256 there.
    """

    @jax.custom_vjp
    def embed(shard: Any) -> Array:
        return gather.join(row, shard)[tokens_Bl].astype(dtype)

    def backward(_: None, dx_BlD: Array) -> tuple[Any]:
        # The zeros must wait for dx. Otherwise XLA fills them before the layers' backward pass, where memory is fullest (2 GiB
        # for a vocabulary of 128,256)
        zero, dx_BlD = jax.lax.optimization_barrier((jnp.float32(0), dx_BlD))
        gradient_VD = jnp.broadcast_to(zero, row.shape).at[tokens_Bl].add(dx_BlD.astype(jnp.float32))
        return (gather.split(row, gradient_VD),)

    embed.defvjp(lambda shard: (embed(shard), None), backward)
    return embed(shard)


@functools.lru_cache(maxsize=4)
def _skeleton(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.GraphDef]:
    block = layers.Block(config)
    return nnx.split(block.before)[0], nnx.split(block.after)[0]


@functools.lru_cache(maxsize=4)
def _norm_skeleton(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(layers.Ends(config).norm)[0]


def _rows(module: nnx.Module) -> layers.Weights:
    state = nnx.split(module)[1]
    return nnx.to_pure_dict(jax.tree.map(lambda leaf: leaf.row, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
