"""Limits of cuDNN's attention: workloads and devices, checked before anything is compiled."""

from collections.abc import Iterator, Sequence

from jaxsp.attention.kernels.cudnn import cudnn_calls, cudnn_memory
from jaxsp.attention.kernels.cudnn.cudnn_memory import MAX_ELEMENTS, ROW_MULTIPLE
from jaxsp.attention.kernels.kernel import (
    Device,
    KernelWorkload,
    UnsupportedReason,
    find_local_devices,
    lowest_capability,
)
from jaxsp.core import errors, units

BROKEN_VERSIONS = ((9, 10, 0), (9, 10, 1))
"""cuDNN versions with known bugs in attention, which TransformerEngine avoids too."""

BROKEN_WINDOW_VERSION = (9, 14, 0)
"""cuDNN version with a known bug in sliding windows.

TransformerEngine refuses it for more than 1,024 keys and any mask except plain causal; packed rows
use PADDING_CAUSAL.
Source: nvte_get_fused_attn_backend in NVIDIA/TransformerEngine,
transformer_engine/common/fused_attn/fused_attn.cpp.
"""

_OTHER_KERNEL = "Use attention.kernel=auto or attention.kernel=blockwise."


def unsupported_reasons(
    workload: KernelWorkload, *, devices: Sequence[Device], device_bytes: int | None = None
) -> list[UnsupportedReason]:
    """Reasons that cuDNN cannot run this workload on these devices; empty if it can.

    Args: device_bytes: memory of a device; None: unknown.
    """
    device_kinds = errors.format_choices(sorted({device.device_kind for device in devices}))
    capability = lowest_capability(devices)
    if capability == (0, 0):
        reason = f"needs NVIDIA GPUs, and there is {device_kinds}"
        return [UnsupportedReason(reason, _OTHER_KERNEL)]
    reasons = []
    if capability < (8, 0):
        actual = f"and {device_kinds} has compute capability {capability[0]}.{capability[1]}"
        reason = f"needs an NVIDIA A100 or newer, {actual}"
        reasons.append(UnsupportedReason(reason, _OTHER_KERNEL))
    return [
        *reasons,
        *_check_workload(workload, capability),
        *_check_versions(workload, capability, devices),
        *_check_deterministic(workload, capability, device_bytes),
    ]


def _check_workload(
    workload: KernelWorkload, capability: tuple[int, int]
) -> Iterator[UnsupportedReason]:
    if workload.dtype not in ("bfloat16", "float16"):
        yield UnsupportedReason(
            f"computes in bfloat16, and model.compute_dtype is {workload.dtype}",
            "Use model.compute_dtype=bfloat16 or attention.kernel=blockwise.",
        )
    # JAX allows 256 on Blackwell too. There, TransformerEngine needs cuDNN 9.23, for packed rows
    # 9.25, and cudnn-frontend 1.26, which is compiled into jaxlib: not tried
    max_head_dim = 256 if capability[0] == 9 else 128
    if workload.head_dim % 8 or workload.head_dim > max_head_dim:
        yield UnsupportedReason(
            f"supports heads of a multiple of 8 up to {max_head_dim}, and the model's heads have "
            f"{workload.head_dim}",
            _OTHER_KERNEL,
        )
    if workload.softcap is not None:
        yield UnsupportedReason(
            f"computes no softcap, and the model caps attention scores at {workload.softcap:g}",
            _OTHER_KERNEL,
        )
    multiple = workload.row_multiple(ROW_MULTIPLE)
    num_rows, row_tokens = workload.whole_row_shape
    num_chunks = workload.chunks_per_row
    if workload.row_tokens % ROW_MULTIPLE:
        below = row_tokens // multiple * multiple
        nearest = errors.format_choices(n for n in (below, below + multiple) if n)
        rows = "rows" if num_chunks == 1 else f"rows in {num_chunks} chunks"
        yield UnsupportedReason(
            f"needs {rows} of a multiple of {multiple} tokens, and data.row_tokens is {row_tokens}",
            f"Use data.row_tokens={nearest}, or attention.kernel=blockwise.",
        )
    if not cudnn_memory.legal_head_chunks(workload):
        chunk_limit = MAX_ELEMENTS // workload.head_dim // workload.num_rows
        longest = chunk_limit * num_chunks // multiple * multiple
        tokens = f"{num_rows} x {row_tokens:,} tokens"
        if num_chunks > 1:
            per_device = workload.chunks_per_device
            tokens += f" in {num_chunks} chunks, of which a device has {per_device},"
        yield UnsupportedReason(
            f"counts elements of packed rows up to 2**31, and one head of {tokens} has more",
            f"Use data.row_tokens={longest} or less, data.max_segments_per_row=1, or "
            "attention.kernel=blockwise.",
        )


