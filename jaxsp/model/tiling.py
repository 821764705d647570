"""Functions of tokens in tiles: what they make on the way never exists for more than a tile of tokens."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.model import layers
from jaxsp.model.layers import Gather

MLP_TILE_BYTES = (2 * 2**30, 2**29)
"""Maximum bytes of a tile's activations inside a layer, tried in this order if all tokens at once
do not fit."""

TILE_MULTIPLE = 128
"""Tokens that tiles are preferred to be a multiple of."""


def floor_power_of_two(limit: int) -> int:
    """The largest one up to `most`: as tiles, they divide most shares, and nothing has to be padded."""
    return 1 << (max(1, limit).bit_length() - 1)


def choose_mlp_tile(
    *,
    num_tokens: int,
    intermediate_size: int,
    hidden_size: int,
    itemsize: int,
    max_bytes: int = MLP_TILE_BYTES[0],
) -> int:
    """Tokens of a tile of a layer's projections and MLP whose activations take at most `max_bytes`.

    A token's backward pass holds some six numbers for each of the feed-forward dim in the compute dtype, and five for each of
    the model's in float32.
    """
    return choose_dividing_tile(
        num_tokens,
        floor_power_of_two(max_bytes // (6 * intermediate_size * itemsize + 20 * hidden_size)),
    )


def choose_dividing_tile(num_tokens: int, max_tile: int) -> int:
    """The largest tile from half of `most` up to `most` that divides the tokens; where there is none, `most`.

    Others would be padded, and with them all arrays that are cut into tiles: 10 GiB of an H100 at 609,280 tokens of
    Llama-3.1-8B. Multiples of ALIGN come first, on which matrix products are fast.

    Example: 28,672 tokens in tiles of up to 8,192 go in four of 7,168.
    """
    if num_tokens <= max_tile:
        return max_tile
    tiles = [
        num_tokens // count
        for count in range(-(-num_tokens // max_tile), 2 * num_tokens // max_tile + 1)
        if num_tokens % count == 0
    ]
    return max(tiles, key=lambda tile: (tile % TILE_MULTIPLE == 0, tile), default=max_tile)


def apply_in_tiles(
    function: Callable[..., Any],
    params: layers.Weights,
    shards: Any,
    arrays: tuple[Array, ...],
    *,
    gather: Gather,
    tile_tokens: int,
) -> Any:
    """function(whole weights, *arrays), computed for `tile` tokens at a time where there are more.

    Shapes: arrays and results [B, l, ...]; the function treats each token by itself, and is called with [1, tile, ...].
    Precision: a weight's gradient is summed over tiles in float32, and leaves only then.
    Memory: a tile is computed again in the backward pass; between them only shards and arrays are kept.
    """
    lead = arrays[0].shape[:2]
    tokens = math.prod(lead)
    if tokens <= tile_tokens:
        return function(gather(params, shards), *arrays)
    num_tiles = -(-tokens // tile_tokens)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

    def cut(x: Array) -> Array:
        flat = x.reshape(tokens, *x.shape[2:])
        flat = jnp.pad(flat, ((0, num_tiles * tile_tokens - tokens), *[(0, 0)] * (flat.ndim - 1)))
        return flat.reshape(num_tiles, 1, tile_tokens, *flat.shape[1:])

    def joined(x: Array) -> Array:
        return x.reshape(num_tiles * tile_tokens, *x.shape[3:])[:tokens].reshape(
            *lead, *x.shape[3:]
        )

    @jax.custom_vjp
    def total(shards: Any, arrays: tuple[Array, ...]) -> Any:
        weights = jax.tree.map(gather.all_gather, params, shards)
        _, found = _scan_tiles(
            lambda _, xs: (None, function(weights, *xs)), None, jax.tree.map(cut, arrays)
        )
        return jax.tree.map(joined, found)

    def backward(
        saved: tuple[Any, tuple[Array, ...]], dresults: Any
    ) -> tuple[Any, tuple[Array | None, ...]]:
        shards, arrays = saved
        weights = jax.tree.map(gather.all_gather, params, shards)

        def one(
            sums: layers.Weights, of_tile: tuple[Any, Any]
        ) -> tuple[layers.Weights, list[Array]]:
            xs, dresults = of_tile
            _, pull = jax.vjp(function, weights, *xs)
            dweights, *dxs = pull(dresults)
            sums = jax.tree.map(
                lambda total, of_tile: total + of_tile.astype(jnp.float32), sums, dweights
            )
            return sums, [dx for dx, is_float in zip(dxs, floats, strict=True) if is_float]

        zeros = jax.tree.map(lambda row: jnp.zeros(row.shape, jnp.float32), params)
        sums, found = _scan_tiles(
            one, zeros, (jax.tree.map(cut, arrays), jax.tree.map(cut, dresults))
        )
        of_floats = map(joined, found)
        return jax.tree.map(gather.reduce_scatter, params, sums), tuple(
            next(of_floats) if is_float else None for is_float in floats
        )

    total.defvjp(lambda shards, arrays: (total(shards, arrays), (shards, arrays)), backward)
    return total(shards, arrays)


def _scan_tiles(
    compute_tile: Callable[[Any, Any], tuple[Any, Any]], carry: Any, tiles: Any
) -> tuple[Any, Any]:
    """What jax.lax.scan gives; not to be differentiated.

    XLA fills the memory of a scan's results with zeros long before the scan begins: 5 GiB for the gradient of a layer's input,
    655,360 tokens of 4,096 numbers, there while attention's backward pass needs most. Here it waits until the inputs are there.
    """
    first, *_ = jax.tree.leaves(tiles)
    shapes = jax.eval_shape(compute_tile, carry, jax.tree.map(lambda x: x[0], tiles))[1]
    tiles, zero = jax.lax.optimization_barrier((tiles, jnp.zeros((), jnp.float32)))
    results = jax.tree.map(
        lambda like: jnp.full((len(first), *like.shape), zero.astype(like.dtype)), shapes
    )

    def at(i: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, results = state
        carry, found = compute_tile(carry, jax.tree.map(lambda x: x[i], tiles))
        return carry, jax.tree.map(lambda whole, new: whole.at[i].set(new), results, found)

    return jax.lax.fori_loop(0, len(first), at, (carry, results))
