"""Which piece of its row a token belongs to: what every kernel isolates documents by."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def segment_ids(
    starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], num_tokens: int
) -> Int32[Array, "B L"]:
    """Number of each token's piece within its row, -1 for padding.

    Example: starts [0, 3, 0], lengths [3, 4, 0] and 8 tokens give [0, 0, 0, 1, 1, 1, 1, -1].
    """
    positions_1L1 = jnp.arange(num_tokens, dtype=jnp.int32)[None, :, None]
    # Unused slots are (0, 0). Every start is compared with every token: one fused kernel, where a binary search is a loop
    begun_BL = ((starts_BM[:, None] <= positions_1L1) & (lengths_BM > 0)[:, None]).sum(
        -1, dtype=jnp.int32
    )
    piece_BL = begun_BL - 1
    ends_BM = starts_BM + lengths_BM
    end_BL = jnp.take_along_axis(ends_BM, jnp.maximum(piece_BL, 0), axis=1)
    return jnp.where((piece_BL >= 0) & (positions_1L1[..., 0] < end_BL), piece_BL, -1)


def segment_mask(
    starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], num_tokens: int
) -> Bool[Array, "B L"]:
    """Whether each token belongs to a piece, that is, is no padding."""
    return segment_ids(starts_BM, lengths_BM, num_tokens) >= 0


def clip_to_chunk(
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    first_token: Array,
    num_tokens: int,
) -> tuple[Int32[Array, "B M"], Int32[Array, "B M"]]:
    """Starts and lengths of what lies in the chunk of each row that begins with token `first`, counted from there.

    Example: of starts [0, 3, 9], lengths [3, 5, 2] the chunk from 4 of 6 tokens has starts [0, 5, 0] and lengths [4, 1, 0].
    """
    ends_BM = jnp.clip(starts_BM + lengths_BM - first_token, 0, num_tokens)
    starts_BM = jnp.clip(starts_BM - first_token, 0, num_tokens)
    lengths_BM = ends_BM - starts_BM
    # unused slots come last: behind the pieces that have tokens here stand those before the chunk
    slots_BM = jnp.argsort(lengths_BM == 0, axis=1, stable=True)
    starts_BM, lengths_BM = (
        jnp.take_along_axis(x, slots_BM, axis=1) for x in (starts_BM, lengths_BM)
    )
    return jnp.where(lengths_BM > 0, starts_BM, 0), lengths_BM


class OffDiagonalBlock(NamedTuple):
    """The queries and keys of each row's one piece that lies in a chunk of queries and in tokens before it.

    Every one of these queries sees every one of these keys: between two chunks there is no other mask. Both are 0 where no
    piece reaches from one to the other.
    """

    num_queries_B: Int32[Array, "B"]
    """So many of the chunk's first tokens."""
    first_key_B: Int32[Array, "B"]
    """The first of the keys,"""
    num_keys_B: Int32[Array, "B"]
    """and how many from there."""

    def is_any(self) -> Bool[Array, ""]:
        """Whether any row has something to do."""
        return (self.num_keys_B > 0).any()

    def query_mask(self, num_tokens: int) -> Bool[Array, "B C"]:
        """Which of a chunk's tokens are its queries."""
        return (jnp.arange(num_tokens)[None] < self.num_queries_B[:, None]) & (self.num_keys_B > 0)[
            :, None
        ]

    def key_mask(self, num_tokens: int) -> Bool[Array, "B D"]:
        """Which of so many tokens are its keys."""
        place_1D = jnp.arange(num_tokens)[None]
        return (place_1D >= self.first_key_B[:, None]) & (
            place_1D < (self.first_key_B + self.num_keys_B)[:, None]
        )


def find_off_diagonal_block(
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    first_query: Array,
    num_queries: int,
    first_key: Array,
    num_keys: Array | int,
) -> OffDiagonalBlock:
    """What the `num_queries` tokens from `queries` on see of the `num_keys` tokens from `keys` on, which end before them.

    Example: a piece of tokens 3 to 12: of the chunk from 8 to 16 the first 4 queries see, of keys 0 to 8, the 5 from the third.
    """
    ends_BM = starts_BM + lengths_BM
    spans_BM = (starts_BM < first_key + num_keys) & (
        ends_BM > first_query
    )  # of pieces side by side, one at most
    # sums over that one, or over nothing
    queries_B = jnp.where(spans_BM, jnp.minimum(ends_BM - first_query, num_queries), 0).sum(1)
    first_B = jnp.where(spans_BM, jnp.maximum(starts_BM - first_key, 0), 0).sum(1)
    return OffDiagonalBlock(queries_B, first_B, jnp.where(spans_BM.any(1), num_keys - first_B, 0))
