"""cuDNN's flash attention, forward and backward: rows of one or of many segments, and off-diagonal blocks (rectangles).

The library's calls are wrapped in our own custom_vjp, whose output and log-sum-exp have names for a
remat policy. Heads are processed in chunks, one after another, and segments of different lengths in
separate calls (cudnn_slots.py). Results of several calls are merged in place: a chunk's gradients
overwrite its queries, keys and values in the input arrays.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.attention.kernels import (
    checkpoint_names,
    cudnn_calls,
    cudnn_limits,
    cudnn_memory,
    cudnn_slots,
)
from jaxsp.attention.kernels.cudnn_slots import CallSlots, PackedCall, SegmentTables
from jaxsp.attention.kernels.kernel import ChunkKernel, Kernel, KernelSettings, RowKernel
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.attention.kernels.workload import Device, KernelWorkload, UnsupportedReason
from jaxsp.core.errors import UserError


def attention(
    q_BLhK: Float[Array, "B L h K"],
    k_BLgK: Float[Array, "B L g K"],
    v_BLgK: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    head_chunks: int = 1,
    capacity_factor: int = cudnn_slots.CAPACITY_FACTOR,
    window: int | None = None,
    tables: SegmentTables | None = None,
) -> Float[Array, "B L h K"]:
    """Causal softmax attention inside each segment; output and gradients are 0 at padding.

    Padding in the inputs must be finite: cuDNN reads beyond a segment and multiplies by 0.

    Rows of one slot (M = 1) are computed as a whole: their segment must begin with the row (NaN if not).

    Args:
        head_chunks: number of chunks of the heads, computed one after another; one of `limits.parts`.
        slot_room: one of cudnn_slots.ROOMS.
        window: a token sees itself and the window - 1 tokens before it; None: all of them.
        tables: what `make_tables` returns for these segments; None: made here.
    Raises: limits.obstacles lists what cuDNN cannot do; the caller must check it.
    Source: for finite padding, NVIDIA/cudnn-frontend issue 624.
    """
    if tables is None:
        tables = make_tables(
            starts_BM, lengths_BM, row_tokens=q_BLhK.shape[1], capacity_factor=capacity_factor
        )
    return _attention(
        q_BLhK,
        k_BLgK,
        v_BLgK,
        starts_BM,
        lengths_BM,
        tables,
        _StaticArgs(head_chunks, capacity_factor, window),
    )


def make_tables(
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    row_tokens: int,
    capacity_factor: int = cudnn_slots.CAPACITY_FACTOR,
) -> SegmentTables | None:
    """Slot tables of packed rows, which all layers share; None for rows of one slot, which need none."""
    num_rows, max_pieces = starts_BM.shape
    if max_pieces == 1:
        return None
    made = cudnn_slots.plan_calls(
        num_rows=num_rows,
        row_tokens=row_tokens,
        max_segments=max_pieces,
        capacity_factor=capacity_factor,
    )
    return cudnn_slots.make_tables(made, starts_BM, lengths_BM, row_tokens=row_tokens)


@dataclasses.dataclass(frozen=True)
class _StaticArgs:
    """Arguments of `attention` that are not arrays."""

    head_chunks: int
    capacity_factor: int
    window: int | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(
    q: Array,
    k: Array,
    v: Array,
    starts_BM: Array,
    lengths_BM: Array,
    tables: SegmentTables | None,
    static: _StaticArgs,
) -> Array:
    return _attention_fwd(q, k, v, starts_BM, lengths_BM, tables, static)[0]


def _attention_fwd(
    q: Array,
    k: Array,
    v: Array,
    starts_BM: Array,
    lengths_BM: Array,
    tables: SegmentTables | None,
    static: _StaticArgs,
) -> tuple[Array, tuple[Any, ...]]:
    calls, inside = _make_row_calls(q, starts_BM, lengths_BM, tables, static)
    out, lse = _forward(calls, inside, q, k, v, static.head_chunks)
    out, lse = (
        checkpoint_name(out, checkpoint_names.OUT),
        checkpoint_name(lse, checkpoint_names.LSE),
    )
    return out, (q, k, v, starts_BM, lengths_BM, tables, out, lse)


def _attention_bwd(
    static: _StaticArgs, saved: tuple[Any, ...], dout: Array
) -> tuple[Array | None, ...]:
    q, k, v, starts_BM, lengths_BM, tables, out, lse = saved
    calls, inside = _make_row_calls(q, starts_BM, lengths_BM, tables, static)
    found = _backward(calls, inside, q, k, v, out, lse, dout, static.head_chunks)
    return *found, None, None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def forward(
    q: Float[Array, "B L h K"],
    k: Float[Array, "B L g K"],
    v: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    head_chunks: int = 1,
    capacity_factor: int = cudnn_slots.CAPACITY_FACTOR,
    window: int | None = None,
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Output, 0 at padding, and log-sum-exp, undefined there."""
    how = _StaticArgs(head_chunks, capacity_factor, window)
    tables = make_tables(
        starts_BM, lengths_BM, row_tokens=q.shape[1], capacity_factor=capacity_factor
    )
    calls, inside = _make_row_calls(q, starts_BM, lengths_BM, tables, how)
    return _forward(calls, inside, q, k, v, head_chunks)


