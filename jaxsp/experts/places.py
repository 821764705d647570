"""Places of tokens beside the other tokens of their experts, and the ways there and back.

A token has a slot for each of its K experts. Slots are sorted by expert, and each expert's slots
fill whole tiles; places that remain have zeros. No token is dropped, whatever the router decides:
the number of tiles is that of the worst case.

    slots of experts    0 0 0 0 0 | 1 | 3 3 3
    tiles of 4 places   0 0 0 0 | 0 . . . | 1 . . . | 3 3 3 . | . . . .

Dims: T tokens, K experts of a token, N tiles, t places of a tile, D any.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

MIN_TILE = 16
MAX_TILE = 512
"""Limits of the places of a tile, powers of two."""

BLOCK_PLACES = 4096
"""Maximum places that are multiplied at a time, which keep a GPU busy."""


class Places(NamedTuple):
    """Where the tokens are."""

    slots_Nt: Int32[Array, "N t"]
    """Slot of each place, token * K + number of the token's expert; T * K: none."""
    experts_N: Int32[Array, "N"]
    """Expert of each tile; any expert for a tile without slots."""
    places_TK: Int32[Array, "T K"]
    """Place of each slot, tile * t + place in the tile."""


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
    num_blocks = -(-number * size // BLOCK_PLACES)
    block = -(-number // num_blocks)
    return Tiles(size, block, block * num_blocks)


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
    return Places(
        slots_Nt=slots_P.reshape(tiles.number, tiles.size),
        experts_N=jnp.minimum(experts_N, num_experts - 1),
        places_TK=jnp.zeros(num_slots, jnp.int32)
        .at[order_S]
        .set(places_S)
        .reshape(experts_TK.shape),
    )


@jax.custom_vjp
def spread(x_TD: Float[Array, "T D"], places: Places) -> Float[Array, "N t D"]:
    """The token of each place, for all of its slots; zeros where there is none."""
    return _read_tokens(x_TD, places)


def _spread_forward(x_TD: Array, places: Places) -> tuple[Array, Places]:
    return _read_tokens(x_TD, places), places


def _spread_backward(places: Places, dx_NtD: Array) -> tuple[Array, None]:
    dx_TKD = _read_places(dx_NtD, places)
    return jnp.sum(dx_TKD.astype(jnp.float32), axis=1).astype(dx_NtD.dtype), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def combine(
    y_NtD: Float[Array, "N t D"], weights_TK: Float32[Array, "T K"], places: Places
) -> Float[Array, "T D"]:
    """Sum of a token's slots, each times its weight.

    The slots are gathered and added in their order, in float32: without atomic additions the result
    is the same in every run.
    """
    y_TKD = _read_places(y_NtD, places).astype(jnp.float32)
    return jnp.sum(y_TKD * weights_TK[..., None], axis=1).astype(y_NtD.dtype)


def _combine_forward(
    y_NtD: Array, weights_TK: Array, places: Places
) -> tuple[Array, tuple[Array, Array, Places]]:
    return combine(y_NtD, weights_TK, places), (y_NtD, weights_TK, places)


def _combine_backward(
    residuals: tuple[Array, Array, Places], dout_TD: Array
) -> tuple[Array, Array, None]:
    y_NtD, weights_TK, places = residuals
    weights_Nt = weights_TK.reshape(-1).at[places.slots_Nt].get(mode="fill", fill_value=0)
    dy_NtD = _read_tokens(dout_TD, places).astype(jnp.float32) * weights_Nt[..., None]
    y_TKD = _read_places(y_NtD, places).astype(jnp.float32)
    dweights_TK = jnp.sum(y_TKD * dout_TD[:, None].astype(jnp.float32), axis=-1)
    return dy_NtD.astype(y_NtD.dtype), dweights_TK, None


combine.defvjp(_combine_forward, _combine_backward)


def _read_tokens(x_TD: Array, places: Places) -> Float[Array, "N t D"]:
    tokens_Nt = places.slots_Nt // places.places_TK.shape[1]
    return x_TD.at[tokens_Nt].get(mode="fill", fill_value=0)


def _read_places(x_NtD: Array, places: Places) -> Float[Array, "T K D"]:
    return x_NtD.reshape(-1, x_NtD.shape[-1])[places.places_TK]
