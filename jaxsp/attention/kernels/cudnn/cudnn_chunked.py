"""cuDNN's attention in chunks of heads, one after another, and over several calls.

Results are written in place: a chunk's gradients overwrite its queries, keys and values in the
input arrays.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.attention.kernels.cudnn.cudnn_masks import MaskedCall
from jaxsp.attention.kernels.residuals import Gradients, Saved


def forward(
    calls: Sequence[MaskedCall],
    inside_BL: Array | None,
    q: Array,
    k: Array,
    v: Array,
    head_chunks: int,
) -> tuple[Array, Array]:
    """Output, 0 outside segments, and log-sum-exp, of all calls together.

    Args: inside_BL: mask of the tokens in a segment; None: all tokens.
    """
    heads = _HeadChunks(q.shape[2], k.shape[2], head_chunks)

    def compute_chunk(chunk: Array | int, results: tuple[Array, Array]) -> tuple[Array, Array]:
        inputs = (
            heads.query_slice(chunk).read(q),
            heads.kv_slice(chunk).read(k),
            heads.kv_slice(chunk).read(v),
        )
        out, lse = calls[0].forward(*inputs)
        for call in calls[1:]:
            # Otherwise XLA may keep the results of several calls in memory at the same time
            inputs, out, lse = jax.lax.optimization_barrier((inputs, out, lse))
            call_out, call_lse = call.forward(*inputs)
            assert call.inside_BL is not None, "several calls need masks"
            out = jnp.where(call.inside_BL[..., None, None], call_out, out)
            lse = jnp.where(call.inside_BL[:, None], call_lse, lse)
        lse_slice = dataclasses.replace(heads.query_slice(chunk), axis=1)
        out_slice = heads.query_slice(chunk)
        out = out_slice.write(results[0], _zero_outside(inside_BL, out, after=inputs[0]))
        return out, lse_slice.write(results[1], lse)

    if head_chunks == 1:
        return compute_chunk(0, (q, q))  # a slice of all heads replaces the array
    B, L, h, _ = q.shape
    out = _zeros_after(q.shape, q.dtype, after=q)
    lse = _zeros_after((B, h, L), jnp.float32, after=q)
    return jax.lax.fori_loop(0, head_chunks, compute_chunk, (out, lse))


def backward(
    calls: Sequence[MaskedCall], inside_BL: Array | None, saved: Saved, head_chunks: int
) -> Gradients:
    """dq, dk and dv of all calls together, 0 outside segments.

    Memory: the inputs, and one chunk's slice of the inputs and of the gradients. A chunk's
    gradients need no more memory, because they overwrite its inputs. Only if query heads of several
    chunks share a K/V head, sums of dk and dv are separate float32 arrays.

    Args: inside_BL: mask of the tokens in a segment; None: all tokens.
    """
    q, k, v, out, dout, lse = saved
    heads = _HeadChunks(q.shape[2], k.shape[2], head_chunks)
    B, L, g, K = k.shape
    start: tuple[Array, ...] = (q, k, v)
    if heads.is_kv_shared:
        # One array for dk and dv: XLA adds in place to a slice of an array, but not to all of it.
        start = (q, _zeros_after((B, L, 2 * g, K), jnp.float32, after=q))

    def compute_chunk(chunk: Array | int, results: tuple[Array, ...]) -> tuple[Array, ...]:
        query_slice = heads.query_slice(chunk)
        kv_slice = heads.kv_slice(chunk)
        keys, values = (k, v) if heads.is_kv_shared else results[1:]
        lse_chunk = dataclasses.replace(query_slice, axis=1).read(lse)
        inputs = Saved(
            q=query_slice.read(results[0]),
            k=kv_slice.read(keys),
            v=kv_slice.read(values),
            out=query_slice.read(out),
            dout=query_slice.read(dout),
            lse=lse_chunk,
        )
        for index, call in enumerate(calls):
            is_last = index == len(calls) - 1
            dq, dk, dv = call.backward(inputs)
            write = functools.partial(
                _write_gradient,
                written_BL=call.inside_BL if index else None,
                inside_BL=inside_BL if is_last else None,
                after=inputs.q,
            )
            if heads.is_kv_shared:
                dkv = _add_gradient(results[1], kv_slice.shift(0), dk, call=call)
                dkv = _add_gradient(dkv, kv_slice.shift(g), dv, call=call)
                results = write(results[0], query_slice, dq), dkv
            else:
                results = (
                    write(results[0], query_slice, dq),
                    write(results[1], kv_slice, dk),
                    write(results[2], kv_slice, dv),
                )
            if not is_last:
                # The inputs include lse. Otherwise XLA expands it for all calls in one operation,
                # and the softmax statistics of all calls are live at the same time.
                inputs, results = jax.lax.optimization_barrier((inputs, results))
        return results

    if head_chunks == 1:
        dq, *dkv = compute_chunk(0, start)
    else:
        dq, *dkv = jax.lax.fori_loop(0, head_chunks, compute_chunk, start)
    dk, dv = jnp.split(dkv[0], 2, axis=2) if heads.is_kv_shared else dkv
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


@dataclasses.dataclass(frozen=True)
class _HeadSlice:
    """Slice of an array's heads, read and written in place."""

    first: Array | int
    size: int
    is_whole: bool
    """True for all heads, which need no slicing."""
    axis: int = 2

    def read(self, x: Array) -> Array:
        if self.is_whole:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.size, self.axis)

    def write(self, x: Array, part: Array) -> Array:
        if self.is_whole:
            return part
        part = part.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.first, self.axis)

    def shift(self, num_heads: int) -> "_HeadSlice":
        """A slice of an array with more heads, which starts `num_heads` later."""
        return dataclasses.replace(self, first=self.first + num_heads, is_whole=False)