def backward(
    q: Float[Array, "B L h K"],
    k: Float[Array, "B L g K"],
    v: Float[Array, "B L g K"],
    out: Float[Array, "B L h K"],
    lse: Float32[Array, "B h L"],
    dout: Float[Array, "B L h K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    head_chunks: int = 1,
    capacity_factor: int = cudnn_slots.CAPACITY_FACTOR,
    window: int | None = None,
) -> tuple[Float[Array, "B L h K"], Float[Array, "B L g K"], Float[Array, "B L g K"]]:
    """dq, dk and dv, 0 at padding. `out` and `lse` may include further keys."""
    how = _StaticArgs(head_chunks, capacity_factor, window)
    tables = make_tables(
        starts_BM, lengths_BM, row_tokens=q.shape[1], capacity_factor=capacity_factor
    )
    calls, inside = _make_row_calls(q, starts_BM, lengths_BM, tables, how)
    return _backward(calls, inside, q, k, v, out, lse, dout, head_chunks)


def off_diagonal_forward(
    q: Float[Array, "R C h K"],
    k: Float[Array, "R D g K"],
    v: Float[Array, "R D g K"],
    block: OffDiagonalBlock,
    *,
    head_chunks: int = 1,
) -> tuple[Float[Array, "R C h K"], Float32[Array, "R h C"]]:
    """Output and log-sum-exp of the rectangle's queries over its keys, without a mask; undefined for other queries."""
    k, v = (_roll_tokens(x, block.first_key_B) for x in (k, v))
    return _forward([_OffDiagonalCall(block)], None, q, k, v, head_chunks)


def off_diagonal_backward(
    q: Float[Array, "R C h K"],
    k: Float[Array, "R D g K"],
    v: Float[Array, "R D g K"],
    out: Float[Array, "R C h K"],
    lse: Float32[Array, "R h C"],
    dout: Float[Array, "R C h K"],
    block: OffDiagonalBlock,
    *,
    head_chunks: int = 1,
) -> tuple[Float[Array, "R C h K"], Float[Array, "R D g K"], Float[Array, "R D g K"]]:
    """dq, dk and dv of the rectangle, undefined elsewhere. `out` and `lse` may include further keys."""
    k, v = (_roll_tokens(x, block.first_key_B) for x in (k, v))
    dq, *dkv = _backward([_OffDiagonalCall(block)], None, q, k, v, out, lse, dout, head_chunks)
    dk, dv = (_roll_tokens(x, -block.first_key_B) for x in dkv)
    return dq, dk, dv


def _roll_tokens(x_RDgK: Array, by_R: Array) -> Array:
    """Rolls tokens to the front by `by_R` positions. cuDNN counts keys from the first; without a
    mask, any order works."""
    return jax.vmap(lambda x, by: jnp.roll(x, -by, axis=0))(x_RDgK, by_R)


@runtime_checkable
class _Call(Protocol):
    """One call of the library, for one chunk of the heads."""

    @property
    def inside_BL(self) -> Bool[Array, "B L"] | None:
        """Tokens whose results are defined; None: unknown, all of them count."""

    def forward(
        self, q: Array, k: Array, v: Array
    ) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]: ...

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Float[Array, "B L h K"], Float[Array, "B L g K"], Float[Array, "B L g K"]]: ...


