"""Limits of cuDNN's attention, its division into calls, and the device memory that these need.

All of it is checked before anything is compiled.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxsp.attention.kernels import cudnn_bins, cudnn_calls
from jaxsp.attention.kernels.kernel import (
    AttentionWorkload,
    Device,
    UnsupportedReason,
    divisors,
    find_local_devices,
    lowest_capability,
)
from jaxsp.core import errors, units

MIN_VERSION = (9, 18, 1)
"""First cuDNN whose attention is correct on all GPUs.

Earlier ones have NaN gradients of packed rows on Hopper (TransformerEngine issue 2186), wrong
sliding windows (9.14.0), no deterministic gradients on Blackwell (TransformerEngine PR 2584), or do
not compute packed rows.
Source: nvte_get_fused_attn_backend in NVIDIA/TransformerEngine,
transformer_engine/common/fused_attn/fused_attn.cpp.
"""

MAX_ELEMENTS = 2**31 - 1
"""Maximum number of elements of an array in packed calls, whose offsets have 32 bits."""

ROW_MULTIPLE = 128
"""Rows must be a multiple of this many tokens: with a remainder of 64, gradients were NaN (pytorch
issue 196678)."""

TARGET_WORKSPACE_BYTES = 6 * units.GIB
"""Target for cuDNN's workspace, with copied segments. More head chunks make it smaller, but copy
more."""

_OTHER_KERNEL = "Use attention.kernel=auto or attention.kernel=blockwise."


def unsupported_reasons(
    workload: AttentionWorkload, *, devices: Sequence[Device], device_bytes: int | None = None
) -> list[UnsupportedReason]:
    """Reasons that cuDNN cannot run this workload on these devices; empty if it can.

    Args: device_bytes: memory of a device; None: unknown.
    """
    device_kinds = errors.format_choices(sorted({device.device_kind for device in devices}))
    capability = lowest_capability(devices)
    if capability == (0, 0):
        reason = f"needs NVIDIA GPUs, and there is {device_kinds}"
        return [UnsupportedReason(reason, _OTHER_KERNEL)]
    return [
        *_check_devices(devices, device_kinds, capability),
        *_check_workload(workload, capability),
        *_check_deterministic(workload, capability, device_bytes),
    ]


def _check_devices(
    devices: Sequence[Device], device_kinds: str, capability: tuple[int, int]
) -> Iterator[UnsupportedReason]:
    if capability < (8, 0):
        actual = f"and {device_kinds} has compute capability {capability[0]}.{capability[1]}"
        yield UnsupportedReason(f"needs an NVIDIA A100 or newer, {actual}", _OTHER_KERNEL)
    # A machine that only compiles for absent GPUs may have another cuDNN than theirs
    installed = cudnn_calls.installed_version() if find_local_devices(devices) else None
    if installed is not None and installed < MIN_VERSION:
        actual, needed = (".".join(map(str, version)) for version in (installed, MIN_VERSION))
        yield UnsupportedReason(
            f"{actual} is installed, and attention needs {needed} or later",
            "Install a newer nvidia-cudnn-cu12 (or -cu13), or use attention.kernel=blockwise.",
        )


def _check_workload(
    workload: AttentionWorkload, capability: tuple[int, int]
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
    row_tokens = workload.row_tokens
    num_chunks = workload.chunks_per_row
    if workload.kernel_row_tokens % ROW_MULTIPLE:
        below = row_tokens // multiple * multiple
        nearest = errors.format_choices(n for n in (below, below + multiple) if n)
        rows = "rows" if num_chunks == 1 else f"rows in {num_chunks} chunks"
        yield UnsupportedReason(
            f"needs {rows} of a multiple of {multiple} tokens, and data.row_tokens is {row_tokens}",
            f"Use data.row_tokens={nearest}, or attention.kernel=blockwise.",
        )
    if not legal_head_chunks(workload):
        chunk_limit = MAX_ELEMENTS // workload.head_dim // workload.kernel_rows
        longest = chunk_limit * num_chunks // multiple * multiple
        tokens = f"{workload.num_rows} x {row_tokens:,} tokens"
        if num_chunks > 1:
            per_device = workload.chunks_per_device
            tokens += f" in {num_chunks} chunks, of which a device has {per_device},"
        yield UnsupportedReason(
            f"counts elements of packed rows up to 2**31, and one head of {tokens} has more",
            f"Use data.row_tokens={longest} or less, data.max_segments_per_row=1, or "
            "attention.kernel=blockwise.",
        )


def _check_deterministic(
    workload: AttentionWorkload, capability: tuple[int, int], device_bytes: int | None
) -> Iterator[UnsupportedReason]:
    if not workload.is_deterministic:
        return
    suggestion = "Use attention.kernel=blockwise or run.deterministic=false."
    legal = legal_head_chunks(workload)
    if capability[0] == 12:
        # Source: as for MIN_VERSION
        reason = "has no deterministic backward pass on GPUs of compute capability 12.x"
        yield UnsupportedReason(reason, suggestion)
    elif workload.has_score_workspace and device_bytes is not None and legal:
        needed = _min_call_bytes(workload)
        if needed > device_bytes:
            yield UnsupportedReason(
                f"needs {needed / units.GIB:.1f} GiB for the deterministic backward pass "
                f"(run.deterministic) of {workload.num_rows} x {workload.row_tokens:,} tokens, "
                f"with heads in {legal[-1]} chunks, and a device has "
                f"{device_bytes / units.GIB:.1f}",
                suggestion,
            )


def adapt_to_devices(workload: AttentionWorkload, devices: Sequence[Device]) -> AttentionWorkload:
    """Sets the properties of a workload that follow from the devices.

    cuDNN computes packed rows on Hopper and newer GPUs only. On others, segments are copied.

    A deterministic backward pass writes the gradients of all scores to memory, quadratic in the row
    length, on every GPU except Blackwell (compute capability 10.x). On Hopper, cuDNN 9.25 also has
    one with linear memory, but it must be requested by cudnn-frontend (PR 398, July 2026, in 1.27),
    which is compiled into jaxlib. No jaxlib that jaxsp supports has it: XLA upgraded to 1.26 in
    September 2026 (openxla/xla PR 48168), and the binaries of jaxlib 0.10.1, 0.11.2 and 0.12.0.1
    for CUDA 12 never compare cuDNN's version with 9.25.
    Source: use_dp_workspace in NVIDIA/cudnn-frontend, node/scaled_dot_product_flash_attention.h.
    """
    capability = lowest_capability(devices)
    return dataclasses.replace(
        workload,
        has_score_workspace=workload.is_deterministic and capability[0] != 10,
        copies_segments=workload.is_packed and capability < (9, 0),
    )


class CallSplit(NamedTuple):
    """Division of the work into calls: fields of `KernelSettings`."""

    head_chunks: int
    """One of `legal_head_chunks`."""
    capacity_factor: int
    """One of `cudnn_bins.CAPACITY_FACTORS`."""


def legal_head_chunks(workload: AttentionWorkload) -> list[int]:
    """Numbers of equal chunks that the heads can be divided into.

    A chunk has whole K/V heads, or query heads that share one. The queries of a chunk are within
    the limit of packed calls; the list is empty if even the most chunks exceed it.
    """
    heads = workload.num_heads
    kv_heads = workload.num_kv_heads
    even = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if not workload.is_packed:
        return even
    elements = workload.kernel_tokens * workload.head_dim
    return [n for n in even if heads // n * elements <= MAX_ELEMENTS]


def choose_split(workload: AttentionWorkload, *, head_chunks: int | None = None) -> CallSplit:
    """The fewest calls with a workspace of at most TARGET_WORKSPACE_BYTES, or else the smallest
    workspace.

    Args: head_chunks: one of `legal_head_chunks`; None: as few as possible.
    """
    factors = cudnn_bins.CAPACITY_FACTORS if workload.is_packed else cudnn_bins.CAPACITY_FACTORS[:1]
    chunks = legal_head_chunks(workload) if head_chunks is None else [head_chunks]
    splits = [CallSplit(number, factor) for number in chunks for factor in factors]

    def needed_bytes(split: CallSplit) -> int:
        return workspace_bytes(workload, split) + copied_bytes(workload, split)

    few = (split for split in splits if needed_bytes(split) <= TARGET_WORKSPACE_BYTES)
    return next(few, None) or min(splits, key=needed_bytes)


def lse_bytes(workload: AttentionWorkload, split: CallSplit) -> int:
    """Memory of the log-sum-exps of the largest call in cuDNN's form: float32, for every token of
    every bin.

    They are live in the forward pass until they are compressed, and in the backward pass once they
    are expanded, for one call and one head chunk at a time. A compiled program's memory analysis
    counts them.
    """
    heads = workload.num_heads // split.head_chunks
    return 4 * heads * max(_max_bin_tokens(workload, split), workload.kernel_tokens)


def workspace_bytes(workload: AttentionWorkload, split: CallSplit) -> int:
    """Memory of cuDNN's workspace for the largest backward call. XLA's memory analysis lacks it if
    the GPU is absent.

    For every token of every bin: float32 sums of dq and of dout * out, and where query heads share
    K/V heads, dk and dv of each query head. An estimate: the first two are exact. With
    has_score_workspace, the gradients of the scores replace the sums of dq: 2 bytes for every query
    and key of every bin.
    Source: NVIDIA/cudnn-frontend, CompositeSDPABackwardNode in
    node/scaled_dot_product_flash_attention.h.
    """
    heads = workload.num_heads // split.head_chunks
    has_shared_kv = workload.num_kv_heads // split.head_chunks < heads > 1
    bytes_per_key = 2 * 2 * workload.head_dim if has_shared_kv else 0

    def backward_bytes(*, queries: int, keys: int, scores: int) -> int:
        sums = 2 * scores if workload.has_score_workspace else 4 * workload.head_dim * queries
        return heads * (sums + 4 * queries + bytes_per_key * keys)

    calls = [
        backward_bytes(queries=n * tokens, keys=n * tokens, scores=n * tokens**2)
        for n, tokens in _call_bins(workload, split)
    ]
    if workload.chunks_per_row > 1:
        # All chunks of a row at once over their own keys, half of them over half of the earlier
        # keys, or each second one over those of two chunks: see attention/chunk_calls.py
        num_rows = workload.num_rows
        queries = workload.kernel_tokens
        keys = max(queries, num_rows * workload.num_earlier_keys)
        scores = max(keys * workload.kernel_row_tokens, queries // num_rows * keys // 4)
        calls.append(backward_bytes(queries=queries, keys=keys, scores=scores))
    return max(calls)


def copied_bytes(workload: AttentionWorkload, split: CallSplit) -> int:
    """Memory of the copies of all bins in the largest backward call: queries, outputs, keys, values
    and their gradients; 0 if nothing is copied. A compiled program's memory analysis counts it."""
    if not workload.copies_segments:
        return 0
    kv_heads = max(workload.num_kv_heads // split.head_chunks, 1)
    heads = 4 * (workload.num_heads // split.head_chunks + kv_heads)
    return 2 * _max_bin_tokens(workload, split) * heads * workload.head_dim


def _max_bin_tokens(workload: AttentionWorkload, split: CallSplit) -> int:
    """Tokens of all bins of the largest call."""
    return max(num_bins * tokens for num_bins, tokens in _call_bins(workload, split))


def _call_bins(workload: AttentionWorkload, split: CallSplit) -> list[tuple[int, int]]:
    """Number of bins of each call, and tokens of a bin; without packing, the rows of the only
    call."""
    if not workload.is_packed:
        return [(workload.kernel_rows, workload.kernel_row_tokens)]
    calls = cudnn_bins.plan_calls(
        num_rows=workload.kernel_rows,
        row_tokens=workload.kernel_row_tokens,
        max_segments=workload.max_segments,
        capacity_factor=split.capacity_factor,
    )
    return [(call.num_bins, call.bin_tokens) for call in calls]


def _call_bytes(workload: AttentionWorkload, *, head_chunks: int | None = None) -> int:
    """Memory of the largest call in addition to its arguments and results."""
    split = choose_split(workload, head_chunks=head_chunks)
    arrays = lse_bytes(workload, split) + copied_bytes(workload, split)
    return arrays + workspace_bytes(workload, split)


def _min_call_bytes(workload: AttentionWorkload) -> int:
    """The same if the heads are divided into as many chunks as possible."""
    return _call_bytes(workload, head_chunks=legal_head_chunks(workload)[-1])


def describe_shortage(
    workload: AttentionWorkload, split: CallSplit, *, device_bytes: int
) -> str | None:
    """Error message for calls that cannot fit an empty device, with a suggestion; None if they may
    fit. Args: split: of `choose_split`."""
    needed = _call_bytes(workload, head_chunks=split.head_chunks)
    if needed <= device_bytes:
        return None
    row_tokens = workload.row_tokens
    for chunks in legal_head_chunks(workload):
        if _call_bytes(workload, head_chunks=chunks) <= device_bytes:
            field = f"attention.head_chunks = {split.head_chunks}"
            suggestion = f"attention.head_chunks={chunks}"
            break
    else:
        one_segment = _min_call_bytes(dataclasses.replace(workload, max_segments=1))
        multiple = workload.row_multiple(ROW_MULTIPLE)
        longest = row_tokens * device_bytes // one_segment // multiple * multiple
        field = f"data.row_tokens = {row_tokens}"
        suggestion = f"data.row_tokens={longest} with data.max_segments_per_row=1"
        if longest == 0:
            suggestion = "attention.kernel=blockwise"
    gradients = "sums"
    if workload.has_score_workspace:
        gradients = "deterministic gradients (run.deterministic)"
    return (
        f"{field}: cuDNN's statistics and {gradients} of {workload.num_rows} x {row_tokens:,} "
        f"tokens in up to {workload.max_segments} segments, heads in {split.head_chunks} chunks, "
        f"need {needed / units.GIB:.1f} GiB, and a device has {device_bytes / units.GIB:.1f}. "
        f"Use {suggestion}."
    )
