"""cuDNN's flash attention, forward and backward: packed rows, whole rows and off-diagonal blocks.

The library's calls are wrapped in jaxsp's own custom_vjp (residuals.py), which names the output and
the log-sum-exp, so that a remat policy can keep or offload them. Heads are processed in chunks
(cudnn_chunked.py), and segments of different lengths in separate calls (cudnn_masks.py,
cudnn_bins.py).
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

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
from jaxsp.attention.kernels.residuals import AttentionFunctions, Gradients, Saved
from jaxsp.attention.kernels.segments import OffDiagonalBlock, Segments
from jaxsp.core.errors import UserError


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
        """Outputs and gradients are 0 at padding, where log-sum-exps are undefined. Inputs must be
        finite there: cuDNN reads beyond a segment and multiplies by 0.

        Rows with one slot (M = 1) are computed as a whole. Their segment must begin at the row's
        first token; otherwise the output is NaN.

        Source: for finite padding, NVIDIA/cudnn-frontend issue 624.
        """
        make_calls = functools.partial(
            cudnn_masks.make_row_calls,
            score=score,
            capacity_factor=settings.capacity_factor,
            copies_segments=settings.copies_segments,
        )

        def forward(q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
            calls, inside_BL = make_calls(segments, q.shape[1])
            return cudnn_chunked.forward(calls, inside_BL, q, k, v, settings.head_chunks)

        def backward(saved: Saved, segments: Segments) -> Gradients:
            calls, inside_BL = make_calls(segments, saved.q.shape[1])
            return cudnn_chunked.backward(calls, inside_BL, saved, settings.head_chunks)

        return AttentionFunctions(forward, backward)

    def make_chunk_kernel(self, settings: KernelSettings, score: ScoreConfig) -> ChunkKernel:
        def forward(q: Array, k: Array, v: Array, block: OffDiagonalBlock) -> tuple[Array, Array]:
            calls = [OffDiagonalCall(score=score, block=block)]
            k, v = (_roll_tokens(x, block.first_key_B) for x in (k, v))
            return cudnn_chunked.forward(calls, None, q, k, v, settings.head_chunks)

        def backward(saved: Saved, block: OffDiagonalBlock) -> Gradients:
            calls = [OffDiagonalCall(score=score, block=block)]
            k, v = (_roll_tokens(x, block.first_key_B) for x in (saved.k, saved.v))
            rolled = saved._replace(k=k, v=v)
            dq, dk, dv = cudnn_chunked.backward(calls, None, rolled, settings.head_chunks)
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