@dataclasses.dataclass(frozen=True)
class _OffDiagonalCall:
    """Queries of each row over keys before them."""

    block: OffDiagonalBlock
    inside_BL: None = None

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return cudnn_calls.forward(self.block, q, k, v, window=None)

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Array, Array, Array]:
        return cudnn_calls.backward(self.block, lse_BhL, q, k, v, out, dout, window=None)


@dataclasses.dataclass(frozen=True)
class _WholeRowCall:
    """Rows of one segment, with padding only after it."""

    inside_BL: Array
    starts_at_0_B: Array
    window: int | None

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse_BhL = cudnn_calls.forward(None, q, k, v, window=self.window)
        starts_at_0_B111 = self.starts_at_0_B[:, None, None, None]
        nan_B111 = jnp.where(starts_at_0_B111, 0.0, jnp.nan).astype(out.dtype)
        return jnp.where(starts_at_0_B111, out, nan_B111), lse_BhL

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Array, Array, Array]:
        # Queries at padding see the segment before them, and must add nothing to its gradients
        lse_BhL = jnp.where(self.inside_BL[:, None], lse_BhL, cudnn_slots.MASKED_LSE)
        return cudnn_calls.backward(None, lse_BhL, q, k, v, out, dout, window=self.window)


@dataclasses.dataclass(frozen=True)
class _SlotCall:
    """The segments of one range of lengths."""

    call: PackedCall
    slots: CallSlots
    window: int | None
    inside_BL: Array

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        B, L, h, _ = q.shape
        out, statistic_ShT = cudnn_calls.forward(
            self.slots, *map(self._as_slot_rows, (q, k, v)), window=self.window
        )
        lse_Nh = cudnn_slots.compress_lse(statistic_ShT, self.slots)
        return out.reshape(q.shape), lse_Nh.reshape(B, L, h).swapaxes(1, 2)

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Array, Array, Array]:
        lse_Nh = lse_BhL.swapaxes(1, 2).reshape(-1, q.shape[2])
        statistic_ShT = cudnn_slots.expand_lse(
            lse_Nh, self.slots, slot_tokens=self.call.slot_tokens
        )
        arrays = map(self._as_slot_rows, (q, k, v, out, dout))
        dq, dk, dv = cudnn_calls.backward(self.slots, statistic_ShT, *arrays, window=self.window)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)

    def _as_slot_rows(self, x_BLXK: Array) -> Array:
        """The same memory as more and shorter rows, each as long as a slot."""
        return x_BLXK.reshape(self.call.num_rows, self.call.slot_tokens, *x_BLXK.shape[2:])


def _make_row_calls(
    q_BLhK: Array,
    starts_BM: Array,
    lengths_BM: Array,
    tables: SegmentTables | None,
    static: _StaticArgs,
) -> tuple[Sequence[_Call], Bool[Array, "B L"]]:
    """The calls that compute rows of segments, and which tokens belong to a segment."""
    B, L = q_BLhK.shape[:2]
    if tables is None:
        inside_BL = jnp.arange(L, dtype=jnp.int32)[None] < (starts_BM + lengths_BM)
        return [_WholeRowCall(inside_BL, starts_BM[:, 0] == 0, static.window)], inside_BL
    made = cudnn_slots.plan_calls(
        num_rows=B,
        row_tokens=L,
        max_segments=starts_BM.shape[1],
        capacity_factor=static.capacity_factor,
    )
    calls: list[_Call] = []
    for number, call in enumerate(made):
        taken = tables.get_slots(number)
        calls.append(_SlotCall(call, taken, static.window, (taken.slot_N >= 0).reshape(B, L)))
    return calls, (tables.segment_N >= 0).reshape(B, L)


