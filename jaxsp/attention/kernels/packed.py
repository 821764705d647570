"""Sorts the segments of packed rows by length into the slots of cuDNN's packed calls.

A packed call has slots, each for a segment of up to T tokens that may start anywhere in memory.
cuDNN allocates memory for the backward call as if every slot were full: one call with 64 slots of a
row of 131,072 tokens, 4 heads of size 128, would need 64 * 131,072 * 4 * 128 * 4 bytes = 16 GiB for
the float32 sums of dq. But 64 segments of one row cannot all be long. So long segments go to one
call and shorter ones to the next, whose slots are ROOM times as many and ROOM times as short. The
slots of each call hold ROOM times the row's tokens. For up to 64 segments in a row of L tokens,
with ROOM = 4:

    call    lengths             a slot's tokens T    slots
    0       L/4 + 1 ... L       L                    4
    1       L/16 + 1 ... L/4    L/4                  16
    2       1 ... L/16          L/16                 64
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxsp.attention.kernels import segments

ROOMS = (4, 2)
"""Capacity of a call's slots, as a multiple of the rows' tokens. 2 needs half the memory and twice
as many calls."""

ROOM = ROOMS[0]

ALIGN = 128
"""The tokens of a slot must be a multiple of this, as those of a row."""

NO_STATISTIC = 1e30
"""Log-sum-exp at positions of a slot after the end of its segment: exp(score - this) is 0, and no
infinity occurs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One packed call: the lengths of its segments, and the shape of its slots."""

    above: int
    """Lower bound of the segments' tokens, exclusive."""
    tokens: int
    """Tokens of a slot, and of the longest segment that it can hold."""
    num_slots: int
    num_tokens: int
    """Tokens of all rows together."""

    @property
    def num_rows(self) -> int:
        """Number of rows of `tokens` tokens that the memory of all rows is reinterpreted as."""
        return self.num_tokens // self.tokens


class Slots(NamedTuple):
    """The segments of one call, in the order of their tokens; unused slots are (0, 0), at the end."""

    starts_S: Int32[Array, "S"]
    """First token, counted over all rows."""
    lengths_S: Int32[Array, "S"]
    slot_N: Int32[Array, "N"]
    """Slot of each token of all rows; -1 for tokens of no slot."""

    @property
    def place_N(self) -> Int32[Array, "N"]:
        """Position of each token in its slot; 0 for tokens of no slot."""
        tokens_N = jnp.arange(len(self.slot_N), dtype=jnp.int32)
        return jnp.where(self.slot_N < 0, 0, tokens_N - self.starts_S[self.slot_N])


class CallTable(NamedTuple):
    """Small arrays that map segments to the slots of one call."""

    starts_S: Int32[Array, "S"]
    lengths_S: Int32[Array, "S"]
    slot_BM: Int32[Array, "BM"]
    """Slot of each segment of all rows; -1 for segments of other calls."""


class Tables(NamedTuple):
    """Segment tables of all packed calls. They are the same for every layer, so they are computed
    once per microbatch."""

    segment_N: Int32[Array, "N"]
    """Segment of each token, counted over all rows; -1 for padding. 4 bytes per token."""
    calls: tuple[CallTable, ...]

    def slots(self, number: int) -> Slots:
        """The slots of one of the calls."""
        table = self.calls[number]
        slot_N = jnp.where(self.segment_N < 0, -1, table.slot_BM[self.segment_N])
        return Slots(table.starts_S, table.lengths_S, slot_N)


def calls(*, num_rows: int, row_tokens: int, max_pieces: int, room: int = ROOM) -> tuple[Call, ...]:
    """Calls that together hold all segments of rows with up to `max_pieces` segments each, longest
    segments first."""
    # A row has fewer than room * row_tokens / T segments of more than T / room tokens
    sizes, tokens, per_tokens = [row_tokens], row_tokens, max_pieces
    while per_tokens > room and tokens % (room * ALIGN) == 0:
        tokens, per_tokens = tokens // room, -(-per_tokens // room)
        sizes.append(tokens)
    total = num_rows * row_tokens
    found = [Call(above=b, tokens=a, num_slots=total // a * room, num_tokens=total) for a, b in itertools.pairwise(sizes)]
    # cuDNN's packed rows have two slots or more
    return (*found, Call(above=0, tokens=tokens, num_slots=total // tokens * max(per_tokens, 2), num_tokens=total))


def tables(
    made: tuple[Call, ...], starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], *, row_tokens: int
) -> Tables:
    """Assigns the segments of rows to the slots of calls."""
    B, M = starts_BM.shape
    segment_BL = segments.piece_of_token(starts_BM, lengths_BM, row_tokens)
    first_of_row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    segment_BL = jnp.where(segment_BL < 0, -1, segment_BL + first_of_row_B1 * M)
    starts, lengths = (starts_BM + first_of_row_B1 * row_tokens).reshape(-1), lengths_BM.reshape(-1)
    return Tables(segment_BL.reshape(-1), tuple(_table(call, starts, lengths) for call in made))


def _table(call: Call, starts: Array, lengths: Array) -> CallTable:
    chosen = (lengths > call.above) & (lengths <= call.tokens)
    slot = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, call.num_slots)
    empty_S = jnp.zeros(call.num_slots, jnp.int32)
    starts_S, lengths_S = (empty_S.at[slot].set(x, mode="drop") for x in (starts, lengths))
    return CallTable(starts_S, lengths_S, jnp.where(chosen, slot, -1))


def compressed(statistic_ShT: Float32[Array, "S h T"], taken: Slots) -> Float32[Array, "N h"]:
    """The statistic of each token, from that of each slot's tokens; undefined for tokens of no slot."""
    return statistic_ShT[taken.slot_N, :, taken.place_N]


def expanded(lse_Nh: Float32[Array, "N h"], taken: Slots, *, tokens: int) -> Float32[Array, "S h T"]:
    """Inverse of `compressed`, with NO_STATISTIC at positions without a token."""
    place_1T = jnp.arange(tokens, dtype=jnp.int32)[None]
    token_ST = jnp.minimum(taken.starts_S[:, None] + place_1T, len(lse_Nh) - 1)
    inside_ST1 = (place_1T < taken.lengths_S[:, None])[..., None]
    return jnp.where(inside_ST1, lse_Nh[token_ST], NO_STATISTIC).swapaxes(1, 2)
