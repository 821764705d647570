"""Attention of chunks in parts: their own tokens, and blocks of earlier tokens.

Chunks attend to themselves with the kernel's packed causal attention. Of the tokens before a chunk,
they see one block: the part of the one segment that reaches from there into the chunk (see also
chunk_calls.py). Partial results are merged in float32 by their log-sum-exps. The backward pass uses
the merged log-sum-exp, so its partial results are only added.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxsp.attention.chunk_calls import Call
from jaxsp.attention.kernels.kernel import ChunkKernel, Saved
from jaxsp.attention.kernels.segments import OffDiagonalBlock, Segments

EMPTY_LSE = -1e30
"""Log-sum-exp of no keys. It is finite, so that differences are never NaN."""


class PartialAttention(NamedTuple):
    """Attention of some queries over a part of their keys."""

    out_BCHK: Float32[Array, "B C H K"]
    lse_BCH: Float32[Array, "B C H"]


class LocalSegments(NamedTuple):
    """Segments of this device's chunks. Chunks count as rows, those of a row one after another."""

    segments: Segments
    mask_RC: Bool[Array, "R C"]
    """True for tokens of a segment."""

    def to_chunk_rows(self, x_Bl: Array) -> Array:
        """Makes chunks rows of their own: [B, l, ...] to [R, C, ...]."""
        return x_Bl.reshape(*self.mask_RC.shape, *x_Bl.shape[2:])


Sums = tuple[Array, list[Array]]
"""dq, and dk and dv, in float32."""

ForwardResults = tuple[Array, Array, Array]
"""Output, log-sum-exp, and gradient of the output.

Shapes: [B, l, H, K], [B, l, H] and [B, l, H, K].
"""


def diagonal_forward(
    kernel: ChunkKernel, local_segments: LocalSegments, q_BlHK: Array, k_BlGK: Array, v_BlGK: Array
) -> PartialAttention:
    """Attention of chunks to themselves."""
    q, k, v = (local_segments.to_chunk_rows(x) for x in (q_BlHK, k_BlGK, v_BlGK))
    out, lse = kernel.packed.forward(q, k, v, local_segments.segments)
    part = _make_partial(out, lse, local_segments.mask_RC)
    return PartialAttention(*(x.reshape(*q_BlHK.shape[:2], *x.shape[2:]) for x in part))


def diagonal_backward(
    kernel: ChunkKernel,
    local_segments: LocalSegments,
    q_BlHK: Array,
    kv_BlGK: Sequence[Array],
    forward_results: ForwardResults,
) -> Sums:
    """dq, dk and dv of the attention of chunks to themselves."""
    q, k, v, out, lse, dout = map(
        local_segments.to_chunk_rows, (q_BlHK, *kv_BlGK, *forward_results)
    )
    saved = Saved(q, k, v, out, dout, lse.swapaxes(1, 2))
    gradients = kernel.packed.backward(saved, local_segments.segments)
    dq, *dkv = (
        _zero_outside(x, local_segments.mask_RC).reshape(*q_BlHK.shape[:2], *x.shape[2:])
        for x in gradients
    )
    return dq, dkv


def add_calls_forward(
    kernel: ChunkKernel,
    calls: Sequence[Call],
    q: Array,
    kv: Sequence[Array],
    results: PartialAttention,
    *,
    in_order: bool,
) -> PartialAttention:
    """Results so far, with the attention of some calls merged in.

    Args: in_order: see `_begin_after`.
    """
    previous: tuple[Array, ...] = ()
    for call in calls:
        if in_order:
            q, kv = _begin_after(previous, (q, kv))
        k, v = map(call.take_keys, kv)
        queries = call.take_queries(q)
        forward = kernel.off_diagonal.forward
        out, lse = previous = _compute_if_any(call.blocks, forward, queries, k, v)
        part = _make_partial(out, lse, call.blocks.query_mask(queries.shape[1]))
        outs = call.place_queries(part.out_BCHK, 0.0)
        lses = call.place_queries(part.lse_BCH, EMPTY_LSE)
        for out, lse in zip(outs, lses, strict=True):
            results = merge(results, PartialAttention(out, lse))
    return results


def add_calls_backward(
    kernel: ChunkKernel,
    calls: Sequence[Call],
    q: Array,
    kv: Sequence[Array],
    forward_results: ForwardResults,
    gradients: Sums,
    *,
    in_order: bool,
) -> Sums:
    """Gradients so far, with those of some calls added.

    Args: in_order: see `_begin_after`.
    """
    dq, dkv = gradients
    previous: tuple[Array, ...] = ()
    for call in calls:
        if in_order:
            q, kv, forward_results = _begin_after(previous, (q, kv, forward_results))
        queries, out, lse, dout = map(call.take_queries, (q, *forward_results))
        keys, values = map(call.take_keys, kv)
        saved = Saved(queries, keys, values, out, dout, lse.swapaxes(1, 2))
        previous = _compute_if_any(call.blocks, kernel.off_diagonal.backward, saved)
        query_mask = call.blocks.query_mask(queries.shape[1])
        key_mask = call.blocks.key_mask(keys.shape[1])
        masks = (query_mask, key_mask, key_mask)
        dq_R, *dkv_R = map(_zero_outside, previous, masks)
        for term in call.place_queries(dq_R, 0.0):
            dq = dq + term
        dkv = [x + call.place_keys(term) for x, term in zip(dkv, dkv_R, strict=True)]
    return dq, dkv


def _begin_after(previous: tuple[Array, ...], inputs: Any) -> Any:
    """The inputs of a call, which XLA selects after the results of the previous call exist.

    Without this, it selects the inputs of a ring step's calls first, and holds all of them (ring of
    8 with 16 chunks per device, 131,072 tokens each: 52.6 GiB in place of 45.1). All-gather needs
    less memory without.
    """
    return jax.lax.optimization_barrier((inputs, previous))[0]


def _compute_if_any(
    block: OffDiagonalBlock, compute: Callable[..., tuple[Array, ...]], *inputs: Any
) -> tuple[Array, ...]:
    """The kernel's results in its own dtype, or zeros if no row has a block.

    Results of a conditional are written to memory: in float32 they would be twice as large (ring of
    8, a million tokens: 3 GiB).
    """
    shapes = jax.eval_shape(compute, *inputs, block)

    def make_zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)

    return jax.lax.cond(block.is_any(), lambda: tuple(compute(*inputs, block)), make_zeros)


def merge(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Attention of queries over the keys of both parts."""
    lse_BCH = jnp.logaddexp(first.lse_BCH, second.lse_BCH)
    terms = [part.out_BCHK * jnp.exp(part.lse_BCH - lse_BCH)[..., None] for part in (first, second)]
    return PartialAttention(jnp.asarray(sum(terms)), lse_BCH)


def _make_partial(out_RCHK: Array, lse_RHC: Array, mask_RC: Array) -> PartialAttention:
    return PartialAttention(
        _zero_outside(out_RCHK, mask_RC),
        jnp.where(mask_RC[..., None], lse_RHC.swapaxes(1, 2), EMPTY_LSE),
    )


def _zero_outside(x_RCXK: Array, mask_RC: Array) -> Float[Array, "R C X K"]:
    """float32 values; 0 for tokens outside the mask, whatever the kernel has left there."""
    return jnp.where(mask_RC[..., None, None], x_RCXK.astype(jnp.float32), 0.0)