def _forward(
    calls: Sequence[_Call], inside_BL: Array | None, q: Array, k: Array, v: Array, head_chunks: int
) -> tuple[Array, Array]:
    """Output, 0 where not inside, and log-sum-exp of all calls together."""
    heads = _HeadChunks(q.shape[2], k.shape[2], head_chunks)

    def chunk(number: Array | int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        inputs = (
            heads.query_slice(number).read(q),
            heads.kv_slice(number).read(k),
            heads.kv_slice(number).read(v),
        )
        out = lse = None
        for call in calls:
            part, part_lse = call.forward(*inputs)
            out = part if out is None else _select(call.inside_BL, part, out)
            lse = part_lse if lse is None else jnp.where(_lse_mask(call.inside_BL), part_lse, lse)
            if call is not calls[-1]:
                inputs, out, lse = _force_order((inputs, out, lse))
        assert out is not None
        assert lse is not None
        of_lse = dataclasses.replace(heads.query_slice(number), axis=1)
        return heads.query_slice(number).write(
            sums[0], _zero_outside(inside_BL, out)
        ), of_lse.write(sums[1], lse)

    if head_chunks == 1:
        return chunk(0, (q, q))  # whole arrays are not written into, but replaced
    B, L, h, _ = q.shape
    sums = _zeros_after(q.shape, q.dtype, after=q), _zeros_after((B, h, L), jnp.float32, after=q)
    return jax.lax.fori_loop(0, head_chunks, chunk, sums)


def _backward(
    calls: Sequence[_Call],
    inside_BL: Array | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    head_chunks: int,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of all calls together, 0 where not inside.

    Memory: the inputs, and one chunk's part of the inputs and of the gradients. The gradients of a
    chunk need no further memory, because they overwrite its inputs. Only if query heads of several
    chunks share a K/V head, sums of dk and dv are separate float32 arrays.
    """
    heads = _HeadChunks(q.shape[2], k.shape[2], head_chunks)
    B, L, g, K = k.shape
    # One array: XLA adds in place into a part of an array, but not into a whole one
    start: tuple[Array, ...] = (
        (q, _zeros_after((B, L, 2 * g, K), jnp.float32, after=q))
        if heads.is_kv_shared
        else (q, k, v)
    )

    def chunk(number: Array | int, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        of_q, of_kv = heads.query_slice(number), heads.kv_slice(number)
        keys, values = (k, v) if heads.is_kv_shared else sums[1:]
        lse_chunk = dataclasses.replace(of_q, axis=1).read(lse)
        inputs = (
            of_q.read(sums[0]),
            of_kv.read(keys),
            of_kv.read(values),
            of_q.read(out),
            of_q.read(dout),
            lse_chunk,
        )
        for index, call in enumerate(calls):
            is_last = index == len(calls) - 1
            merge = functools.partial(
                _write_gradient,
                call=call,
                is_first=index == 0,
                inside_BL=inside_BL if is_last else None,
            )
            dq, dk, dv = call.backward(*inputs)
            if heads.is_kv_shared:
                of_k, of_v = (
                    dataclasses.replace(of_kv, first=of_kv.first + first, is_whole=False)
                    for first in (0, g)
                )
                dkv = _add_gradient(
                    _add_gradient(sums[1], of_k, dk, call=call), of_v, dv, call=call
                )
                sums = merge(sums[0], of_q, dq), dkv
            else:
                sums = (
                    merge(sums[0], of_q, dq),
                    merge(sums[1], of_kv, dk),
                    merge(sums[2], of_kv, dv),
                )
            if not is_last:
                # lse too: otherwise XLA expands it for all calls in one operation, and the
                # statistics of all calls are live at once
                inputs, sums = _force_order((inputs, sums))
        return sums

    dq, *dkv = (
        chunk(0, start) if head_chunks == 1 else jax.lax.fori_loop(0, head_chunks, chunk, start)
    )
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
        return (
            x
            if self.is_whole
            else jax.lax.dynamic_slice_in_dim(x, self.first, self.size, self.axis)
        )

    def write(self, x: Array, part: Array) -> Array:
        return (
            part
            if self.is_whole
            else jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), self.first, self.axis)
        )


@dataclasses.dataclass(frozen=True)
class _HeadChunks:
    """How heads are divided into chunks: whole K/V heads with their query heads, or query heads that share a K/V head."""

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
        return _HeadSlice(
            chunk * self.num_kv_heads // self.num_chunks, size, size == self.num_kv_heads
        )


def _write_gradient(
    total: Array,
    head_slice: _HeadSlice,
    gradient: Array,
    *,
    call: _Call,
    is_first: bool,
    inside_BL: Array | None,
) -> Array:
    """Writes a call's gradient into `total`, and 0 where not inside."""
    gradient = gradient if is_first else _select(call.inside_BL, gradient, head_slice.read(total))
    return head_slice.write(total, _zero_outside(inside_BL, gradient))


def _add_gradient(total: Array, head_slice: _HeadSlice, gradient: Array, *, call: _Call) -> Array:
    """Adds a call's gradient to `total`."""
    return head_slice.write(
        total, head_slice.read(total) + _zero_outside(call.inside_BL, gradient).astype(total.dtype)
    )


def _select(inside_BL: Array | None, new: Array, old: Array) -> Array:
    return new if inside_BL is None else jnp.where(inside_BL[..., None, None], new, old)


def _zero_outside(inside_BL: Array | None, x: Array) -> Array:
    if inside_BL is None:
        return x
    # A 0 that depends on x: JAX would hoist an array of constants out of the loops around (5 GiB at 5M tokens on 8)
    first = x[0, 0, 0, 0]
    return jnp.where(inside_BL[..., None, None], x, (first < first).astype(x.dtype))


def _zeros_after(shape: tuple[int, ...], dtype: Any, *, after: Array) -> Array:
    """Zeros that exist only after another array does: JAX cannot hoist them out of the layer scan."""
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), dtype), after))
    return jnp.broadcast_to(zero, shape)


