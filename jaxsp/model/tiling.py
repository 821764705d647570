"""Applies functions to tiles of tokens, so that intermediate values exist for one tile only."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Gather
from jaxsp.core.units import GIB

MLP_TILE_BYTES = (2 * GIB, GIB // 2)
"""Maximum bytes of a tile's activations inside a layer, tried in this order if all tokens together
do not fit."""

TILE_MULTIPLE = 128
"""Preferred divisor of a tile's tokens."""


_Arrays = tuple[Array | None, ...]


def choose_tile(num_tokens: int, *, bytes_per_token: int, max_bytes: int) -> int:
    """Tokens of a tile that takes at most `max_bytes`.

    At most a power of two, which divides most numbers of tokens per device, so that they need no
    padding.
    """
    max_tokens = max(1, max_bytes // bytes_per_token)
    return choose_dividing_tile(num_tokens, 1 << (max_tokens.bit_length() - 1))


def choose_dividing_tile(num_tokens: int, max_tile: int) -> int:
    """The largest tile from max_tile / 2 to max_tile that divides the tokens; else max_tile.

    Other tiles need padding of every array that is split into tiles: 10 GiB of an H100 at 609,280
    tokens of Llama-3.1-8B. Multiples of TILE_MULTIPLE come first: matrix products are fast with
    them.

    Example: 28,672 tokens with max_tile=8,192 are split into four tiles of 7,168.
    """
    if num_tokens <= max_tile:
        return max_tile
    min_tiles = -(-num_tokens // max_tile)
    max_tiles = 2 * num_tokens // max_tile
    tiles = [
        num_tokens // count for count in range(min_tiles, max_tiles + 1) if num_tokens % count == 0
    ]
    return max(tiles, key=lambda tile: (tile % TILE_MULTIPLE == 0, tile), default=max_tile)


def apply_in_tiles(
    bind: Callable[[layers.Weights], Callable[..., Any]],
    params: layers.Weights,
    shards: Any,
    arrays: _Arrays,
    *,
    gather: Gather,
    tile_tokens: int,
    shared: tuple[Any, ...] = (),
) -> Any:
    """Computes bind(whole weights)(*arrays, *shared) for `tile_tokens` tokens at a time.

    Shapes: arrays and results are [B, l, ...]; an array may be None. The function treats each token
        independently. It is called with [1, tile_tokens, ...], or with all tokens if there is one
        tile. Every call gets all of `shared`, integers without gradients.
    Precision: a weight's gradient is summed over tiles in float32, and reduced over devices once.
    Memory: the backward pass recomputes each tile. Only shards and arrays are kept for it.
    """
    assert arrays[0] is not None
    lead = arrays[0].shape[:2]
    if math.prod(lead) <= tile_tokens:
        return bind(gather(params, shards))(*arrays, *shared)
    is_float = [x is not None and jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]
    split = functools.partial(split_tiles, tile_shape=(1, tile_tokens))
    join = functools.partial(join_tiles, tile_ndim=2, lead=lead)

    @jax.custom_vjp
    def apply(shards: Any, arrays: _Arrays, shared: tuple[Any, ...]) -> Any:
        weights = jax.tree.map(gather.all_gather, params, shards)
        compute_tile = lambda _, tile: (None, bind(weights)(*tile, *shared))
        _, results = _scan_tiles(compute_tile, None, jax.tree.map(split, arrays))
        return jax.tree.map(join, results)

    def backward(
        residuals: tuple[Any, _Arrays, tuple[Any, ...]], dresults: Any
    ) -> tuple[Any, _Arrays, None]:
        shards, arrays, shared = residuals
        weights = jax.tree.map(gather.all_gather, params, shards)
        trained = _select_trained(gather, params, weights, shards)
        trained_params = _select_trained(gather, params, params, shards)

        run = lambda trained, *inputs: bind(_replace(params, weights, trained))(*inputs, *shared)

        def add_tile(sums: Any, tile: tuple[Any, Any]) -> tuple[Any, list[Array]]:
            inputs, dresults = tile
            # as `Gather` returns them; in the loop, so that XLA removes the conversion
            weights = jax.tree.map(lambda weight: weight.astype(jnp.float32), trained)
            _, pull = jax.vjp(run, weights, *inputs)
            dweights, *dinputs = pull(dresults)
            sums = jax.tree.map(jnp.add, sums, dweights)
            return sums, list(itertools.compress(dinputs, is_float))

        zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), trained)
        tiles = (jax.tree.map(split, arrays), jax.tree.map(split, dresults))
        inputs = list(itertools.compress(tiles[0], is_float))
        sums, dtiles = _scan_tiles_in_place(add_tile, zeros, tiles, inputs)
        dfloats = map(join, dtiles)
        dshards = jax.tree.map(gather.reduce_scatter, trained_params, sums)
        return dshards, tuple(next(dfloats) if floating else None for floating in is_float), None

    apply.defvjp(lambda *inputs: (apply(*inputs), inputs), backward)
    return apply(shards, arrays, shared)