def _check_versions(
    workload: KernelWorkload, capability: tuple[int, int], devices: Sequence[Device]
) -> Iterator[UnsupportedReason]:
    unsupported_jax = cudnn_calls.describe_unsupported_jax()
    if unsupported_jax is not None:
        yield UnsupportedReason(
            unsupported_jax, "Install one of these, or use attention.kernel=blockwise."
        )
        return
    # A machine that only compiles for absent GPUs may have another cuDNN than theirs
    is_local = bool(find_local_devices(devices))
    installed = cudnn_calls.installed_version() if is_local else None
    if installed is None:
        return
    name = _format_version(installed)
    needed, need = _minimum_version(workload, capability)
    reason = None
    if installed < needed:
        reason = f"{name} is installed, and {need} {_format_version(needed)} or later"
    elif installed in BROKEN_VERSIONS:
        reason = f"{name} is installed, whose attention has known bugs"
    elif installed == BROKEN_WINDOW_VERSION and workload.has_window:
        reason = f"{name} is installed, whose sliding windows have a known bug"
    if reason is not None:
        yield UnsupportedReason(
            reason,
            "Install a newer nvidia-cudnn-cu12 (or -cu13), or use attention.kernel=blockwise.",
        )


def _minimum_version(
    workload: KernelWorkload, capability: tuple[int, int]
) -> tuple[tuple[int, int, int], str]:
    """The lowest version of cuDNN for a workload, and what needs it.

    Source: TE is nvte_get_fused_attn_backend in TransformerEngine's fused_attn.cpp.
    """
    is_hopper = capability[0] == 9
    is_blackwell = capability[0] == 10
    # TE; TransformerEngine PR 2584
    if workload.is_deterministic and is_blackwell:
        return (9, 18, 1), "run.deterministic on this GPU needs"
    # Before, gradients were NaN: an uninitialized workspace (TransformerEngine issue 2186)
    if workload.is_packed and is_hopper:
        return (9, 18, 0), "packed rows on this GPU need"
    # jax._src.cudnn.fused_attention_stablehlo.check_is_flash_attention
    if capability == (10, 3):
        return (9, 11, 0), "this GPU needs"
    # TE
    if capability[0] == 12:
        return (9, 18, 1), "this GPU needs"
    # TE; before, cudnn-frontend refuses packed rows whose query heads share K/V heads, and windows
    # with a padding mask. Segments are copied before Hopper
    if workload.is_packed and (capability >= (9, 0) or workload.has_window):
        return (9, 6, 0), "packed rows need"
    # TE
    if workload.head_dim > 128:
        return (9, 5, 0), f"gradients of heads of {workload.head_dim} need"
    # TE
    if workload.has_window:
        return (9, 2, 0), "sliding windows need"
    # TE: rows of any length
    return (9, 0, 0), "flash attention needs"


def _format_version(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _check_deterministic(
    workload: KernelWorkload, capability: tuple[int, int], device_bytes: int | None
) -> Iterator[UnsupportedReason]:
    if not workload.is_deterministic:
        return
    if capability[0] == 12:
        # Source: as for BROKEN_WINDOW_VERSION
        yield UnsupportedReason(
            "has no deterministic backward pass on GPUs of compute capability 12.x",
            "Use attention.kernel=blockwise or run.deterministic=false.",
        )
        return
    legal = cudnn_memory.legal_head_chunks(workload)
    if not workload.has_score_workspace or device_bytes is None or not legal:
        return
    needed = cudnn_memory.min_call_bytes(workload)
    if needed <= device_bytes:
        return
    num_rows, row_tokens = workload.whole_row_shape
    suggestions = ["attention.kernel=blockwise", "run.deterministic=false"]
    shorter = cudnn_memory.find_shorter_row(workload, device_bytes=device_bytes)
    if shorter is not None:
        suggestions.append(f"data.row_tokens={shorter}")
    yield UnsupportedReason(
        f"needs {needed / units.GIB:.1f} GiB for the deterministic backward pass "
        f"(run.deterministic) of {num_rows} x {row_tokens:,} tokens, with heads in {legal[-1]} "
        f"chunks, and a device has {device_bytes / units.GIB:.1f}",
        f"Use {errors.format_choices(suggestions)}.",
    )