@dataclasses.dataclass(frozen=True)
class _HeadChunks:
    """Division of the heads into chunks.

    A chunk has whole K/V heads with their query heads, or query heads that share one K/V head.
    """

    num_heads: int
    num_kv_heads: int
    num_chunks: int

    @property
    def is_kv_shared(self) -> bool:
        """True if several chunks have the same K/V head."""
        return self.num_chunks > self.num_kv_heads

    def query_slice(self, chunk: Array | int) -> _HeadSlice:
        size = self.num_heads // self.num_chunks
        return _HeadSlice(chunk * size, size, self.num_chunks == 1)

    def kv_slice(self, chunk: Array | int) -> _HeadSlice:
        size = max(self.num_kv_heads // self.num_chunks, 1)
        first = chunk * self.num_kv_heads // self.num_chunks
        return _HeadSlice(first, size, size == self.num_kv_heads)


def _write_gradient(
    total: Array,
    head_slice: _HeadSlice,
    gradient: Array,
    *,
    written_BL: Array | None,
    inside_BL: Array | None,
    after: Array,
) -> Array:
    """Writes a call's gradient over that of earlier calls in `total`, and 0 outside segments.

    Args: written_BL: the call's tokens; None: all. inside_BL, after: see `_zero_outside`.
    """
    if written_BL is not None:
        earlier = head_slice.read(total)
        gradient = jnp.where(written_BL[..., None, None], gradient, earlier)
    return head_slice.write(total, _zero_outside(inside_BL, gradient, after=after))


def _add_gradient(
    total: Array, head_slice: _HeadSlice, gradient: Array, *, call: MaskedCall
) -> Array:
    """Adds a call's gradient to `total`."""
    earlier = head_slice.read(total)
    gradient = _zero_outside(call.inside_BL, gradient, after=gradient).astype(total.dtype)
    return head_slice.write(total, earlier + gradient)


def _zero_outside(inside_BL: Array | None, x: Array, *, after: Array) -> Array:
    """Sets tokens outside segments to 0. Args: after: an array that is made in the same loop."""
    if inside_BL is None:
        return x
    # The 0 depends on an array. JAX would hoist a constant array out of the surrounding loops
    # (5 GiB at 5M tokens on 8 devices).
    first = after[0, 0, 0, 0]
    return jnp.where(inside_BL[..., None, None], x, (first < first).astype(x.dtype))


def _zeros_after(shape: tuple[int, ...], dtype: Any, *, after: Array) -> Array:
    """Zeros that exist only once another array does: JAX cannot hoist them out of the layer
    scan."""
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), dtype), after))
    return jnp.broadcast_to(zero, shape)
