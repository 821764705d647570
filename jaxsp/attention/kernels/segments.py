"""Segment of each token, and the part of a row's attention that falls into chunks of the row."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Segments(NamedTuple):
    """Segments of packed rows."""

    starts_BM: Int32[Array, "B M"]
    lengths_BM: Int32[Array, "B M"]
    tables: Any = None
    """Tables that all layers share: see `TokenExchange.make_tables` and `Kernel.make_tables`."""


def segment_ids(
    starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], num_tokens: int
) -> Int32[Array, "B L"]:
    """Number of each token's segment within its row, -1 for padding.

    Example: starts [0, 3, 0], lengths [3, 4, 0] and 8 tokens give [0, 0, 0, 1, 1, 1, 1, -1].
    """
    positions_1L1 = jnp.arange(num_tokens, dtype=jnp.int32)[None, :, None]
    # Unused slots are (0, 0). Every start is compared with every token: that is one fused kernel,
    # while a binary search is a loop.
    is_begun_BLM = (starts_BM[:, None] <= positions_1L1) & (lengths_BM > 0)[:, None]
    segment_BL = is_begun_BLM.sum(-1, dtype=jnp.int32) - 1
    ends_BM = starts_BM + lengths_BM
    end_BL = jnp.take_along_axis(ends_BM, jnp.maximum(segment_BL, 0), axis=1)
    inside_BL = (segment_BL >= 0) & (positions_1L1[..., 0] < end_BL)
    return jnp.where(inside_BL, segment_BL, -1)


def segment_mask(
    starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], num_tokens: int
) -> Bool[Array, "B L"]:
    """Mask of the tokens that are in a segment; the others are padding."""
    return segment_ids(starts_BM, lengths_BM, num_tokens) >= 0


def clip_to_chunk(
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    first_token: Array,
    num_tokens: Array | int,
) -> tuple[Int32[Array, "B M"], Int32[Array, "B M"]]:
    """Starts and lengths of the parts of segments that lie in a chunk, counted from its first
    token.

    Example: for starts [0, 3, 9], lengths [3, 5, 2] and the chunk of 6 tokens that begins at token
        4, starts are [0, 5, 0] and lengths [4, 1, 0].
    """
    ends_BM = jnp.clip(starts_BM + lengths_BM - first_token, 0, num_tokens)
    starts_BM = jnp.clip(starts_BM - first_token, 0, num_tokens)
    lengths_BM = ends_BM - starts_BM
    # Unused slots come last: move the slots of segments before the chunk after those in the chunk.
    slots_BM = jnp.argsort(lengths_BM == 0, axis=1, stable=True)
    starts_BM = jnp.take_along_axis(starts_BM, slots_BM, axis=1)
    lengths_BM = jnp.take_along_axis(lengths_BM, slots_BM, axis=1)
    return jnp.where(lengths_BM > 0, starts_BM, 0), lengths_BM


class OffDiagonalBlock(NamedTuple):
    """The queries of a chunk, and the keys before the chunk, that belong to the same segment.

    At most one segment of each row reaches from the keys into the chunk. Every query of the block
    attends to every key of the block, so no other mask is needed. Where no segment reaches from one
    to the other, both numbers are 0.
    """

    num_queries_B: Int32[Array, "B"]
    """Number of queries; they are the chunk's first tokens."""
    first_key_B: Int32[Array, "B"]
    """Index of the block's first key."""
    num_keys_B: Int32[Array, "B"]
    """Number of keys."""

    def is_any(self) -> Bool[Array, ""]:
        """True if the block of any row has keys."""
        return (self.num_keys_B > 0).any()

    def query_mask(self, num_tokens: int) -> Bool[Array, "B C"]:
        """Mask of the block's queries among a chunk's tokens."""
        is_query_BC = jnp.arange(num_tokens)[None] < self.num_queries_B[:, None]
        return is_query_BC & (self.num_keys_B > 0)[:, None]

    def key_mask(self, num_tokens: int) -> Bool[Array, "B D"]:
        """Mask of the block's keys among the first `num_tokens` keys."""
        position_1D = jnp.arange(num_tokens)[None]
        is_late_BD = position_1D >= self.first_key_B[:, None]
        return is_late_BD & (position_1D < (self.first_key_B + self.num_keys_B)[:, None])


class Chunks(NamedTuple):
    """Chunks of a row, in order."""

    first_tokens_n: Int32[Array, "n"]
    tokens_per_chunk: Array | int


def find_off_diagonal_block(
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    queries: Chunks,
    keys: Chunks,
) -> OffDiagonalBlock:
    """Finds the block of queries and keys in chunks, all keys, if any, before the queries.

    Queries and keys are counted within their chunks together.
    Example: for a segment of tokens 3 to 11, queries 8 to 15 and keys 0 to 7, the block has the
        first 4 queries and the 5 keys from key 3.
    """
    ends_BM = starts_BM + lengths_BM
    end_of_keys = keys.first_tokens_n[-1] + keys.tokens_per_chunk
    # At most one segment of a row reaches from the keys to the queries, so each sum has one term.
    spans_BM = (starts_BM < end_of_keys) & (ends_BM > queries.first_tokens_n[0])
    queries_B = jnp.where(spans_BM, _count_tokens_before(ends_BM, queries), 0).sum(1)
    first_B = jnp.where(spans_BM, _count_tokens_before(starts_BM, keys), 0).sum(1)
    num_keys = len(keys.first_tokens_n) * keys.tokens_per_chunk
    num_keys_B = jnp.where(spans_BM.any(1), num_keys - first_B, 0)
    return OffDiagonalBlock(jnp.where(num_keys_B > 0, queries_B, 0), first_B, num_keys_B)


def _count_tokens_before(token_BM: Array, chunks: Chunks) -> Int32[Array, "B M"]:
    """Number of tokens of the chunks that are before a token of the row."""
    num_before_BMn = token_BM[..., None] - chunks.first_tokens_n[None, None]
    return jnp.clip(num_before_BMn, 0, chunks.tokens_per_chunk).sum(-1)
