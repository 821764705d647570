"""Rows in blocks, for the blockwise kernel: which blocks a block of queries visits, and its
masks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxsp.attention.kernels.segments import OffDiagonalBlock

BLOCK_TOKENS = 256
"""Tokens per block: the float32 scores of 8 heads take 2 MiB."""


class BlockedRow(NamedTuple):
    """One row in n blocks of C queries and m blocks of D keys: g K/V heads, r query heads for
    each."""

    q: Float[Array, "n g rC K"]
    k: Float[Array, "m g D K"]
    v: Float[Array, "m g D K"]
    segment_q: Int32[Array, "n C"]
    segment_k: Int32[Array, "m D"]
    first_block: Int32[Array, "n"]
    """First block of keys that each block of queries visits."""
    end_block: Int32[Array, "n"]
    """First block of keys after the visited ones; at most `first_block` if the queries are all
    padding."""
    query_offset: int
    """Number of tokens from the first key to the first query."""
    window: int

    def block_mask(self, i: Array, j: Array) -> Bool[Array, "1 rC D"]:
        """Mask of the keys of block j that the queries of block i attend to.

        These are the keys of their own segment, from the start of the window to the query itself.
        """
        segment_q = self.segment_q[i]
        segment_k = self.segment_k[j]
        C = len(segment_q)
        D = len(segment_k)
        position_q = jnp.arange(C, dtype=jnp.int32)
        position_k = jnp.arange(D, dtype=jnp.int32)
        query = self.query_offset + i * C + position_q
        distance = query[:, None] - (j * D + position_k)[None, :]
        mask = (
            (segment_q[:, None] == segment_k[None, :])
            & (segment_q[:, None] >= 0)
            & (distance >= 0)
            & (distance < self.window)
        )
        return jnp.tile(mask, (self.q.shape[2] // C, 1))[None]


def make_segment_row(
    q_LhK: Array, k_LgK: Array, v_LgK: Array, segment_L: Array, *, window: int
) -> BlockedRow:
    """A row whose queries and keys belong to the same tokens."""
    L = len(segment_L)
    g = k_LgK.shape[1]
    C = min(BLOCK_TOKENS, L)
    n = -(-L // C)
    segment_L = jnp.pad(segment_L, (0, n * C - L), constant_values=-1)
    position_L = jnp.arange(n * C, dtype=jnp.int32)
    # Segments are contiguous, so a token's segment begins where the segment number last changed.
    is_first_L = jnp.concatenate([jnp.ones(1, bool), segment_L[1:] != segment_L[:-1]])
    first_L = jax.lax.cummax(jnp.where(is_first_L, position_L, 0))
    first_L = jnp.maximum(first_L, position_L - (window - 1))
    first_L = jnp.where(segment_L >= 0, first_L, n * C)
    segment = segment_L.reshape(n, C)
    return BlockedRow(
        q=split_blocks(q_LhK, g),
        k=split_blocks(k_LgK, g),
        v=split_blocks(v_LgK, g),
        segment_q=segment,
        segment_k=segment,
        first_block=first_L.reshape(n, C).min(1) // C,
        end_block=jnp.arange(1, n + 1, dtype=jnp.int32),
        query_offset=0,
        window=window,
    )


def make_off_diagonal_row(
    q_ChK: Array, k_DgK: Array, v_DgK: Array, block: OffDiagonalBlock
) -> BlockedRow:
    """A row for an off-diagonal block: one segment, whose keys are all before its queries."""
    num_queries, first_key, num_keys = block
    q, k, v = (split_blocks(x, k_DgK.shape[1]) for x in (q_ChK, k_DgK, v_DgK))
    D = min(BLOCK_TOKENS, len(k_DgK))
    position_q = _block_positions(len(q), len(q_ChK))
    position_k = _block_positions(len(k), len(k_DgK))
    has_keys = (position_q[:, 0] < num_queries) & (num_keys > 0)
    return BlockedRow(
        q=q,
        k=k,
        v=v,
        segment_q=jnp.where(position_q < num_queries, 0, -1),
        segment_k=jnp.where((position_k >= first_key) & (position_k < first_key + num_keys), 0, -1),
        first_block=jnp.where(has_keys, first_key // D, 0),
        end_block=jnp.where(has_keys, -(-(first_key + num_keys) // D), 0),
        query_offset=len(k_DgK),
        window=len(q_ChK) + 2 * len(k_DgK),
    )


def _block_positions(num_blocks: int, num_tokens: int) -> Int32[Array, "n C"]:
    """Position of each token of each block in the row."""
    size = min(BLOCK_TOKENS, num_tokens)
    return jnp.arange(num_blocks * size, dtype=jnp.int32).reshape(num_blocks, size)


def split_blocks(x_LhK: Array, num_kv_heads: int) -> Float[Array, "n g rC K"]:
    """Splits tokens into blocks.

    Query heads that share a K/V head are stacked along the tokens, to be multiplied in one product.
    """
    L, h, K = x_LhK.shape
    C = min(BLOCK_TOKENS, L)
    n = -(-L // C)
    x = jnp.pad(x_LhK, ((0, n * C - L), (0, 0), (0, 0)))
    x = x.reshape(n, C, num_kv_heads, h // num_kv_heads, K).transpose(0, 2, 3, 1, 4)
    return x.reshape(n, num_kv_heads, -1, K)


def join_blocks(
    x: Float[Array, "n g rC K"], num_tokens: int, num_heads: int
) -> Float[Array, "L h K"]:
    """Inverse of `split_blocks`, without the padding."""
    n, g, rC, K = x.shape
    r = num_heads // g
    x = x.reshape(n, g, r, rC // r, K).transpose(0, 3, 1, 2, 4)
    return x.reshape(-1, num_heads, K)[:num_tokens]
