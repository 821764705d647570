"""Division of cuDNN's attention into calls, and the device memory that the calls need."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxsp.attention.kernels.cudnn import cudnn_bins
from jaxsp.attention.kernels.kernel import Device, KernelWorkload, divisors, lowest_capability
from jaxsp.core import units

MAX_ELEMENTS = 2**31 - 1
"""Maximum number of elements of an array in packed calls, whose offsets have 32 bits."""

ROW_MULTIPLE = 128
"""Rows must be a multiple of this many tokens: with a remainder of 64, gradients were NaN (pytorch
issue 196678)."""

TARGET_WORKSPACE_BYTES = 6 * units.GIB
"""Target for cuDNN's workspace, with copied segments. More head chunks make it smaller, but copy
more."""


class CallSplit(NamedTuple):
    """Division of the work into calls."""

    head_chunks: int
    """One of `legal_head_chunks`."""
    capacity_factor: int
    """One of `cudnn_bins.CAPACITY_FACTORS`."""


def legal_head_chunks(workload: KernelWorkload) -> list[int]:
    """Numbers of equal chunks that the heads can be divided into.

    A chunk has whole K/V heads, or query heads that share one. The queries of a chunk are within
    the limit of packed calls; the list is empty if even the most chunks exceed it.
    """
    heads = workload.num_heads
    kv_heads = workload.num_kv_heads
    even = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if not workload.is_packed:
        return even
    return [n for n in even if workload.num_q_elements(n) <= MAX_ELEMENTS]


def choose_split(workload: KernelWorkload, *, head_chunks: int | None = None) -> CallSplit:
    """The fewest calls with a workspace of at most TARGET_WORKSPACE_BYTES, or else the smallest
    workspace.

    Args: head_chunks: one of `legal_head_chunks`; None: as few as possible.
    """
    factors = cudnn_bins.CAPACITY_FACTORS if workload.is_packed else cudnn_bins.CAPACITY_FACTORS[:1]
    splits = [
        CallSplit(chunks, factor)
        for chunks in legal_head_chunks(workload)
        for factor in factors
        if head_chunks in (None, chunks)
    ]

    def needed_bytes(split: CallSplit) -> int:
        return workspace_bytes(workload, split) + copied_bytes(workload, split)

    for split in splits:
        if needed_bytes(split) <= TARGET_WORKSPACE_BYTES:
            return split
    return min(splits, key=needed_bytes)


def lse_bytes(workload: KernelWorkload, split: CallSplit) -> int:
    """Memory of the log-sum-exps of the largest call in cuDNN's form: float32, for every token of
    every bin.

    They are live in the forward pass until they are compressed, and in the backward pass once they
    are expanded, for one call and one head chunk at a time. A compiled program's memory analysis
    counts them.
    """
    heads = workload.num_heads // split.head_chunks
    bin_tokens = [num_bins * tokens for num_bins, tokens in _call_bins(workload, split)]
    return 4 * heads * max(*bin_tokens, workload.num_tokens)


def workspace_bytes(workload: KernelWorkload, split: CallSplit) -> int:
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
        # keys, or each second one over those of two chunks: see attention/chunks/chunk_calls.py
        num_rows, _ = workload.whole_row_shape
        queries = workload.num_tokens
        keys = max(queries, num_rows * workload.num_earlier_keys)
        scores = max(keys * workload.row_tokens, queries // num_rows * keys // 4)
        calls.append(backward_bytes(queries=queries, keys=keys, scores=scores))
    return max(calls)


def _call_bins(workload: KernelWorkload, split: CallSplit) -> list[tuple[int, int]]:
    """Number of bins of each call, and tokens of a bin; without packing, the rows of the only
    call."""
    if not workload.is_packed:
        return [(workload.num_rows, workload.row_tokens)]
    calls = cudnn_bins.plan_calls(
        num_rows=workload.num_rows,
        row_tokens=workload.row_tokens,
        max_segments=workload.max_segments,
        capacity_factor=split.capacity_factor,
    )
    return [(call.num_bins, call.bin_tokens) for call in calls]


def adapt_to_devices(workload: KernelWorkload, devices: Sequence[Device]) -> KernelWorkload:
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


def copied_bytes(workload: KernelWorkload, split: CallSplit) -> int:
    """Memory of the copies of all bins in the largest backward call; 0 if nothing is copied.

    Queries, outputs, keys, values and their gradients.

    A compiled program's memory analysis counts it.
    """
    if not workload.copies_segments:
        return 0
    tokens = max(num_bins * tokens for num_bins, tokens in _call_bins(workload, split))
    kv_heads = max(workload.num_kv_heads // split.head_chunks, 1)
    heads = 4 * (workload.num_heads // split.head_chunks + kv_heads)
    return 2 * tokens * heads * workload.head_dim


def call_bytes(workload: KernelWorkload, split: CallSplit) -> int:
    """Memory of the largest call in addition to its arguments and results."""
    arrays = lse_bytes(workload, split) + copied_bytes(workload, split)
    return arrays + workspace_bytes(workload, split)


def min_call_bytes(workload: KernelWorkload) -> int:
    """`call_bytes` if the heads are divided into as many chunks as possible."""
    most_chunks = legal_head_chunks(workload)[-1]
    return call_bytes(workload, choose_split(workload, head_chunks=most_chunks))


def describe_shortage(
    workload: KernelWorkload, split: CallSplit, *, device_bytes: int
) -> str | None:
    """Error message for calls that cannot fit an empty device, with a suggestion; None if they may
    fit."""
    if call_bytes(workload, split) <= device_bytes:
        return None
    num_rows, row_tokens = workload.whole_row_shape
    gradients = "sums"
    if workload.has_score_workspace:
        gradients = "deterministic gradients (run.deterministic)"
    problem = (
        f"cuDNN's statistics and {gradients} of {num_rows} x {row_tokens:,} tokens "
        f"in up to {workload.max_segments} segments, heads in {split.head_chunks} chunks, need "
        f"{call_bytes(workload, split) / units.GIB:.1f} GiB, and a device has "
        f"{device_bytes / units.GIB:.1f}."
    )
    for chunks in legal_head_chunks(workload):
        if call_bytes(workload, choose_split(workload, head_chunks=chunks)) <= device_bytes:
            return (
                f"attention.head_chunks = {split.head_chunks}: {problem} "
                f"Use attention.head_chunks={chunks}."
            )
    for max_segments in range(workload.max_segments - 1, 0, -1):
        fewer = dataclasses.replace(workload, max_segments=max_segments)
        if min_call_bytes(fewer) <= device_bytes:
            return (
                f"data.max_segments_per_row = {workload.max_segments}: {problem} "
                f"Use data.max_segments_per_row={max_segments}."
            )
    one_segment = min_call_bytes(dataclasses.replace(workload, max_segments=1))
    multiple = workload.row_multiple(ROW_MULTIPLE)
    longest = row_tokens * device_bytes // one_segment // multiple * multiple
    suggestion = f"Use data.row_tokens={longest} with data.max_segments_per_row=1."
    if longest == 0:
        suggestion = "Use attention.kernel=blockwise."
    return f"data.row_tokens = {row_tokens}: {problem} {suggestion}"


def find_shorter_row(workload: KernelWorkload, *, device_bytes: int) -> int | None:
    """Halves the row length until the largest call fits a device; None if no length does."""
    _, row_tokens = workload.whole_row_shape
    while row_tokens % (2 * workload.row_multiple(ROW_MULTIPLE)) == 0:
        row_tokens //= 2
        workload = dataclasses.replace(
            workload,
            row_tokens=workload.row_tokens // 2,
            num_earlier_keys=workload.num_earlier_keys // 2,
            whole_row_tokens=row_tokens,
        )
        if min_call_bytes(workload) <= device_bytes:
            return row_tokens
    return None
