"""Sorts the segments of packed rows by length into the bins of cuDNN's packed calls.

A packed call has bins, each for a segment of up to T tokens that may start anywhere in memory.
cuDNN allocates memory for the backward call as if every bin were full: one call with 64 bins of a
row of 131,072 tokens, 4 heads of size 128, would need 64 * 131,072 * 4 * 128 * 4 bytes = 16 GiB for
the float32 sums of dq. But 64 segments of one row cannot all be long. So long segments go to one
call and shorter ones to the next, which has more and shorter bins, both by the capacity factor.
The bins of each call hold the capacity factor times the row's tokens. For up to 64 segments in a
row of L tokens, with a capacity factor of 4:

    call    lengths             a bin's tokens T    bins
    0       L/4 + 1 ... L       L                    4
    1       L/16 + 1 ... L/4    L/4                  16
    2       1 ... L/16          L/16                 64
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxsp.attention.kernels import segments

CAPACITY_FACTORS = (4, 2)
"""Capacity of a call's bins, as a multiple of the rows' tokens. 2 needs half the memory and twice
as many calls."""

CAPACITY_FACTOR = CAPACITY_FACTORS[0]

BIN_MULTIPLE = 128
"""The tokens of a bin, and of a row, must be a multiple of this."""

MASKED_LSE = 1e30
"""Log-sum-exp at positions of a bin after the end of its segment: exp(score - this) is 0, and no
infinity occurs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCall:
    """One packed call: the lengths of its segments, and the shape of its bins."""

    longer_than: int
    """Lower bound of the segments' tokens, exclusive."""
    bin_tokens: int
    """Tokens of a bin, and of the longest segment that it can hold."""
    num_bins: int
    num_tokens: int
    """Tokens of all rows together."""

    @property
    def num_rows(self) -> int:
        """Number of rows of `bin_tokens` tokens that the memory of all rows is reinterpreted
        as."""
        return self.num_tokens // self.bin_tokens


class CallBins(NamedTuple):
    """The segments of one call, in the order of their tokens; unused bins are (0, 0), at the
    end."""

    starts_S: Int32[Array, "S"]
    """First token of each bin's segment, counted over all rows."""
    lengths_S: Int32[Array, "S"]
    bin_N: Int32[Array, "N"]
    """Bin of each token of all rows; -1 for tokens outside all bins."""

    def tokens_ST(self, bin_tokens: int) -> Int32[Array, "S T"]:
        """Token at each position of each bin; any token at positions after a segment."""
        position_1T = jnp.arange(bin_tokens, dtype=jnp.int32)[None]
        return jnp.minimum(self.starts_S[:, None] + position_1T, len(self.bin_N) - 1)

    @property
    def position_N(self) -> Int32[Array, "N"]:
        """Position of each token in its bin; 0 for tokens outside all bins."""
        tokens_N = jnp.arange(len(self.bin_N), dtype=jnp.int32)
        return jnp.where(self.bin_N < 0, 0, tokens_N - self.starts_S[self.bin_N])


class CallTable(NamedTuple):
    """Small arrays that map segments to the bins of one call."""

    starts_S: Int32[Array, "S"]
    lengths_S: Int32[Array, "S"]
    bin_BM: Int32[Array, "BM"]
    """Bin of each segment of all rows; -1 for segments of other calls."""


class SegmentTables(NamedTuple):
    """Segment tables of all packed calls. They are the same for every layer, so they are computed
    once per microbatch."""

    segment_N: Int32[Array, "N"]
    """Segment of each token, counted over all rows; -1 for padding. 4 bytes per token."""
    calls: tuple[CallTable, ...]

    def get_bins(self, call: int) -> CallBins:
        """Returns the bins of a call, by its index."""
        table = self.calls[call]
        bin_N = jnp.where(self.segment_N < 0, -1, table.bin_BM[self.segment_N])
        return CallBins(table.starts_S, table.lengths_S, bin_N)


def plan_calls(
    *, num_rows: int, row_tokens: int, max_segments: int, capacity_factor: int = CAPACITY_FACTOR
) -> tuple[PackedCall, ...]:
    """Plans calls that together hold all segments of the rows, longest segments first.

    Args: max_segments: maximum number of segments per row.
    """
    num_tokens = num_rows * row_tokens
    bin_tokens = row_tokens
    bins_per_row = max_segments
    calls = []
    # A row has fewer than capacity_factor * row_tokens / T segments of more than T /
    # capacity_factor tokens.
    while bins_per_row > capacity_factor and bin_tokens % (capacity_factor * BIN_MULTIPLE) == 0:
        call = PackedCall(
            longer_than=bin_tokens // capacity_factor,
            bin_tokens=bin_tokens,
            num_bins=num_tokens // bin_tokens * capacity_factor,
            num_tokens=num_tokens,
        )
        calls.append(call)
        bin_tokens //= capacity_factor
        bins_per_row = -(-bins_per_row // capacity_factor)
    # cuDNN's packed rows have at least two bins.
    last_call = PackedCall(
        longer_than=0,
        bin_tokens=bin_tokens,
        num_bins=num_tokens // bin_tokens * max(bins_per_row, 2),
        num_tokens=num_tokens,
    )
    return (*calls, last_call)


def make_tables(
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    row_tokens: int,
    capacity_factor: int = CAPACITY_FACTOR,
) -> SegmentTables | None:
    """Assigns the segments of rows to the bins of calls; None for rows with one slot."""
    B, M = starts_BM.shape
    if M == 1:
        return None
    calls = plan_calls(
        num_rows=B, row_tokens=row_tokens, max_segments=M, capacity_factor=capacity_factor
    )
    segment_BL = segments.segment_ids(starts_BM, lengths_BM, row_tokens)
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    segment_BL = jnp.where(segment_BL < 0, -1, segment_BL + row_B1 * M)
    starts = (starts_BM + row_B1 * row_tokens).reshape(-1)
    lengths = lengths_BM.reshape(-1)
    segment_N = segment_BL.reshape(-1)
    return SegmentTables(segment_N, tuple(_make_table(call, starts, lengths) for call in calls))


def _make_table(call: PackedCall, starts: Array, lengths: Array) -> CallTable:
    is_in_call = (lengths > call.longer_than) & (lengths <= call.bin_tokens)
    bin_index = jnp.where(is_in_call, jnp.cumsum(is_in_call, dtype=jnp.int32) - 1, call.num_bins)
    zeros_S = jnp.zeros(call.num_bins, jnp.int32)
    starts_S = zeros_S.at[bin_index].set(starts, mode="drop")
    lengths_S = zeros_S.at[bin_index].set(lengths, mode="drop")
    return CallTable(starts_S, lengths_S, jnp.where(is_in_call, bin_index, -1))


def compress_lse(lse_ShT: Float32[Array, "S h T"], bins: CallBins) -> Float32[Array, "N h"]:
    """Log-sum-exp of each token, from that of each position of the bins.

    Undefined for tokens of no bin.
    """
    return lse_ShT[bins.bin_N, :, bins.position_N]


def expand_lse(
    lse_Nh: Float32[Array, "N h"], bins: CallBins, *, bin_tokens: int
) -> Float32[Array, "S h T"]:
    """Inverse of `compress_lse`, with MASKED_LSE at positions without a token."""
    position_1T = jnp.arange(bin_tokens, dtype=jnp.int32)[None]
    inside_ST1 = (position_1T < bins.lengths_S[:, None])[..., None]
    lse_STh = lse_Nh[bins.tokens_ST(bin_tokens)]
    return jnp.where(inside_ST1, lse_STh, MASKED_LSE).swapaxes(1, 2)
