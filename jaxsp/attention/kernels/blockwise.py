"""Attention over blocks of keys with an online softmax: memory linear in length, on any device.

A block of queries visits the blocks of keys from the first token of its earliest segment to itself.
Blocks of other segments and of the future are never read. Here `x` is computed, for segments of 3,
2 and 3 blocks:

    x . . . . . . .
    x x . . . . . .
    x x x . . . . .
    . . . x . . . .
    . . . x x . . .
    . . . . . x . .
    . . . . . x x .
    . . . . . x x x

With a window, a block of queries begins at the first token that its earliest token attends to, if
that is later. For a row of one segment and a window of one block, each block of queries visits two
blocks of keys.

Source: forward pass, Rabe and Staats 2021, arXiv:2112.05682. Backward pass, Dao 2023,
arXiv:2307.08691, sec. 3.1.2, with dq, dk and dv in one walk because blocks are visited one after
another.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import (
    AttentionFunctions,
    ChunkKernel,
    Gradients,
    Kernel,
    KernelSettings,
    Saved,
    ScoreConfig,
)
from jaxsp.attention.kernels.segments import OffDiagonalBlock, Segments

BLOCK_TOKENS = 256
"""Tokens per block: the float32 scores of 8 heads take 2 MiB."""

LARGE_HEAD_DIM = 256
"""Largest heads that cuDNN computes."""

LARGE_HEAD_BLOCK_TOKENS = 2048
"""The same of larger heads, whose fastest kernel on GPUs this is. The scores of 4 heads take 64
MiB. Smaller blocks read and write the sums more often, and start more kernels: planned for 4 heads
of 512 on an H100, blocks of 256 tokens take 20 times as long forward."""

FORWARD_SCOPE = "blockwise_forward"
BACKWARD_SCOPE = "blockwise_backward"
"""Scopes of the loops over the blocks of keys that a block of queries visits."""

_MASKED_SCORE = -1e30
"""Maximum of no scores: finite, so that exp(x - maximum) is never NaN."""


def _block_tokens(head_dim: int, num_tokens: int) -> int:
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
    C = _block_tokens(K, L)
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
    C, D = (_block_tokens(K, len(x)) for x in (q_ChK, k_DgK))
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


def forward(
    q_BLhK: Float[Array, "B L h K"],
    k_BDgK: Float[Array, "B D g K"],
    v_BDgK: Float[Array, "B D g K"],
    mask: Segments | OffDiagonalBlock,
    *,
    score: ScoreConfig,
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Softmax attention: output and log-sum-exp, both 0 for queries outside the mask.

    Units: memory grows with L. Time grows with the sum of the squares of the segments' lengths, or
        with length times window for segments longer than the window.
    Args:
        mask: causal inside each segment; or a block, whose queries attend to all of its keys.
        dtype: of the output; None: that of q. Scores and sums are float32.
    """
    dtype = dtype or q_BLhK.dtype
    L, h = q_BLhK.shape[1:3]
    make_row, mask_B = _find_rows(mask, L, score.window)

    def compute_row(arrays: tuple[Array, Array, Array, Any]) -> tuple[Array, Array]:
        row = make_row(*arrays)
        blocks = jnp.arange(len(row.q))
        out, lse = jax.lax.map(lambda i: _forward_block(row, score, i, dtype), blocks)
        out = join_blocks(out, L, h)
        return out, join_blocks(lse[..., None], L, h)[..., 0]

    out_BLhK, lse_BLh = jax.lax.map(compute_row, (q_BLhK, k_BDgK, v_BDgK, mask_B))
    return out_BLhK, lse_BLh.swapaxes(1, 2)