def _select_trained(gather: Gather, params: layers.Weights, tree: Any, shards: Any) -> Any:
    """`tree` with None in place of frozen weights, whose gradients JAX then does not compute."""
    return jax.tree.map(
        lambda _, leaf, shard: leaf if gather.has_gradient(shard) else None, params, tree, shards
    )


def _replace(
    params: layers.Weights, weights: layers.Weights, some: layers.Weights
) -> layers.Weights:
    """`weights`, with those of `some` where that is not None."""
    choose = lambda _, weight, new: weight if new is None else new
    return jax.tree.map(choose, params, weights, some)


def split_tiles(x_Bl: Array, *, tile_shape: tuple[int, ...], pad_value: int = 0) -> Array:
    """Splits [B, l, ...] into [tiles, *tile_shape, ...], with `pad_value` after the last token."""
    flat = x_Bl.reshape(-1, *x_Bl.shape[2:])
    padding = -len(flat) % math.prod(tile_shape)
    widths = [(0, padding)] + [(0, 0)] * (flat.ndim - 1)
    padded = jnp.pad(flat, widths, constant_values=pad_value)
    return padded.reshape(-1, *tile_shape, *flat.shape[1:])


def join_tiles(tiles: Array, *, tile_ndim: int, lead: tuple[int, ...]) -> Array:
    """Inverse of `split_tiles`. Args: tile_ndim: dims of a tile's shape. lead: B and l."""
    rest = tiles.shape[1 + tile_ndim :]
    return tiles.reshape(-1, *rest)[: math.prod(lead)].reshape(*lead, *rest)


def _scan_tiles(
    compute_tile: Callable[[Any, Any], tuple[Any, Any]], carry: Any, tiles: Any
) -> tuple[Any, Any]:
    """Returns the results of jax.lax.scan; not differentiable.

    XLA fills the memory of a scan's results with zeros long before the scan begins. For the
    gradient of a layer's input (655,360 tokens of 4,096 numbers) that is 5 GiB, live when
    attention's backward pass needs the most memory. Here the zeros wait until the inputs are
    computed.
    """
    first, *_ = jax.tree.leaves(tiles)
    shapes = jax.eval_shape(compute_tile, carry, jax.tree.map(lambda x: x[0], tiles))[1]
    tiles, zero = jax.lax.optimization_barrier((tiles, jnp.zeros((), jnp.float32)))
    results = jax.tree.map(
        lambda shape: jnp.full((len(first), *shape.shape), zero.astype(shape.dtype)), shapes
    )

    def body(i: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, results = state
        carry, tile_results = compute_tile(carry, jax.tree.map(lambda x: x[i], tiles))
        results = jax.tree.map(lambda whole, tile: whole.at[i].set(tile), results, tile_results)
        return carry, results

    return jax.lax.fori_loop(0, len(first), body, (carry, results))


def _scan_tiles_in_place(
    compute_tile: Callable[[Any, Any], tuple[Any, list[Array]]],
    carry: Any,
    tiles: tuple[Any, Any],
    inputs: list[Array],
) -> tuple[Any, list[Array]]:
    """Returns the results of jax.lax.scan for a backward pass, which overwrite its tiles.

    Memory: a result takes the place of an array of `tiles`, if that is not used later: a gradient
        of the results that has its shape, or else the input that it is the gradient of. That is 14
        GiB of each device for 7.5M tokens of Llama-3.1-8B on 8 devices.

    Args: inputs: those of `tiles` whose gradients `compute_tile` returns, in that order.
    """
    leaves, structure = jax.tree.flatten(tiles)
    free = dict.fromkeys(range(len(jax.tree.leaves(tiles[0])), len(leaves)))
    places = []
    for x in inputs:
        matches = [i for i in free if (leaves[i].shape, leaves[i].dtype) == (x.shape, x.dtype)]
        place = matches[0] if matches else next(i for i, leaf in enumerate(leaves) if leaf is x)
        free.pop(place, None)
        places.append(place)

    def body(i: Array, state: tuple[Any, list[Array]]) -> tuple[Any, list[Array]]:
        carry, leaves = state
        # Read before it is overwritten
        tile = jax.lax.optimization_barrier([leaf[i] for leaf in leaves])
        carry, results = compute_tile(carry, jax.tree.unflatten(structure, tile))
        leaves = list(leaves)
        for place, result in zip(places, results, strict=True):
            leaves[place] = leaves[place].at[i].set(result)
        return carry, leaves

    carry, leaves = jax.lax.fori_loop(0, len(leaves[0]), body, (carry, leaves))
    return carry, [leaves[place] for place in places]
