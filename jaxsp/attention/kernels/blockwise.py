"""Attention over blocks of keys with an online softmax: memory linear in length, on any device.

A block of queries visits the blocks of keys from the first token of its earliest piece to itself, so that blocks of other
pieces and of the future are never read: below, `x` is computed, for pieces of 3, 2 and 3 blocks.

    x . . . . . . .
    x x . . . . . .
    x x x . . . . .
    . . . x . . . .
    . . . x x . . .
    . . . . . x . .
    . . . . . x x .
    . . . . . x x x

With a window, a block of queries begins at the first token that its earliest token sees, if that is later: for a row of one
piece and a window of a block, two blocks are computed for each.

Source: the forward pass is Rabe and Staats 2021, arXiv:2112.05682; the backward pass Dao 2023, arXiv:2307.08691, sec. 3.1.2,
with dq, dk and dv in one walk because the blocks are visited one after another.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.attention.kernels import checkpoint_names, segments
from jaxsp.attention.kernels.kernel import ChunkKernel, Kernel, KernelSettings, RowKernel
from jaxsp.attention.kernels.segments import OffDiagonalBlock

BLOCK_TOKENS = 256
"""Tokens of a block: 8 heads' float32 scores take 2 MiB."""

_FLOAT32 = jnp.dtype("float32")

_MASKED_SCORE = -1e30
"""The maximum of no scores: finite, so that exp(x - maximum) is never NaN."""


class _BlockedRow(NamedTuple):
    """One row in blocks: n blocks of queries and m of keys, C tokens each, g key heads, r query heads for each."""

    q: Float[Array, "n g rC K"]
    k: Float[Array, "m g D K"]
    v: Float[Array, "m g D K"]
    segment_q: Int32[Array, "n C"]
    segment_k: Int32[Array, "m D"]
    first_block: Int32[Array, "n"]
    """The first block of keys that a block of queries needs,"""
    end_block: Int32[Array, "n"]
    """and the first behind it that it does not; not behind the other where it needs none, being all padding."""
    query_offset: int
    """How many tokens the first query is behind the first key."""
    window: int


def attention(
    q_BLhK: Float[Array, "B L h K"],
    k_BLgK: Float[Array, "B L g K"],
    v_BLgK: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    window: int | None = None,
) -> Float[Array, "B L h K"]:
    """Causal softmax attention inside each piece, scores and sums in float32; 0 at padding.

    Units: memory grows with L; time with the sum of the squares of the pieces' lengths, of a piece longer than the window
        with its length times the window.
    Args:
        window: a token sees itself and the window - 1 tokens before it; None: all of them.
    """
    L = q_BLhK.shape[1]
    return _attention(
        q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, L if window is None else min(window, L)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    q_BLhK: Array, k_BLgK: Array, v_BLgK: Array, starts_BM: Array, lengths_BM: Array, window: int
) -> Array:
    return _attention_fwd(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, window)[0]


def _attention_fwd(
    q_BLhK: Array, k_BLgK: Array, v_BLgK: Array, starts_BM: Array, lengths_BM: Array, window: int
) -> tuple[Array, tuple]:
    out_BLhK, lse_BhL = forward(
        q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, window=window, dtype=q_BLhK.dtype
    )
    out_BLhK, lse_BhL = (
        checkpoint_name(out_BLhK, checkpoint_names.OUT),
        checkpoint_name(lse_BhL, checkpoint_names.LSE),
    )
    return out_BLhK, (q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, out_BLhK, lse_BhL)


