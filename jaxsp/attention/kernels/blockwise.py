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
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.attention.kernels import blockwise_rows, segments
from jaxsp.attention.kernels.blockwise_rows import BlockedRow
from jaxsp.attention.kernels.kernel import ChunkKernel, Kernel, KernelSettings, ScoreConfig
from jaxsp.attention.kernels.residuals import AttentionFunctions
from jaxsp.attention.kernels.segments import OffDiagonalBlock

_FLOAT32 = jnp.dtype("float32")

_MASKED_SCORE = -1e30
"""Maximum of no scores: finite, so that exp(x - maximum) is never NaN."""


def forward(
    q_BLhK: Float[Array, "B L h K"],
    k_BLgK: Float[Array, "B L g K"],
    v_BLgK: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    score: ScoreConfig,
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Causal softmax attention inside each segment: output and log-sum-exp, both 0 at padding.

    Units: memory grows with L. Time grows with the sum of the squares of the segments' lengths, or
        with length times window for segments longer than the window.
    Args: dtype: of the output; None: that of q. Scores and sums are float32.
    """
    make_row, segment_BL = _find_rows(q_BLhK, starts_BM, lengths_BM, score.window)
    inputs = q_BLhK, k_BLgK, v_BLgK, segment_BL
    return _forward(make_row, score, *inputs, dtype=dtype or q_BLhK.dtype)


def backward(
    q_BLhK: Float[Array, "B L h K"],
    k_BLgK: Float[Array, "B L g K"],
    v_BLgK: Float[Array, "B L g K"],
    out_BLhK: Float[Array, "B L h K"],
    lse_BhL: Float32[Array, "B h L"],
    dout_BLhK: Float[Array, "B L h K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    score: ScoreConfig,
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "B L h K"], Float[Array, "B L g K"], Float[Array, "B L g K"]]:
    """dq, dk and dv. The output and log-sum-exp may include keys that are not in `k`.

    Args: dtype: of the gradients; None: that of q.
    """
    make_row, segment_BL = _find_rows(q_BLhK, starts_BM, lengths_BM, score.window)
    arrays = q_BLhK, k_BLgK, v_BLgK, segment_BL, out_BLhK, lse_BhL, dout_BLhK
    return _backward(make_row, score, *arrays, dtype=dtype or q_BLhK.dtype)


def _find_rows(
    q_BLhK: Array, starts_BM: Array, lengths_BM: Array, window: int | None
) -> tuple[Callable[..., BlockedRow], Int32[Array, "B L"]]:
    """First and sixth argument of `_forward` and `_backward` for rows of segments."""
    L = q_BLhK.shape[1]
    window = L if window is None else min(window, L)
    make_row = functools.partial(blockwise_rows.make_segment_row, window=window)
    return make_row, segments.segment_ids(starts_BM, lengths_BM, L)


def off_diagonal_forward(
    q_BChK: Float[Array, "B C h K"],
    k_BDgK: Float[Array, "B D g K"],
    v_BDgK: Float[Array, "B D g K"],
    block: OffDiagonalBlock,
    *,
    score: ScoreConfig,
) -> tuple[Float32[Array, "B C h K"], Float32[Array, "B h C"]]:
    """Output and log-sum-exp of the block's queries over its keys, without a mask.

    Both are 0 for other queries.
    """
    make_row = blockwise_rows.make_off_diagonal_row
    return _forward(make_row, score, q_BChK, k_BDgK, v_BDgK, block, dtype=_FLOAT32)


def off_diagonal_backward(
    q_BChK: Float[Array, "B C h K"],
    k_BDgK: Float[Array, "B D g K"],
    v_BDgK: Float[Array, "B D g K"],
    out_BChK: Float[Array, "B C h K"],
    lse_BhC: Float32[Array, "B h C"],
    dout_BChK: Float[Array, "B C h K"],
    block: OffDiagonalBlock,
    *,
    score: ScoreConfig,
) -> tuple[Float32[Array, "B C h K"], Float32[Array, "B D g K"], Float32[Array, "B D g K"]]:
    """dq, dk and dv. The output and log-sum-exp may include keys that are not in the block."""
    arrays = q_BChK, k_BDgK, v_BDgK, block, out_BChK, lse_BhC, dout_BChK
    return _backward(blockwise_rows.make_off_diagonal_row, score, *arrays, dtype=_FLOAT32)


def _forward(
    make_row: Callable[..., BlockedRow],
    score: ScoreConfig,
    q_BLhK: Array,
    k_BLgK: Array,
    v_BLgK: Array,
    mask_B: Any,
    *,
    dtype: jnp.dtype,
) -> tuple[Array, Float32[Array, "B h L"]]:
    """Output and log-sum-exp. Args: mask_B: last argument of `make_row`, for each row."""
    L, h = q_BLhK.shape[1:3]

    def compute_row(arrays: tuple[Array, Array, Array, Any]) -> tuple[Array, Array]:
        row = make_row(*arrays)
        blocks = jnp.arange(len(row.q))
        out, lse = jax.lax.map(lambda i: _forward_block(row, score, i, dtype), blocks)
        out = blockwise_rows.join_blocks(out, L, h)
        return out, blockwise_rows.join_blocks(lse[..., None], L, h)[..., 0]

    out_BLhK, lse_BLh = jax.lax.map(compute_row, (q_BLhK, k_BLgK, v_BLgK, mask_B))
    return out_BLhK, lse_BLh.swapaxes(1, 2)


def _backward(
    make_row: Callable[..., BlockedRow],
    score: ScoreConfig,
    q_BLhK: Array,
    k_BLgK: Array,
    v_BLgK: Array,
    mask_B: Any,
    out_BLhK: Array,
    lse_BhL: Array,
    dout_BLhK: Array,
    *,
    dtype: jnp.dtype,
) -> tuple[Array, Array, Array]:
    L, h = q_BLhK.shape[1:3]
    num_keys, g = k_BLgK.shape[1:3]
    delta_BLh = jnp.einsum(
        "BLhK,BLhK->BLh", dout_BLhK, out_BLhK, preferred_element_type=jnp.float32
    )
    lse_BLh = lse_BhL.swapaxes(1, 2)

    def compute_row(arrays: tuple[Any, ...]) -> tuple[Array, Array, Array]:
        q, k, v, mask, dout, lse, delta = arrays
        row = make_row(q, k, v, mask)
        dout, lse, delta = (
            blockwise_rows.split_blocks(x, g) for x in (dout, lse[..., None], delta[..., None])
        )

        def add_block(sums: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
            dk, dv, dq = _backward_block(row, score, i, dout[i], lse[i], delta[i], *sums)
            return (dk, dv), dq.astype(dtype)

        zeros = jnp.zeros(row.k.shape, jnp.float32)
        (dk, dv), dq = jax.lax.scan(add_block, (zeros, zeros), jnp.arange(len(row.q)))
        return (
            blockwise_rows.join_blocks(dq, L, h),
            blockwise_rows.join_blocks(dk, num_keys, g),
            blockwise_rows.join_blocks(dv, num_keys, g),
        )

    arrays = (q_BLhK, k_BLgK, v_BLgK, mask_B, dout_BLhK, lse_BLh, delta_BLh)
    dq, dk, dv = jax.lax.map(compute_row, arrays)
    return dq, dk.astype(dtype), dv.astype(dtype)


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
        self, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        return AttentionFunctions(
            functools.partial(forward, score=score), functools.partial(backward, score=score)
        )

    def make_chunk_kernel(self, settings: KernelSettings, score: ScoreConfig) -> ChunkKernel:
        return ChunkKernel(
            forward=functools.partial(forward, score=score, dtype=_FLOAT32),
            backward=functools.partial(backward, score=score, dtype=_FLOAT32),
            off_diagonal_forward=functools.partial(off_diagonal_forward, score=score),
            off_diagonal_backward=functools.partial(off_diagonal_backward, score=score),
        )
