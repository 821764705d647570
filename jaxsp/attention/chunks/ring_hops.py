"""Hops of a ring that the segments of a microbatch's rows need.

A segment needs the hop from one device to another if it has keys on the first and later queries on
the second. Segments within one chunk need none, and those of a few chunks need few: chunks that
follow each other are on neighboring devices. All devices of the mesh must make the same hops,
although only a group knows its rows, so one small all-reduce per microbatch finds what any needs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxsp.core import axes
from jaxsp.core.layout import Layout

SCOPE = "ring_hops_up_to_all"
"""Scope of the conditional that selects the hops. Its last branch makes all hops."""

NO_HOPS, NEAR_HOPS, ALL_HOPS = range(3)
"""Values of `RingHops.extent`."""

_NEVER = 2**30
"""Number of a chunk that no row has."""


class RingHops(NamedTuple):
    """Hops that any row of a microbatch needs, on any device of the mesh."""

    extent: Int32[Array, ""]
    """NO_HOPS, NEAR_HOPS, or ALL_HOPS. All are made one after another if a far one is needed."""
    needs_near: Bool[Array, "n"]
    """True for the near hops that are needed."""


def near_hops(degree: int) -> np.ndarray:
    """Hops to devices at a distance of 1 or 2 in both directions, made without the hops between."""
    hops = {hop % degree for hop in (1, -1, 2, -2)} - {0}
    return np.array(sorted(hops), np.int32)


def find_hops(
    layout: Layout,
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    row_tokens: int,
) -> RingHops | None:
    """Finds the hops of a microbatch, inside shard_map over the whole mesh; None for one device."""
    if layout.degree == 1:
        return None
    needed_P = needs_hop(layout, starts_BM, lengths_BM, row_tokens=row_tokens)
    needed_P = jax.lax.pmax(needed_P.astype(jnp.int32), axes.ALL) > 0
    near = near_hops(layout.degree)
    is_far = np.ones(layout.degree, bool)
    is_far[[0, *near]] = False
    needs_all = (needed_P & is_far).any() | needed_P[1:].all()
    extent = jnp.where(needs_all, ALL_HOPS, jnp.where(needed_P.any(), NEAR_HOPS, NO_HOPS))
    return RingHops(extent.astype(jnp.int32), needed_P[near])


def needs_hop(
    layout: Layout,
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    row_tokens: int,
) -> Bool[Array, "P"]:
    """True for each number of hops that keys of a segment make to its queries."""
    chunk_tokens = layout.chunk_tokens(row_tokens)
    first_chunk_BM = starts_BM // chunk_tokens
    last_chunk_BM = (starts_BM + lengths_BM - 1) // chunk_tokens
    reached_by_PN = jnp.asarray(_find_reached_chunks(layout))
    is_needed_PBM = last_chunk_BM[None] >= reached_by_PN[:, first_chunk_BM]
    return (is_needed_PBM & (lengths_BM > 0)[None]).any((1, 2))


@functools.lru_cache
def _find_reached_chunks(layout: Layout) -> np.ndarray:
    """First chunk with which a segment that begins in a chunk needs a number of hops.

    Shapes: [P, chunks of a row].
    """
    device = np.zeros(layout.num_chunks, np.int64)
    for place, chunk in enumerate(layout.chunk_order()):
        device[chunk] = place // layout.chunks_per_device
    reached = np.full((layout.degree, layout.num_chunks + 1), _NEVER, np.int32)
    for keys in reversed(range(layout.num_chunks)):
        reached[:, keys] = reached[:, keys + 1]
        queries = np.arange(keys + 1, layout.num_chunks)
        hops = (device[queries] - device[keys]) % layout.degree
        np.minimum.at(reached[:, keys], hops, queries.astype(np.int32))
    reached[0] = _NEVER
    return reached[:, :-1]
