"""cuDNN's flash attention, forward and backward: packed rows, whole rows and off-diagonal blocks.

The library's calls are wrapped in jaxsp's own custom_vjp (residuals.py), which names the output and
the log-sum-exp, so that a remat policy can keep or offload them. Heads are processed in chunks
(cudnn_chunked.py), and segments of different lengths in separate calls (cudnn_masks.py,
cudnn_bins.py).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.attention.kernels.cudnn import (
    cudnn_bins,
    cudnn_calls,
    cudnn_chunked,
    cudnn_limits,
    cudnn_masks,
    cudnn_memory,
)
from jaxsp.attention.kernels.cudnn.cudnn_bins import SegmentTables
from jaxsp.attention.kernels.cudnn.cudnn_masks import OffDiagonalCall
from jaxsp.attention.kernels.kernel import (
    ChunkKernel,
    Device,
    Kernel,
    KernelSettings,
    KernelWorkload,
    ScoreConfig,
    UnsupportedReason,
)
from jaxsp.attention.kernels.residuals import AttentionFunctions
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.core.errors import UserError


def forward(
    q: Float[Array, "B L h K"],
    k: Float[Array, "B L g K"],
    v: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    tables: SegmentTables | None = None,
    *,
    score: ScoreConfig,
    head_chunks: int = 1,
    capacity_factor: int = cudnn_bins.CAPACITY_FACTOR,
    copies_segments: bool = False,
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Causal softmax attention inside each segment: output, 0 at padding, and log-sum-exp,
    undefined at padding.

    Padding in the inputs must be finite: cuDNN reads beyond a segment and multiplies by 0.

    Rows with one slot (M = 1) are computed as a whole. Their segment must begin at the row's first
    token; otherwise the output is NaN.

    Args:
        tables: result of `cudnn_bins.make_tables` for these segments; None: computed here.
        score: without a softcap.
        head_chunks: number of chunks of the heads, computed one after another; one of
            `cudnn_memory.legal_head_chunks`.
        capacity_factor: one of `cudnn_bins.CAPACITY_FACTORS`.
        copies_segments: see `KernelSettings`.
    Raises: nothing. The caller must check `cudnn_limits.unsupported_reasons`.
    Source: for finite padding, NVIDIA/cudnn-frontend issue 624.
    """
    calls, inside_BL = cudnn_masks.make_row_calls(
        starts_BM,
        lengths_BM,
        tables,
        q.shape[1],
        capacity_factor=capacity_factor,
        score=score,
        copies_segments=copies_segments,
    )
    return cudnn_chunked.forward(calls, inside_BL, q, k, v, head_chunks)