def _attention_bwd(
    window: int, saved: tuple, dout_BLhK: Array
) -> tuple[Array, Array, Array, None, None]:
    q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, out_BLhK, lse_BhL = saved
    inputs = q_BLhK, k_BLgK, v_BLgK, out_BLhK, lse_BhL, dout_BLhK
    return *backward(*inputs, starts_BM, lengths_BM, window=window, dtype=q_BLhK.dtype), None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def forward(
    q_BLhK: Float[Array, "B L h K"],
    k_BLgK: Float[Array, "B L g K"],
    v_BLgK: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    window: int | None = None,
    dtype: jnp.dtype = _FLOAT32,
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Output, of this dtype, and log-sum-exp; both 0 at padding."""
    L = q_BLhK.shape[1]
    row = functools.partial(_make_segment_row, window=L if window is None else window)
    return _forward(
        row, q_BLhK, k_BLgK, v_BLgK, segments.segment_ids(starts_BM, lengths_BM, L), dtype=dtype
    )


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
    window: int | None = None,
    dtype: jnp.dtype = _FLOAT32,
) -> tuple[Float[Array, "B L h K"], Float[Array, "B L g K"], Float[Array, "B L g K"]]:
    """dq, dk and dv, of this dtype; the output and its log-sum-exp may be of more keys than these."""
    L = q_BLhK.shape[1]
    row = functools.partial(_make_segment_row, window=L if window is None else window)
    of_tokens = segments.segment_ids(starts_BM, lengths_BM, L)
    return _backward(
        row, q_BLhK, k_BLgK, v_BLgK, of_tokens, out_BLhK, lse_BhL, dout_BLhK, dtype=dtype
    )


def off_diagonal_forward(
    q_BChK: Float[Array, "B C h K"],
    k_BDgK: Float[Array, "B D g K"],
    v_BDgK: Float[Array, "B D g K"],
    block: OffDiagonalBlock,
) -> tuple[Float32[Array, "B C h K"], Float32[Array, "B h C"]]:
    """Output and log-sum-exp of the rectangle's queries over its keys, without a mask; both 0 for other queries."""
    return _forward(_make_off_diagonal_row, q_BChK, k_BDgK, v_BDgK, block, dtype=_FLOAT32)


def off_diagonal_backward(
    q_BChK: Float[Array, "B C h K"],
    k_BDgK: Float[Array, "B D g K"],
    v_BDgK: Float[Array, "B D g K"],
    out_BChK: Float[Array, "B C h K"],
    lse_BhC: Float32[Array, "B h C"],
    dout_BChK: Float[Array, "B C h K"],
    block: OffDiagonalBlock,
) -> tuple[Float32[Array, "B C h K"], Float32[Array, "B D g K"], Float32[Array, "B D g K"]]:
    """dq, dk and dv; the output and its log-sum-exp may be of more keys than these."""
    return _backward(
        _make_off_diagonal_row,
        q_BChK,
        k_BDgK,
        v_BDgK,
        block,
        out_BChK,
        lse_BhC,
        dout_BChK,
        dtype=_FLOAT32,
    )


def _forward(
    make_row: Callable[..., _BlockedRow],
    q_BLhK: Array,
    k_BLgK: Array,
    v_BLgK: Array,
    where: Any,
    *,
    dtype: jnp.dtype,
) -> tuple[Array, Float32[Array, "B h L"]]:
    L, h = q_BLhK.shape[1:3]

    def row(one: tuple[Array, Array, Array, Any]) -> tuple[Array, Array]:
        blocks = make_row(*one)
        out, lse = jax.lax.map(
            lambda i: _forward_block(blocks, i, dtype), jnp.arange(len(blocks.q))
        )
        return _join_blocks(out, L, h), _join_blocks(lse[..., None], L, h)[..., 0]

    out_BLhK, lse_BLh = jax.lax.map(row, (q_BLhK, k_BLgK, v_BLgK, where))
    return out_BLhK, lse_BLh.swapaxes(1, 2)


def _backward(
    make_row: Callable[..., _BlockedRow],
    q_BLhK: Array,
    k_BLgK: Array,
    v_BLgK: Array,
    where: Any,
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

    def row(one: tuple[Any, ...]) -> tuple[Array, Array, Array]:
        q, k, v, place, dout, lse, delta = one
        blocks = make_row(q, k, v, place)
        dout, lse, delta = (_split_blocks(x, g) for x in (dout, lse[..., None], delta[..., None]))

        def query_block(sums: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
            dk, dv, dq = _backward_block(blocks, i, dout[i], lse[i], delta[i], *sums)
            return (dk, dv), dq.astype(dtype)

        zeros = jnp.zeros(blocks.k.shape, jnp.float32)
        (dk, dv), dq = jax.lax.scan(query_block, (zeros, zeros), jnp.arange(len(blocks.q)))
        return _join_blocks(dq, L, h), _join_blocks(dk, num_keys, g), _join_blocks(dv, num_keys, g)

    dq, dk, dv = jax.lax.map(row, (q_BLhK, k_BLgK, v_BLgK, where, dout_BLhK, lse_BLh, delta_BLh))
    return dq, dk.astype(dtype), dv.astype(dtype)


def _forward_block(
    row: _BlockedRow, i: Array, dtype: jnp.dtype
) -> tuple[Float[Array, "g rC K"], Float32[Array, "g rC"]]:
    """Output and log-sum-exp of the i-th block of queries."""
    q = row.q[i]

    def visit(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, total, maximum = sums
        scores, mask = _scores(row, q, j), _mask(row, i, j, q.shape[1])
        scores = jnp.where(mask, scores, _MASKED_SCORE)
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        weights = jnp.where(mask, jnp.exp(scores - new_maximum[..., None]), 0.0)
        shrink = jnp.exp(maximum - new_maximum)
        v = row.v[j]
        out = out * shrink[..., None] + _dot("gqk,gkK->gqK", weights.astype(v.dtype), v)
        return out, total * shrink + weights.sum(-1), new_maximum

    none = jnp.zeros(q.shape[:-1], jnp.float32)
    start = (jnp.zeros(q.shape, jnp.float32), none, jnp.full_like(none, _MASKED_SCORE))
    out, total, maximum = jax.lax.fori_loop(row.first_block[i], row.end_block[i], visit, start)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    return (out / total[..., None]).astype(dtype), jnp.where(seen, maximum + jnp.log(total), 0.0)


def _backward_block(
    row: _BlockedRow, i: Array, dout: Array, lse: Array, delta: Array, dk: Array, dv: Array
) -> tuple[Array, Array, Array]:
    """dk and dv with what the i-th block of queries adds to them, and its dq, all float32."""
    q = row.q[i]

    def visit(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dk, dv, dq = sums
        mask = _mask(row, i, j, q.shape[1])
        weights = jnp.where(mask, jnp.exp(_scores(row, q, j) - lse), 0.0)
        dweights = _dot("gqK,gkK->gqk", dout, row.v[j])
        dscores = jnp.where(mask, weights * (dweights - delta), 0.0) * q.shape[-1] ** -0.5
        weights, dscores = weights.astype(q.dtype), dscores.astype(q.dtype)
        dq += _dot("gqk,gkK->gqK", dscores, row.k[j])
        dk = dk.at[j].add(_dot("gqk,gqK->gkK", dscores, q))
        dv = dv.at[j].add(_dot("gqk,gqK->gkK", weights, dout))
        return dk, dv, dq

    return jax.lax.fori_loop(
        row.first_block[i], row.end_block[i], visit, (dk, dv, jnp.zeros(q.shape, jnp.float32))
    )


def _scores(row: _BlockedRow, q: Array, j: Array) -> Float32[Array, "g rC D"]:
    return _dot("gqK,gkK->gqk", q, row.k[j]) * q.shape[-1] ** -0.5


def _mask(row: _BlockedRow, i: Array, j: Array, num_queries: int) -> Bool[Array, "1 rC D"]:
    """Which keys of block j the queries of block i see: those of their own piece, from the window's first to themselves."""
    piece_q, piece_k = row.segment_q[i], row.segment_k[j]
    C, D = len(piece_q), len(piece_k)
    place_q, place_k = jnp.arange(C, dtype=jnp.int32), jnp.arange(D, dtype=jnp.int32)
    before = (row.query_offset + i * C + place_q)[:, None] - (j * D + place_k)[None, :]
    sees = (
        (piece_q[:, None] == piece_k[None, :])
        & (piece_q[:, None] >= 0)
        & (before >= 0)
        & (before < row.window)
    )
    return jnp.tile(sees, (num_queries // C, 1))[None]


def _dot(dims: str, a: Array, b: Array) -> Float32[Array, "..."]:
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32, precision=precision)


def _make_segment_row(
    q_LhK: Array, k_LgK: Array, v_LgK: Array, piece_L: Array, *, window: int
) -> _BlockedRow:
    """A row whose queries and keys are of the same tokens."""
    L, g = len(piece_L), k_LgK.shape[1]
    C = min(BLOCK_TOKENS, L)
    n = -(-L // C)
    piece_L = jnp.pad(piece_L, (0, n * C - L), constant_values=-1)
    place_L = jnp.arange(n * C, dtype=jnp.int32)
    # Pieces are contiguous, so a token's piece begins where the piece's number last changed.
    begins_L = jnp.concatenate([jnp.ones(1, bool), piece_L[1:] != piece_L[:-1]])
    first_L = jnp.maximum(jax.lax.cummax(jnp.where(begins_L, place_L, 0)), place_L - (window - 1))
    first_L = jnp.where(piece_L >= 0, first_L, n * C)
    piece = piece_L.reshape(n, C)
    return _BlockedRow(
        q=_split_blocks(q_LhK, g),
        k=_split_blocks(k_LgK, g),
        v=_split_blocks(v_LgK, g),
        segment_q=piece,
        segment_k=piece,
        first_block=first_L.reshape(n, C).min(1) // C,
        end_block=jnp.arange(1, n + 1, dtype=jnp.int32),
        query_offset=0,
        window=window,
    )


def _make_off_diagonal_row(
    q_ChK: Array, k_DgK: Array, v_DgK: Array, where: OffDiagonalBlock
) -> _BlockedRow:
    """A row of which some of the first queries see some keys: one piece, whose keys are all before its queries."""
    num_queries, first, num_keys = where
    q, k, v = (_split_blocks(x, k_DgK.shape[1]) for x in (q_ChK, k_DgK, v_DgK))
    C, D = min(BLOCK_TOKENS, len(q_ChK)), min(BLOCK_TOKENS, len(k_DgK))
    place_q, place_k = (
        jnp.arange(n * size, dtype=jnp.int32).reshape(n, size)
        for n, size in ((len(q), C), (len(k), D))
    )
    some = (place_q[:, 0] < num_queries) & (num_keys > 0)
    return _BlockedRow(
        q=q,
        k=k,
        v=v,
        segment_q=jnp.where(place_q < num_queries, 0, -1),
        segment_k=jnp.where((place_k >= first) & (place_k < first + num_keys), 0, -1),
        first_block=jnp.where(some, first // D, 0),
        end_block=jnp.where(some, -(-(first + num_keys) // D), 0),
        query_offset=len(k_DgK),
        window=len(q_ChK) + 2 * len(k_DgK),
    )


def _split_blocks(x_LhK: Array, num_kv_heads: int) -> Float[Array, "n g rC K"]:
    """Blocks of tokens; the query heads that share a key head stand one below the other, to make one product of them."""
    L, h, K = x_LhK.shape
    C = min(BLOCK_TOKENS, L)
    n = -(-L // C)
    x = jnp.pad(x_LhK, ((0, n * C - L), (0, 0), (0, 0)))
    x = x.reshape(n, C, num_kv_heads, h // num_kv_heads, K).transpose(0, 2, 3, 1, 4)
    return x.reshape(n, num_kv_heads, -1, K)


def _join_blocks(
    x: Float[Array, "n g rC K"], num_tokens: int, num_heads: int
) -> Float[Array, "L h K"]:
    """Undoes _cut."""
    n, g, rC, K = x.shape
    r = num_heads // g
    x = x.reshape(n, g, r, rC // r, K).transpose(0, 3, 1, 2, 4)
    return x.reshape(-1, num_heads, K)[:num_tokens]


@dataclasses.dataclass(frozen=True)
class BlockwiseKernel(Kernel):
    """The functions of this module: any device, any dtype, rows of any length."""

    name = "blockwise"

    def make_row_kernel(self, settings: KernelSettings, *, window: int | None) -> RowKernel:
        return functools.partial(attention, window=window)

    def make_chunk_kernel(self, settings: KernelSettings) -> ChunkKernel:
        return ChunkKernel(
            forward=forward,
            backward=backward,
            off_diagonal_forward=off_diagonal_forward,
            off_diagonal_backward=off_diagonal_backward,
        )
