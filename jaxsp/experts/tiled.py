"""The experts of all tokens, a block of tiles at a time, in XLA on any device.

A loop reads the tokens of a block and copies of their experts' matrices, so that intermediate
values exist for one block only. Every sum has a fixed order, without atomic additions: a result is
the same in every run.

A token has a slot for each of its K experts. Slots are sorted by expert, and each expert's slots
fill whole tiles; places that remain are empty. No token is dropped, whatever the router decides:
the number of tiles is that of the worst case.

    slots of experts    0 0 0 0 0 | 1 | 3 3 3
    tiles of 4 places   0 0 0 0 | 0 . . . | 1 . . . | 3 3 3 . | . . . .

Dims: T tokens, K experts of a token, S slots, E experts, N tiles of t places, b tiles of a block, D
model, i and o of a matrix.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

MIN_TILE = 16
MAX_TILE = 512
"""Limits of the places of a tile, powers of two."""

KERNEL_TILE = 128
"""Places of a tile in the Mosaic kernels."""

BLOCK_PLACES = 4096
"""Maximum places that are multiplied at a time: they keep a GPU busy."""

BLOCK_TILES = 8
"""Maximum tiles that are multiplied at a time: there are copies of their experts' matrices."""


class Tiles(NamedTuple):
    """Sizes of the tiles of slots."""

    size: int
    """Number of places of a tile."""
    block: int
    """Number of tiles that are multiplied at a time."""
    number: int
    """Number of tiles, a multiple of `block`; enough for any distribution of slots over experts."""


