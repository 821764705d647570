"""Gather: queries stay, and the keys and values of whole rows come to them, some heads at a time.

Rows lie in zigzag (core/layout.py), so that every device's two chunks together have as much before them as any other's. While
the heads that are there are attended to, the next ones are on their way: memory grows with the heads of a lot, not with all.

Source: Meta's Llama 3, arXiv:2407.21783, sec. 3.3.2; `heads_k_stride` of zhuzilin/ring-flash-attention. Differs: packed pieces
in zigzag, gradients summed in float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from jaxsp.attention import zigzag
from jaxsp.attention.kernels import checkpoint_names, segments
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.attention.zigzag import ChunkKernel, LocalSegments, PartialAttention, ZigzagGroup
from jaxsp.core import axes


def sent_bytes(
    *,
    degree: int,
    num_rows: int,
    tokens_per_device: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    remat: str,
    kv_heads_per_gather: int,
) -> dict[str, int]:
    """Bytes that one device sends to the others for a layer in a turn, forward and backward.

    Args:
        rows: that a group holds together.
        share_tokens: tokens of a row that one device holds.
        itemsize: bytes of an element of k and v; their gradients are float32.
        remat: what a layer's backward pass keeps: none, attention or full.
        kv_heads: of num_kv_heads, those that are gathered at a time.
    """
    of_head = (degree - 1) * num_rows * tokens_per_device * 2 * head_dim
    heads = 2 * num_kv_heads
    if remat == "full" and num_kv_heads > 2 * kv_heads_per_gather:
        # forward again, but for the first lot, which is the backward pass's too; of two lots, whose loop of one turn XLA
        # unrolls, so are both
        heads += num_kv_heads - kv_heads_per_gather
    return {"all-gather": heads * of_head * itemsize, "reduce-scatter": num_kv_heads * of_head * 4}


def attend(
    q_BlHK: Float[Array, "B l H K"],
    k_BlGK: Float[Array, "B l G K"],
    v_BlGK: Float[Array, "B l G K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    kernel: ChunkKernel,
    group: ZigzagGroup,
    kv_heads_per_gather: int,
) -> Float[Array, "B l H K"]:
    """Attention when each device holds two chunks of whole rows, and keeps its queries.

    Shapes: inside shard_map over `seq`; shares are of the layout zigzag(ring.degree).
    Moves:  k and v are all-gathered, and again backward, where their gradients are reduce-scattered: see `cost`.
    Args:
        kv_heads: K/V heads that are gathered at a time; divides G.
    """
    assert k_BlGK.shape[2] % kv_heads_per_gather == 0
    return _attend(
        q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM, kernel, group, kv_heads_per_gather
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    starts_BM: Array,
    lengths_BM: Array,
    kernel: ChunkKernel,
    group: ZigzagGroup,
    kv_heads_per_gather: int,
) -> Array:
    return _attend_fwd(q, k, v, starts_BM, lengths_BM, kernel, group, kv_heads_per_gather)[0]


def _attend_fwd(
    q: Array,
    k: Array,
    v: Array,
    starts_BM: Array,
    lengths_BM: Array,
    kernel: ChunkKernel,
    group: ZigzagGroup,
    kv_heads_per_gather: int,
) -> tuple[Array, tuple[Array, ...]]:
    B, l, H, _ = q.shape
    todo = _LocalWork.build(group, starts_BM, lengths_BM, l // 2)
    q_SB2ChK, k_SB2CgK, v_SB2CgK = (
        _split_head_chunks(x, k.shape[2] // kv_heads_per_gather) for x in (q, k, v)
    )

    def lot(q: Array, kv: list[Array], whole: list[Array]) -> tuple[Array, Array]:
        """Output and log-sum-exp of some heads."""
        own = zigzag.diagonal_forward(
            kernel, todo.local_segments, *(zigzag.flatten_chunks(x) for x in (q, *kv))
        )
        before = jax.lax.map(
            lambda of: zigzag.off_diagonal_forward(kernel, of[1], of[0], *whole),
            (q.swapaxes(0, 1), todo.earlier_blocks),
        )
        before = PartialAttention(*(zigzag.flatten_chunks(x.swapaxes(0, 1)) for x in before))
        out, lse = zigzag.merge(own, before)
        return out.astype(q.dtype), lse

    out_SRChK, lse_SRhC = _scan_head_chunks(group, lot, [q_SB2ChK], [k_SB2CgK, v_SB2CgK])
    out = _join_head_chunks(out_SRChK.reshape(q_SB2ChK.shape))
    lse = (
        lse_SRhC.reshape(-1, B, 2, lse_SRhC.shape[2], l // 2)
        .transpose(1, 0, 3, 2, 4)
        .reshape(B, H, l)
    )
    out, lse = (
        checkpoint_name(out, checkpoint_names.OUT),
        checkpoint_name(lse, checkpoint_names.LSE),
    )
    return out, (q, k, v, starts_BM, lengths_BM, out, lse)


def _attend_bwd(
    kernel: ChunkKernel,
    group: ZigzagGroup,
    kv_heads_per_gather: int,
    saved: tuple[Array, ...],
    dout: Array,
) -> tuple[Array, Array, Array, None, None]:
    q, k, v, starts_BM, lengths_BM, out, lse = saved
    B, l, H, _ = q.shape
    num_lots = k.shape[2] // kv_heads_per_gather
    todo = _LocalWork.build(group, starts_BM, lengths_BM, l // 2)
    q_S, k_S, v_S, out_S, dout_S = (_split_head_chunks(x, num_lots) for x in (q, k, v, out, dout))
    lse_SB2hC = lse.reshape(B, num_lots, -1, 2, l // 2).transpose(1, 0, 3, 2, 4)

    def lot(
        q: Array, out: Array, lse: Array, dout: Array, kv: list[Array], whole: list[Array]
    ) -> tuple[Array, ...]:
        """dq, dk and dv of some heads."""
        queries = [x.swapaxes(0, 1) for x in (q, out, lse, dout)]

        def chunk(sums: list[Array], of: tuple) -> tuple[list[Array], Array]:
            (q, *done), where = of
            dq, *more = zigzag.off_diagonal_backward(kernel, where, q, *whole, *done)
            return [x + y for x, y in zip(sums, more, strict=True)], dq

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in whole]
        dwhole, dq_2BChK = jax.lax.scan(chunk, zeros, (queries, todo.earlier_blocks))
        scattered = _reduce_scatter_dkv(group, dwhole)
        # while these are on their way
        dq, *dkv = zigzag.diagonal_backward(
            kernel,
            todo.local_segments,
            *(zigzag.flatten_chunks(x) for x in (q, *kv, out, lse, dout)),
        )
        dq = dq.reshape(q.shape) + dq_2BChK.swapaxes(0, 1)
        dk, dv = (x.reshape(y.shape) + y for x, y in zip(dkv, scattered, strict=True))
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    dq, dk, dv = _scan_head_chunks(group, lot, [q_S, out_S, lse_SB2hC, dout_S], [k_S, v_S])
    return _join_head_chunks(dq), _join_head_chunks(dk), _join_head_chunks(dv), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


class _LocalWork(NamedTuple):
    """What the pieces leave to do on this device."""

    local_segments: LocalSegments
    earlier_blocks: OffDiagonalBlock
    """Of each of the two chunks, [2, B]: what it sees of all tokens before it."""

    @classmethod
    def build(
        cls, ring: ZigzagGroup, starts_BM: Array, lengths_BM: Array, chunk_tokens: int
    ) -> "_LocalWork":
        found = [
            segments.find_off_diagonal_block(
                starts_BM,
                lengths_BM,
                first_query=chunk * chunk_tokens,
                num_queries=chunk_tokens,
                first_key=jnp.int32(0),
                num_keys=chunk * chunk_tokens,
            )
            for chunk in ring.chunk_numbers(ring.index)
        ]
        before = OffDiagonalBlock(*(jnp.stack(x) for x in zip(*found, strict=True)))
        return cls(
            zigzag.find_local_segments(ring, starts_BM, lengths_BM, chunk_tokens=chunk_tokens),
            before,
        )


def _scan_head_chunks(
    group: ZigzagGroup, attend_chunk: Any, inputs: list[Array], kv: list[Array]
) -> Any:
    """What `lot` makes of each lot of heads, while the next one's keys and values are gathered."""

    def next_lot(whole: list[Array], of: tuple) -> tuple[list[Array], Any]:
        inputs, kv, kv_next = of
        coming = _all_gather_kv(group, kv_next)
        return coming, attend_chunk(*inputs, kv, whole)

    whole = _all_gather_kv(group, [x[0] for x in kv])
    but_last, but_first = ([x[:-1] for x in kv], [x[1:] for x in kv])
    whole, found = jax.lax.scan(next_lot, whole, ([x[:-1] for x in inputs], but_last, but_first))
    last = attend_chunk(*(x[-1] for x in inputs), [x[-1] for x in kv], whole)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), found, last)


