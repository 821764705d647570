"""The pieces of rows as cuDNN's packed calls take them: told apart by length, each in a slot of its call.

A packed call has slots, for a piece of up to T tokens each, which may lie anywhere in memory. cuDNN dimensions the backward
call's memory as if every slot were full: one call with 64 slots of a row of 131,072 tokens, 4 heads of size 128, would take
64 * 131,072 * 4 * 128 * 4 bytes = 16 GiB for the sums of dq alone. But 64 pieces of one row cannot all be long. So long
pieces go to one call, shorter ones to the next, with as many more slots as they are shorter, and each call has slots for
SHARE times the row's tokens only. Up to 64 pieces in a row of L tokens:

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

from jaxsp.attention.kernels import pieces

SHARE = 4
"""How many times the rows' tokens a call has room for, and how much shorter the next call's pieces are. With 2, calls take
half the memory and there are twice as many."""

ALIGN = 128
"""Slots have a multiple of so many tokens, as rows do."""

NO_STATISTIC = 1e30
"""Stands for the log-sum-exp of a slot's places beyond its piece: exp(score - this) is 0, without an infinity on the way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call: which lengths it is for, and the shape of its slots."""

    above: int
    """Pieces have more tokens than this,"""
    tokens: int
    """and so many at most: the size of a slot."""
    num_slots: int
    num_tokens: int
    """Of all rows together."""

    @property
    def num_rows(self) -> int:
        """Rows of `tokens` tokens that the memory of all rows is taken for."""
        return self.num_tokens // self.tokens

    @property
    def slots_per_row(self) -> int:
        return self.num_slots // self.num_rows


class Slots(NamedTuple):
    """The pieces of one call, in the order of their tokens; unused slots are (0, 0), at the end."""

    starts_S: Int32[Array, "S"]
    """First token, counted over all rows."""
    lengths_S: Int32[Array, "S"]
    slot_N: Int32[Array, "N"]
    """The slot of each token of all rows, -1 where it is in none."""
    place_N: Int32[Array, "N"]
    """Its place in the slot; 0 where it is in none."""


def calls(*, num_rows: int, row_tokens: int, max_pieces: int) -> tuple[Call, ...]:
    """The calls that together take every piece of rows with up to `max_pieces` pieces each, the longest pieces first."""
    # A row has fewer than SHARE * row_tokens / T pieces of more than T / SHARE tokens
    sizes, tokens, per_tokens = [row_tokens], row_tokens, max_pieces
    while per_tokens > SHARE and tokens % (SHARE * ALIGN) == 0:
        tokens, per_tokens = tokens // SHARE, -(-per_tokens // SHARE)
        sizes.append(tokens)
    total = num_rows * row_tokens
    found = [Call(above=b, tokens=a, num_slots=total // a * SHARE, num_tokens=total) for a, b in itertools.pairwise(sizes)]
    # cuDNN knows packed rows of two slots and more
    return (*found, Call(above=0, tokens=tokens, num_slots=total // tokens * max(per_tokens, 2), num_tokens=total))


def slots(call: Call, starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"]) -> Slots:
    """Puts the pieces of a call's lengths into its slots."""
    B = len(starts_BM)
    firsts_B1 = jnp.arange(B, dtype=jnp.int32)[:, None] * (call.num_tokens // B)
    starts, lengths = (starts_BM + firsts_B1).reshape(-1), lengths_BM.reshape(-1)
    chosen = (lengths > call.above) & (lengths <= call.tokens)
    slot = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, call.num_slots)
    none_S = jnp.zeros(call.num_slots, jnp.int32)
    starts_S, lengths_S = (none_S.at[slot].set(x, mode="drop") for x in (starts, lengths))
    slot_N = pieces.piece_of_token(starts_S[None], lengths_S[None], call.num_tokens)[0]
    place_N = jnp.where(slot_N < 0, 0, jnp.arange(call.num_tokens, dtype=jnp.int32) - starts_S[slot_N])
    return Slots(starts_S, lengths_S, slot_N, place_N)


def compressed(statistic_ShT: Float32[Array, "S h T"], taken: Slots) -> Float32[Array, "N h"]:
    """The statistic of each token, from that of each slot's tokens; for tokens of no slot it means nothing."""
    return statistic_ShT[taken.slot_N, :, taken.place_N]


def expanded(lse_Nh: Float32[Array, "N h"], taken: Slots, *, tokens: int) -> Float32[Array, "S h T"]:
    """Undoes `compressed`, with NO_STATISTIC where a slot holds no token."""
    place_1T = jnp.arange(tokens, dtype=jnp.int32)[None]
    token_ST = jnp.minimum(taken.starts_S[:, None] + place_1T, len(lse_Nh) - 1)
    inside_ST1 = (place_1T < taken.lengths_S[:, None])[..., None]
    return jnp.where(inside_ST1, lse_Nh[token_ST], NO_STATISTIC).swapaxes(1, 2)
