"""Rows in blocks, for the blockwise kernel: which blocks a block of queries visits, and its
masks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxsp.attention.kernels.segments import OffDiagonalBlock

BLOCK_TOKENS = 256
"""Tokens per block: the float32 scores of 8 heads take 2 MiB."""

LARGE_HEAD_DIM = 256
"""Largest heads that cuDNN computes."""

LARGE_HEAD_BLOCK_TOKENS = 2048
"""The same of larger heads, whose fastest kernel on GPUs this is. The scores of 4 heads take 64
MiB. Smaller blocks read and write the sums more often, and start more kernels: planned for 4 heads
of 512 on an H100, blocks of 256 tokens take 20 times as long forward."""


def block_tokens(head_dim: int, num_tokens: int) -> int:
    """Tokens per block of a row."""
    is_large = head_dim > LARGE_HEAD_DIM
    return min(LARGE_HEAD_BLOCK_TOKENS if is_large else BLOCK_TOKENS, num_tokens)


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
    g, K = k_LgK.shape[1:]
    C = block_tokens(K, L)
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
        q=split_blocks(q_LhK, g, C),
        k=split_blocks(k_LgK, g, C),
        v=split_blocks(v_LgK, g, C),
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
    g, K = k_DgK.shape[1:]
    C, D = (block_tokens(K, len(x)) for x in (q_ChK, k_DgK))
    q = split_blocks(q_ChK, g, C)
    k, v = (split_blocks(x, g, D) for x in (k_DgK, v_DgK))
    position_q = jnp.arange(len(q) * C, dtype=jnp.int32).reshape(-1, C)
    position_k = jnp.arange(len(k) * D, dtype=jnp.int32).reshape(-1, D)
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


def split_blocks(x_LhK: Array, num_kv_heads: int, C: int) -> Float[Array, "n g rC K"]:
    """Splits tokens into blocks of C.

    Query heads that share a K/V head are stacked along the tokens, to be multiplied in one product.
    """
    L, h, K = x_LhK.shape
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
