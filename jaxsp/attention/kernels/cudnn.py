"""cuDNN's flash attention, forward and backward: packed rows, whole rows and off-diagonal blocks.

Segments of different lengths are in separate calls (cudnn_bins.py, cudnn_calls.py), and heads are
computed in chunks, one after another. Results are written in place: a chunk's gradients overwrite
its queries, keys and values in the input arrays.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.attention.kernels import cudnn_bins, cudnn_calls, cudnn_limits
from jaxsp.attention.kernels.cudnn_bins import SegmentTables
from jaxsp.attention.kernels.cudnn_calls import MaskedCall
from jaxsp.attention.kernels.kernel import (
    AttentionFunctions,
    AttentionWorkload,
    ChunkKernel,
    Device,
    Gradients,
    Kernel,
    KernelSettings,
    Saved,
    ScoreConfig,
    UnsupportedReason,
)
from jaxsp.attention.kernels.segments import OffDiagonalBlock, Segments
from jaxsp.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class CudnnKernel(Kernel):
    """cuDNN's flash attention in bfloat16, on NVIDIA GPUs."""

    name = "cudnn"
    masks_padding = True
    supports_head_chunks = True
    needs_selfcheck = True
    custom_call_prefix = cudnn_calls.CUSTOM_CALL_PREFIX
    title = "cuDNN"

    def describe(self) -> str:
        return cudnn_calls.describe_version()

    def make_row_functions(
        self, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        """Outputs and gradients are 0 at padding, where log-sum-exps are undefined. Inputs must be
        finite there: cuDNN reads beyond a segment and multiplies by 0.

        Rows with one slot (M = 1) are computed as a whole. Their segment must begin at the row's
        first token; otherwise the output is NaN.

        Source: for finite padding, NVIDIA/cudnn-frontend issue 624.
        """
        make_calls = functools.partial(
            cudnn_calls.make_row_calls,
            score=score,
            capacity_factor=settings.capacity_factor,
            copies_segments=settings.copies_segments,
        )

        def forward(q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
            calls, inside_BL = make_calls(segments, q.shape[1])
            return _forward(calls, inside_BL, q, k, v, settings.head_chunks)

        def backward(saved: Saved, segments: Segments) -> Gradients:
            calls, inside_BL = make_calls(segments, saved.q.shape[1])
            return _backward(calls, inside_BL, saved, settings.head_chunks)

        return AttentionFunctions(forward, backward)

    def make_chunk_kernel(self, settings: KernelSettings, score: ScoreConfig) -> ChunkKernel:
        def forward(q: Array, k: Array, v: Array, block: OffDiagonalBlock) -> tuple[Array, Array]:
            calls = [cudnn_calls.make_off_diagonal_call(score, block)]
            k, v = (_roll_tokens(x, block.first_key_B) for x in (k, v))
            return _forward(calls, None, q, k, v, settings.head_chunks)

        def backward(saved: Saved, block: OffDiagonalBlock) -> Gradients:
            calls = [cudnn_calls.make_off_diagonal_call(score, block)]
            k, v = (_roll_tokens(x, block.first_key_B) for x in (saved.k, saved.v))
            rolled = saved._replace(k=k, v=v)
            dq, dk, dv = _backward(calls, None, rolled, settings.head_chunks)
            dk, dv = (_roll_tokens(x, -block.first_key_B) for x in (dk, dv))
            return dq, dk, dv

        return ChunkKernel(
            packed=self.make_row_functions(settings, score),
            off_diagonal=AttentionFunctions(forward, backward),
        )

    def make_tables(
        self, settings: KernelSettings, rows: Segments, row_tokens: int
    ) -> SegmentTables | None:
        return cudnn_bins.make_tables(
            *rows[:2], row_tokens=row_tokens, capacity_factor=settings.capacity_factor
        )

    def unsupported_reasons(
        self, workload: AttentionWorkload, *, devices: Sequence[Device], device_bytes: int | None
    ) -> list[UnsupportedReason]:
        return cudnn_limits.unsupported_reasons(
            cudnn_limits.adapt_to_devices(workload, devices),
            devices=devices,
            device_bytes=device_bytes,
        )

    def legal_head_chunks(self, workload: AttentionWorkload) -> list[int]:
        return cudnn_limits.legal_head_chunks(workload)

    def configure(
        self,
        workload: AttentionWorkload,
        *,
        devices: Sequence[Device],
        device_bytes: int | None,
        head_chunks: int | None,
    ) -> KernelSettings:
        workload = cudnn_limits.adapt_to_devices(workload, devices)
        split = cudnn_limits.choose_split(workload, head_chunks=head_chunks)
        if device_bytes is not None:
            shortage = cudnn_limits.describe_shortage(workload, split, device_bytes=device_bytes)
            if shortage is not None:
                raise UserError(shortage)
        return KernelSettings(
            **split._asdict(),
            workspace_bytes=cudnn_limits.workspace_bytes(workload, split),
            lse_bytes=cudnn_limits.lse_bytes(workload, split),
            copies_segments=workload.copies_segments,
        )

    def read_workspace_bytes(self, program_text: str) -> int | None:
        return cudnn_calls.read_workspace_bytes(program_text)


def _roll_tokens(x_RDgK: Array, shift_R: Array) -> Array:
    """Moves each row's token number `shift` to the front.

    In a call with lengths, cuDNN attends to the first n keys of each row. So the block's keys are
    moved there. Their order does not matter, because every query attends to all of them.
    """
    return jax.vmap(lambda x, shift: jnp.roll(x, -shift, axis=0))(x_RDgK, shift_R)


@dataclasses.dataclass(frozen=True)
class _HeadSlice:
    """A chunk of an array's heads, read and written in place."""

    first: Array | int
    size: int
    is_whole: bool
    """True for all heads, which need no slicing."""
    axis: int = 2

    @classmethod
    def make(cls, num_heads: int, num_chunks: int, chunk: Array | int) -> "_HeadSlice":
        """A chunk has whole K/V heads with their query heads, or query heads that share one."""
        size = max(num_heads // num_chunks, 1)
        first = chunk * size if num_heads >= num_chunks else chunk * num_heads // num_chunks
        return cls(first, size, size == num_heads)

    def read(self, x: Array) -> Array:
        if self.is_whole:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.size, self.axis)

    def write(self, x: Array, part: Array) -> Array:
        if self.is_whole:
            return part
        part = part.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.first, self.axis)

    def add(self, x: Array, part: Array, *, offset: int) -> Array:
        """Adds to heads of an array with more heads, `offset` later."""
        place = dataclasses.replace(self, first=self.first + offset, is_whole=False)
        return place.write(x, place.read(x) + part.astype(x.dtype))


def _forward(
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
    B, L, h, _ = q.shape

    def compute_chunk(chunk: Array | int, results: tuple[Array, Array]) -> tuple[Array, Array]:
        queries = _HeadSlice.make(h, head_chunks, chunk)
        keys = _HeadSlice.make(k.shape[2], head_chunks, chunk)
        inputs = queries.read(q), keys.read(k), keys.read(v)
        out, lse = calls[0].forward(*inputs)
        for call in calls[1:]:
            # Otherwise XLA may keep the results of several calls in memory at the same time
            inputs, out, lse = jax.lax.optimization_barrier((inputs, out, lse))
            call_out, call_lse = call.forward(*inputs)
            assert call.inside_BL is not None, "several calls need masks"
            out = jnp.where(call.inside_BL[..., None, None], call_out, out)
            lse = jnp.where(call.inside_BL[:, None], call_lse, lse)
        out = queries.write(results[0], _zero_outside(inside_BL, out, after=inputs[0]))
        return out, dataclasses.replace(queries, axis=1).write(results[1], lse)

    if head_chunks == 1:
        return compute_chunk(0, (q, q))  # a slice of all heads replaces the array
    out = _zeros_after(q.shape, q.dtype, after=q)
    lse = _zeros_after((B, h, L), jnp.float32, after=q)
    return jax.lax.fori_loop(0, head_chunks, compute_chunk, (out, lse))


def _backward(
    calls: Sequence[MaskedCall], inside_BL: Array | None, saved: Saved, head_chunks: int
) -> Gradients:
    """dq, dk and dv of all calls together, 0 outside segments.

    Memory: the inputs, and one chunk's slice of the inputs and of the gradients. A chunk's
    gradients need no more memory, because they overwrite its inputs. Only if query heads of several
    chunks share a K/V head, sums of dk and dv are separate float32 arrays.

    Args: inside_BL: mask of the tokens in a segment; None: all tokens.
    """
    q, k, v, out, dout, lse = saved
    B, L, g, K = k.shape
    is_kv_shared = head_chunks > g
    start: tuple[Array, ...] = (q, k, v)
    if is_kv_shared:
        # One array for dk and dv: XLA adds in place to a slice of an array, but not to all of it.
        start = (q, _zeros_after((B, L, 2 * g, K), jnp.float32, after=q))

    def compute_chunk(chunk: Array | int, results: tuple[Array, ...]) -> tuple[Array, ...]:
        queries = _HeadSlice.make(q.shape[2], head_chunks, chunk)
        keys = _HeadSlice.make(g, head_chunks, chunk)
        all_keys, all_values = (k, v) if is_kv_shared else results[1:]
        inputs = Saved(
            q=queries.read(results[0]),
            k=keys.read(all_keys),
            v=keys.read(all_values),
            out=queries.read(out),
            dout=queries.read(dout),
            lse=dataclasses.replace(queries, axis=1).read(lse),
        )
        for index, call in enumerate(calls):
            is_last = index == len(calls) - 1
            write = functools.partial(
                _write_gradient,
                written_BL=call.inside_BL if index else None,
                inside_BL=inside_BL if is_last else None,
                after=inputs.q,
            )
            dq, *dkv = call.backward(inputs)
            if is_kv_shared:
                sums = results[1]
                for offset, x in zip((0, g), dkv, strict=True):
                    term = _zero_outside(call.inside_BL, x, after=x)
                    sums = keys.add(sums, term, offset=offset)
                results = write(results[0], queries, dq), sums
            else:
                slices = (queries, keys, keys)
                results = tuple(map(write, results, slices, (dq, *dkv)))
            if not is_last:
                # The inputs include lse. Otherwise XLA expands it for all calls in one operation,
                # and the softmax statistics of all calls are live at the same time.
                inputs, results = jax.lax.optimization_barrier((inputs, results))
        return results

    if head_chunks == 1:
        dq, *dkv = compute_chunk(0, start)
    else:
        dq, *dkv = jax.lax.fori_loop(0, head_chunks, compute_chunk, start)
    dk, dv = jnp.split(dkv[0], 2, axis=2) if is_kv_shared else dkv
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def _write_gradient(
    total: Array,
    heads: _HeadSlice,
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
        gradient = jnp.where(written_BL[..., None, None], gradient, heads.read(total))
    return heads.write(total, _zero_outside(inside_BL, gradient, after=after))


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