def backward(
    saved: Saved,
    mask: Segments | OffDiagonalBlock,
    *,
    score: ScoreConfig,
    dtype: jnp.dtype | None = None,
) -> Gradients:
    """dq, dk and dv. Args: dtype: of the gradients; None: that of q."""
    q_BLhK, k_BDgK, v_BDgK, out_BLhK, dout_BLhK, lse_BhL = saved
    dtype = dtype or q_BLhK.dtype
    L, h = q_BLhK.shape[1:3]
    num_keys, g = k_BDgK.shape[1:3]
    make_row, mask_B = _find_rows(mask, L, score.window)
    delta_BLh = jnp.einsum(
        "BLhK,BLhK->BLh", dout_BLhK, out_BLhK, preferred_element_type=jnp.float32
    )
    lse_BLh = lse_BhL.swapaxes(1, 2)

    def compute_row(arrays: tuple[Any, ...]) -> tuple[Array, Array, Array]:
        q, k, v, mask, dout, lse, delta = arrays
        row = make_row(q, k, v, mask)
        C = row.segment_q.shape[1]
        dout, lse, delta = (split_blocks(x, g, C) for x in (dout, lse[..., None], delta[..., None]))

        def add_block(sums: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
            dk, dv, dq = _backward_block(row, score, i, dout[i], lse[i], delta[i], *sums)
            return (dk, dv), dq.astype(dtype)

        zeros = jnp.zeros(row.k.shape, jnp.float32)
        (dk, dv), dq = jax.lax.scan(add_block, (zeros, zeros), jnp.arange(len(row.q)))
        return (
            join_blocks(dq, L, h),
            join_blocks(dk, num_keys, g),
            join_blocks(dv, num_keys, g),
        )

    arrays = (q_BLhK, k_BDgK, v_BDgK, mask_B, dout_BLhK, lse_BLh, delta_BLh)
    dq, dk, dv = jax.lax.map(compute_row, arrays)
    return dq, dk.astype(dtype), dv.astype(dtype)


def _find_rows(
    mask: Segments | OffDiagonalBlock, num_queries: int, window: int | None
) -> tuple[Callable[..., BlockedRow], Any]:
    """Function that makes a row of q, k, v and its part of the mask; and the mask of all rows."""
    if isinstance(mask, OffDiagonalBlock):
        return make_off_diagonal_row, mask
    window = num_queries if window is None else min(window, num_queries)
    make_row = functools.partial(make_segment_row, window=window)
    return make_row, segments.segment_ids(mask.starts_BM, mask.lengths_BM, num_queries)


def _forward_block(
    row: BlockedRow, score: ScoreConfig, i: Array, dtype: jnp.dtype
) -> tuple[Float[Array, "g rC K"], Float32[Array, "g rC"]]:
    """Output and log-sum-exp of block i of the queries."""
    q = row.q[i]

    def visit(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, total, maximum = sums
        scores, _ = _scores(row, score, q, j, "qk")
        scores = jnp.where(row.block_mask(i, j), scores, _MASKED_SCORE)
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        # so that masked scores get a weight of 0 also in queries without a key so far
        shift = jnp.where(new_maximum == _MASKED_SCORE, 0.0, new_maximum)
        weights = jnp.exp(scores - shift[..., None])
        shrink = jnp.exp(maximum - new_maximum)
        v = row.v[j]
        out = out * shrink[..., None] + _dot("gqk,gkK->gqK", weights.astype(v.dtype), v)
        return out, total * shrink + weights.sum(-1), new_maximum

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    start = (jnp.zeros(q.shape, jnp.float32), zeros, jnp.full_like(zeros, _MASKED_SCORE))
    with jax.named_scope(FORWARD_SCOPE):
        out, total, maximum = jax.lax.fori_loop(row.first_block[i], row.end_block[i], visit, start)
    has_keys = total > 0
    total = jnp.where(has_keys, total, 1.0)
    out = (out / total[..., None]).astype(dtype)
    return out, jnp.where(has_keys, maximum + jnp.log(total), 0.0)


def _backward_block(
    row: BlockedRow,
    score: ScoreConfig,
    i: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    dk: Array,
    dv: Array,
) -> tuple[Array, Array, Array]:
    """dk and dv plus the terms of block i of the queries, and the block's dq, all float32."""
    q = row.q[i]

    def visit(order: str, j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Args: order: "qk" or "kq": dims of the scores."""
        dk, dv, dq = sums
        arrange = (lambda x: x) if order == "qk" else (lambda x: x.swapaxes(1, 2))
        mask = arrange(row.block_mask(i, j))
        scores, slopes = _scores(row, score, q, j, order)
        weights = jnp.where(mask, jnp.exp(scores - arrange(lse)), 0.0)
        dweights = _dot(f"gqK,gkK->g{order}", dout, row.v[j])
        dscores = jnp.where(mask, weights * (dweights - arrange(delta)), 0.0) * slopes
        weights = weights.astype(q.dtype)
        dscores = dscores.astype(q.dtype)
        dq += _dot(f"g{order},gkK->gqK", dscores, row.k[j])
        dk = dk.at[j].add(_dot(f"g{order},gqK->gkK", dscores, q))
        dv = dv.at[j].add(_dot(f"g{order},gqK->gkK", weights, dout))
        return dk, dv, dq

    def visit_on_platform(j: Array, sums: tuple[Array, Array, Array]) -> Any:
        # XLA for CPUs takes twice as long for products that sum over the rows of their first
        # operand: those of dk and dv with "qk", only that of dq with "kq"
        return jax.lax.platform_dependent(
            j,
            sums,
            cpu=functools.partial(visit, "kq"),
            default=functools.partial(visit, "qk"),
        )

    first = row.first_block[i]
    end = row.end_block[i]
    zeros = jnp.zeros(q.shape, jnp.float32)
    with jax.named_scope(BACKWARD_SCOPE):
        return jax.lax.fori_loop(first, end, visit_on_platform, (dk, dv, zeros))


def _scores(
    row: BlockedRow, score: ScoreConfig, q: Array, j: Array, order: str
) -> tuple[Float32[Array, "g ..."], Float32[Array, "g ..."] | float]:
    """Scores of block j of the keys, and their derivatives with respect to the products q k.

    Shapes: [g, rC, D] if the order is "qk", and [g, D, rC] if it is "kq".
    """
    scale = score.find_scale(q.shape[-1])
    scores = _dot(f"gqK,gkK->g{order}", q, row.k[j]) * scale
    if score.softcap is None:
        return scores, scale
    tanh = jnp.tanh(scores / score.softcap)
    return score.softcap * tanh, scale * (1 - tanh**2)


def _dot(dims: str, a: Array, b: Array) -> Float32[Array, "..."]:
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32, precision=precision)


@dataclasses.dataclass(frozen=True)
class BlockwiseKernel(Kernel):
    """The functions of this module: any device, any dtype, rows of any length."""

    name = "blockwise"

    def make_row_functions(
        self, settings: KernelSettings, score: ScoreConfig, dtype: jnp.dtype | None = None
    ) -> AttentionFunctions:
        return AttentionFunctions(
            functools.partial(forward, score=score, dtype=dtype),
            functools.partial(backward, score=score, dtype=dtype),
        )

    def make_chunk_kernel(self, settings: KernelSettings, score: ScoreConfig) -> ChunkKernel:
        in_float32 = self.make_row_functions(settings, score, jnp.dtype("float32"))
        return ChunkKernel(packed=in_float32, off_diagonal=in_float32)