def choose_tiles(num_slots: int, num_experts: int) -> Tiles:
    """Tiles of half the slots that an expert has on average, so that few places are empty."""
    average = max(1, num_slots // (2 * num_experts))
    size = min(max(1 << (average.bit_length() - 1), MIN_TILE), MAX_TILE)
    number = min(num_slots, (num_slots + num_experts * (size - 1)) // size)
    num_blocks = -(-number // min(BLOCK_TILES, BLOCK_PLACES // size))
    block = -(-number // num_blocks)
    return Tiles(size, block, block * num_blocks)


class Places(NamedTuple):
    """Places of slots, and slots of places."""

    slots_Nt: Int32[Array, "N t"]
    """Slot of each place, token * K + number of the token's expert; T * K: none."""
    experts_N: Int32[Array, "N"]
    """Expert of each tile; any expert for a tile without slots."""
    ends_E: Int32[Array, "E"]
    """Number of tiles up to those of each expert."""
    places_TK: Int32[Array, "T K"]
    """Place of each slot, tile * t + place in the tile."""


def find_places(experts_TK: Int32[Array, "T K"], tiles: Tiles, *, num_experts: int) -> Places:
    """Places of all slots."""
    experts_S = experts_TK.reshape(-1)
    num_slots = experts_S.size
    # Stable, so that an expert's tokens keep their order
    order_S = jnp.argsort(experts_S, stable=True).astype(jnp.int32)
    counts_E = jnp.zeros(num_experts, jnp.int32).at[experts_S].add(1)
    tiles_E = -(-counts_E // tiles.size)
    ends_E = jnp.cumsum(tiles_E)
    sorted_S = experts_S[order_S]
    first_place_E = (ends_E - tiles_E) * tiles.size
    first_slot_E = jnp.cumsum(counts_E) - counts_E
    rank_S = jnp.arange(num_slots, dtype=jnp.int32) - first_slot_E[sorted_S]
    places_S = first_place_E[sorted_S] + rank_S
    numbers_N = jnp.arange(tiles.number, dtype=jnp.int32)
    experts_N = jnp.searchsorted(ends_E, numbers_N, side="right").astype(jnp.int32)
    slots_P = jnp.full(tiles.number * tiles.size, num_slots, jnp.int32).at[places_S].set(order_S)
    places_TK = jnp.zeros(num_slots, jnp.int32).at[order_S].set(places_S)
    return Places(
        slots_Nt=slots_P.reshape(tiles.number, tiles.size),
        experts_N=jnp.minimum(experts_N, num_experts - 1),
        ends_E=ends_E,
        places_TK=places_TK.reshape(experts_TK.shape),
    )


def read_tokens(
    x_TD: Float[Array, "T D"], slots: Int32[Array, "*places"], num_chosen: int
) -> Float[Array, "*places D"]:
    """The token of each place; zeros where there is none. Args: num_chosen: experts of a token."""
    return x_TD.at[slots // num_chosen].get(mode="fill", fill_value=0)


def read_places(x: Float[Array, "*places D"], where: Places) -> Float[Array, "T K D"]:
    """Results at the places of each token."""
    return x.reshape(-1, x.shape[-1])[where.places_TK]


class Weight(NamedTuple):
    """A weight of a block's experts, and zeros whose gradient is the weight's, in float32."""

    value: Float[Array, "b ..."]
    holder: Float32[Array, "b ..."]

    def multiply(self, x_bti: Float[Array, "b t i"]) -> Float[Array, "b t o"]:
        """Each tile times the transposed matrix of its expert, [b, o, i]."""
        return _multiply(x_bti, self)

    def add_to(self, y_bto: Float[Array, "b t o"]) -> Float[Array, "b t o"]:
        """Adds the bias of its expert, [b, o], to each tile, in float32."""
        return _add_bias(y_bto, self)


BlockFunction = Callable[[Float[Array, "b t D"], Any], Float[Array, "b t D"]]
"""Function that computes the outputs of a block from its tokens and a tree of `Weight`."""


@jax.custom_vjp
def _multiply(x_bti: Array, matrix: Weight) -> Array:
    return jnp.einsum("bti,boi->bto", x_bti, matrix.value)


def _multiply_backward(residuals: tuple[Array, Weight], dy_bto: Array) -> tuple[Array, Weight]:
    x_bti, matrix = residuals
    dx_bti = jnp.einsum("bto,boi->bti", dy_bto, matrix.value)
    gradient = jnp.einsum("bto,bti->boi", dy_bto, x_bti, preferred_element_type=jnp.float32)
    return dx_bti, Weight(jnp.zeros_like(matrix.value), gradient)


_multiply.defvjp(lambda x, matrix: (_multiply(x, matrix), (x, matrix)), _multiply_backward)


@jax.custom_vjp
def _add_bias(y_bto: Array, bias: Weight) -> Array:
    y32 = y_bto.astype(jnp.float32) + bias.value[:, None].astype(jnp.float32)
    return y32.astype(y_bto.dtype)


def _add_bias_backward(bias: Weight, dy_bto: Array) -> tuple[Array, Weight]:
    gradient = jnp.sum(dy_bto.astype(jnp.float32), axis=1)
    return dy_bto, Weight(jnp.zeros_like(bias.value), gradient)


_add_bias.defvjp(lambda y, bias: (_add_bias(y, bias), bias), _add_bias_backward)


def apply(
    function: BlockFunction,
    weights: Any,
    x_TD: Float[Array, "T D"],
    shares_TK: Float32[Array, "T K"],
    experts_TK: Int32[Array, "T K"],
) -> Float[Array, "T D"]:
    """Sum of the outputs of a token's experts, each times the token's share of it.

    Memory: outputs, and in the backward pass gradients, of all places, and float32 gradients of all
        experts' weights.
    Args:
        function: gets the weights of a block's experts, [b, ...], in the structure of `weights`.
        weights: tree of arrays [E, ...].
    """
    num_experts = len(jax.tree.leaves(weights)[0])
    tiles = choose_tiles(experts_TK.size, num_experts)
    where = find_places(experts_TK, tiles, num_experts=num_experts)
    return _apply(function, tiles.block, weights, x_TD, shares_TK, where)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(
    function: BlockFunction, block: int, weights: Any, x_TD: Array, shares_TK: Array, where: Places
) -> Array:
    weights = jax.tree.map(lambda weight: weight.astype(x_TD.dtype), weights)

    def run_block(number: Array, y_NtD: Array) -> Array:
        slots_bt, experts_b = _read_block(number, block, where.slots_Nt, where.experts_N)
        x_btD = read_tokens(x_TD, slots_bt, shares_TK.shape[1])
        y_btD = function(x_btD, _read_weights(weights, experts_b))
        return _write_block(y_NtD, y_btD, number)

    y_NtD = jax.lax.empty((*where.slots_Nt.shape, x_TD.shape[1]), x_TD.dtype)
    y_NtD = jax.lax.fori_loop(0, len(where.experts_N) // block, run_block, y_NtD)
    y_TKD = read_places(y_NtD, where).astype(jnp.float32)
    return jnp.sum(y_TKD * shares_TK[..., None], axis=1).astype(x_TD.dtype)


def _apply_backward(
    function: BlockFunction, block: int, residuals: tuple[Any, ...], dout_TD: Array
) -> tuple[Any, Array, Array, None]:
    given, x_TD, shares_TK, where = residuals
    weights = jax.tree.map(lambda weight: weight.astype(x_TD.dtype), given)
    num_chosen = shares_TK.shape[1]

    def pull_block(number: Array, state: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        dx_NtD, dshares_Nt, sums = state
        slots_bt, experts_b = _read_block(number, block, where.slots_Nt, where.experts_N)
        x_btD = read_tokens(x_TD, slots_bt, num_chosen)
        dout_btD = read_tokens(dout_TD, slots_bt, num_chosen).astype(jnp.float32)
        shares_bt = shares_TK.reshape(-1).at[slots_bt].get(mode="fill", fill_value=0)
        y_btD, pull = jax.vjp(function, x_btD, _read_weights(weights, experts_b))
        dx_btD, dweights = pull((dout_btD * shares_bt[..., None]).astype(y_btD.dtype))
        dshares_bt = jnp.sum(y_btD.astype(jnp.float32) * dout_btD, axis=-1)
        is_weight = lambda x: isinstance(x, Weight)
        gradients = jax.tree.map(lambda x: x.holder, dweights, is_leaf=is_weight)

        def add_tile(tile: Array, sums: Any) -> Any:
            add = lambda sum, part: sum.at[experts_b[tile]].add(part[tile])
            return jax.tree.map(add, sums, gradients)

        sums = jax.lax.fori_loop(0, block, add_tile, sums)
        dx_NtD = _write_block(dx_NtD, dx_btD, number)
        return dx_NtD, _write_block(dshares_Nt, dshares_bt, number), sums

    state = (
        jax.lax.empty((*where.slots_Nt.shape, x_TD.shape[1]), x_TD.dtype),
        jax.lax.empty(where.slots_Nt.shape, jnp.float32),
        jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), weights),
    )
    num_blocks = len(where.experts_N) // block
    dx_NtD, dshares_Nt, sums = jax.lax.fori_loop(0, num_blocks, pull_block, state)
    dx_TKD = read_places(dx_NtD, where).astype(jnp.float32)
    dx_TD = jnp.sum(dx_TKD, axis=1).astype(x_TD.dtype)
    dshares_TK = dshares_Nt.reshape(-1)[where.places_TK]
    dweights = jax.tree.map(lambda weight, gradient: gradient.astype(weight.dtype), given, sums)
    return dweights, dx_TD, dshares_TK, None


_apply.defvjp(
    lambda function, block, *inputs: (_apply(function, block, *inputs), inputs), _apply_backward
)


def _read_block(number: Array, block: int, *arrays: Array) -> list[Array]:
    return [jax.lax.dynamic_slice_in_dim(x, number * block, block) for x in arrays]


def _write_block(whole: Array, part: Array, number: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, number * len(part), 0)


def _read_weights(weights: Any, experts_b: Array) -> Any:
    """Weights of a block's experts, in a tree of `Weight`."""

    def read(weight: Array) -> Weight:
        value = weight[experts_b]
        return Weight(value, jnp.zeros(value.shape, jnp.float32))

    return jax.tree.map(read, weights)