def _lse_mask(inside_BL: Array | None) -> Array:
    assert inside_BL is not None, "calls for the segments of rows know their tokens"
    return inside_BL[:, None]


def _force_order(arrays: Any) -> Any:
    """The same arrays, after all of them have been computed. Otherwise XLA may keep the results of several calls at once."""
    return jax.lax.optimization_barrier(arrays)


@dataclasses.dataclass(frozen=True)
class CudnnKernel(Kernel):
    """cuDNN's flash attention in bfloat16, on NVIDIA GPUs."""

    name = "cudnn"
    masks_padding = True
    supports_head_chunks = True
    needs_selfcheck = True
    custom_call_prefix = "__cudnn$fmha"

    @property
    def title(self) -> str:
        return "cuDNN"

    def describe(self) -> str:
        return cudnn_calls.describe_version()

    def make_row_kernel(self, settings: KernelSettings, *, window: int | None) -> RowKernel:
        return functools.partial(
            attention,
            window=window,
            head_chunks=settings.head_chunks,
            capacity_factor=settings.capacity_factor,
        )

    def make_chunk_kernel(self, settings: KernelSettings) -> ChunkKernel:
        with_chunks = functools.partial(functools.partial, head_chunks=settings.head_chunks)
        with_split = functools.partial(with_chunks, capacity_factor=settings.capacity_factor)
        return ChunkKernel(
            forward=with_split(forward),
            backward=with_split(backward),
            off_diagonal_forward=with_chunks(off_diagonal_forward),
            off_diagonal_backward=with_chunks(off_diagonal_backward),
        )

    def make_tables(
        self,
        settings: KernelSettings,
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        *,
        row_tokens: int,
    ) -> SegmentTables | None:
        return make_tables(
            starts_BM,
            lengths_BM,
            row_tokens=row_tokens,
            capacity_factor=settings.capacity_factor,
        )

    def unsupported_reasons(
        self, workload: KernelWorkload, *, devices: Sequence[Device], device_bytes: int | None
    ) -> list[UnsupportedReason]:
        return cudnn_limits.unsupported_reasons(
            cudnn_memory.with_score_workspace(workload, devices),
            devices=devices,
            device_bytes=device_bytes,
        )

    def legal_head_chunks(self, workload: KernelWorkload) -> list[int]:
        return cudnn_memory.legal_head_chunks(workload)

    def configure(
        self,
        workload: KernelWorkload,
        *,
        devices: Sequence[Device],
        device_bytes: int | None,
        head_chunks: int | None,
    ) -> KernelSettings:
        workload = cudnn_memory.with_score_workspace(workload, devices)
        split = cudnn_memory.choose_split(workload, head_chunks=head_chunks)
        if device_bytes is not None:
            shortage = cudnn_memory.describe_shortage(workload, split, device_bytes=device_bytes)
            if shortage is not None:
                raise UserError(shortage)
        return KernelSettings(
            head_chunks=split.head_chunks,
            capacity_factor=split.capacity_factor,
            workspace_bytes=cudnn_memory.workspace_bytes(workload, split),
            lse_bytes=cudnn_memory.lse_bytes(workload, split),
        )

    def read_workspace_bytes(self, program_text: str) -> int | None:
        return cudnn_calls.read_workspace_bytes(program_text)
