"""Places of tokens beside the other tokens of their experts.

A token has a slot for each of its K experts. Slots are sorted by expert, and each expert's slots
fill whole tiles; places that remain are empty. No token is dropped, whatever the router decides:
the number of tiles is that of the worst case.

    slots of experts    0 0 0 0 0 | 1 | 3 3 3
    tiles of 4 places   0 0 0 0 | 0 . . . | 1 . . . | 3 3 3 . | . . . .

Dims: T tokens, K experts of a token, S slots, E experts, N tiles, t places of a tile.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

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