def _split_head_chunks(x_BlXK: Array, num_chunks: int) -> Array:
    """The heads in lots, each with both chunks of each row: [S, B, 2, C, X / S, K]."""
    B, l, X, K = x_BlXK.shape
    return x_BlXK.reshape(B, 2, l // 2, num_chunks, X // num_chunks, K).transpose(3, 0, 1, 2, 4, 5)


def _join_head_chunks(x_SB2CxK: Array) -> Array:
    """Undoes `_in_lots`."""
    S, B, _, C, x, K = x_SB2CxK.shape
    return x_SB2CxK.transpose(1, 2, 3, 0, 4, 5).reshape(B, 2 * C, S * x, K)


def _all_gather_kv(group: ZigzagGroup, kv_B2CgK: list[Array]) -> list[Float[Array, "B L g K"]]:
    """Whole rows, in their own order, of all devices' chunks; keys and values come in one message, as in `Ring.passed_on`."""
    kv_2B2CgK = jnp.stack(kv_B2CgK)
    gather = functools.partial(
        jax.lax.all_gather, axis_name=axes.SEQ, axis_index_groups=group.axis_index_groups
    )
    kv_P2B2CgK = gather(kv_2B2CgK) if group.degree > 1 else kv_2B2CgK[None]
    whole = []
    for x_PB2CgK in (kv_P2B2CgK[:, 0], kv_P2B2CgK[:, 1]):
        x_NBCgK = jnp.concatenate([x_PB2CgK[:, :, 0], x_PB2CgK[::-1, :, 1]])
        N, B, C, g, K = x_NBCgK.shape
        whole.append(x_NBCgK.swapaxes(0, 1).reshape(B, N * C, g, K))
    return whole


def _reduce_scatter_dkv(group: ZigzagGroup, kv_BLgK: list[Array]) -> Float[Array, "2 B 2 C g K"]:
    """This device's chunks of the sums over all devices of such rows."""
    parts = []
    for x_BLgK in kv_BLgK:
        B, _, g, K = x_BLgK.shape
        x_NBCgK = x_BLgK.reshape(B, 2 * group.degree, -1, g, K).swapaxes(0, 1)
        parts.append(jnp.stack([x_NBCgK[: group.degree], x_NBCgK[: group.degree - 1 : -1]], axis=2))
    kv_P2B2CgK = jnp.stack(parts, axis=1)
    if group.degree == 1:
        return kv_P2B2CgK[0]
    return jax.lax.psum_scatter(kv_P2B2CgK, axes.SEQ, axis_index_groups=group.axis_index_groups)