def backward(
    q: Float[Array, "B L h K"],
    k: Float[Array, "B L g K"],
    v: Float[Array, "B L g K"],
    out: Float[Array, "B L h K"],
    lse: Float32[Array, "B h L"],
    dout: Float[Array, "B L h K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    tables: SegmentTables | None = None,
    *,
    score: ScoreConfig,
    head_chunks: int = 1,
    capacity_factor: int = cudnn_bins.CAPACITY_FACTOR,
    copies_segments: bool = False,
) -> tuple[Float[Array, "B L h K"], Float[Array, "B L g K"], Float[Array, "B L g K"]]:
    """dq, dk and dv, 0 at padding. `out` and `lse` may include keys that are not in `k`.

    Args: as for `forward`.
    """
    calls, inside_BL = cudnn_masks.make_row_calls(
        starts_BM,
        lengths_BM,
        tables,
        q.shape[1],
        capacity_factor=capacity_factor,
        score=score,
        copies_segments=copies_segments,
    )
    return cudnn_chunked.backward(calls, inside_BL, q, k, v, out, lse, dout, head_chunks)


def off_diagonal_forward(
    q: Float[Array, "R C h K"],
    k: Float[Array, "R D g K"],
    v: Float[Array, "R D g K"],
    block: OffDiagonalBlock,
    *,
    score: ScoreConfig,
    head_chunks: int = 1,
) -> tuple[Float[Array, "R C h K"], Float32[Array, "R h C"]]:
    """Output and log-sum-exp of the block's queries over its keys, without a mask.

    Both are undefined for other queries.
    """
    k = _roll_tokens(k, block.first_key_B)
    v = _roll_tokens(v, block.first_key_B)
    return cudnn_chunked.forward([OffDiagonalCall(block, score)], None, q, k, v, head_chunks)


def off_diagonal_backward(
    q: Float[Array, "R C h K"],
    k: Float[Array, "R D g K"],
    v: Float[Array, "R D g K"],
    out: Float[Array, "R C h K"],
    lse: Float32[Array, "R h C"],
    dout: Float[Array, "R C h K"],
    block: OffDiagonalBlock,
    *,
    score: ScoreConfig,
    head_chunks: int = 1,
) -> tuple[Float[Array, "R C h K"], Float[Array, "R D g K"], Float[Array, "R D g K"]]:
    """dq, dk and dv of the block's queries and keys, undefined elsewhere.

    `out` and `lse` may include keys that are not in the block.
    """
    k = _roll_tokens(k, block.first_key_B)
    v = _roll_tokens(v, block.first_key_B)
    dq, dk, dv = cudnn_chunked.backward(
        [OffDiagonalCall(block, score)], None, q, k, v, out, lse, dout, head_chunks
    )
    dk = _roll_tokens(dk, -block.first_key_B)
    dv = _roll_tokens(dv, -block.first_key_B)
    return dq, dk, dv


def _roll_tokens(x_RDgK: Array, shift_R: Array) -> Array:
    """Moves each row's token number `shift` to the front.

    In a call with lengths, cuDNN attends to the first n keys of each row. So the block's keys are
    moved there. Their order does not matter, because every query attends to all of them.
    """
    return jax.vmap(lambda x, shift: jnp.roll(x, -shift, axis=0))(x_RDgK, shift_R)


@dataclasses.dataclass(frozen=True)
class CudnnKernel(Kernel):
    """cuDNN's flash attention in bfloat16, on NVIDIA GPUs."""

    name = "cudnn"
    masks_padding = True
    supports_head_chunks = True
    needs_selfcheck = True
    custom_call_prefix = cudnn_calls.CUSTOM_CALL_PREFIX

    @property
    def title(self) -> str:
        return "cuDNN"

    def describe(self) -> str:
        return cudnn_calls.describe_version()

    def make_row_functions(
        self, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        options: dict[str, Any] = {
            "score": score,
            "head_chunks": settings.head_chunks,
            "capacity_factor": settings.capacity_factor,
            "copies_segments": settings.copies_segments,
        }
        return AttentionFunctions(
            functools.partial(forward, **options), functools.partial(backward, **options)
        )

    def make_chunk_kernel(self, settings: KernelSettings, score: ScoreConfig) -> ChunkKernel:
        chunks: dict[str, Any] = {"score": score, "head_chunks": settings.head_chunks}
        packed = self.make_row_functions(settings, score)
        return ChunkKernel(
            forward=packed.forward,
            backward=packed.backward,
            off_diagonal_forward=functools.partial(off_diagonal_forward, **chunks),
            off_diagonal_backward=functools.partial(off_diagonal_backward, **chunks),
        )

    def make_tables(
        self,
        settings: KernelSettings,
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        *,
        row_tokens: int,
    ) -> SegmentTables | None:
        return cudnn_bins.make_tables(
            starts_BM,
            lengths_BM,
            row_tokens=row_tokens,
            capacity_factor=settings.capacity_factor,
        )

    def unsupported_reasons(
        self, workload: KernelWorkload, *, devices: Sequence[Device], device_bytes: int | None
    ) -> list[UnsupportedReason]:
        return cudnn_limits.unsupported_reasons(
            cudnn_memory.adapt_to_devices(workload, devices),
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
        workload = cudnn_memory.adapt_to_devices(workload, devices)
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
            copies_segments=workload.copies_segments,
        )

    def read_workspace_bytes(self, program_text: str) -> int | None:
        return cudnn_calls.read_workspace_bytes(program_text)
