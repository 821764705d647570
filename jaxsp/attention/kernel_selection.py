"""All kernels, and the choice of the kernel of a run and of its settings."""

from collections.abc import Sequence

from jaxsp.attention.kernels.blockwise import BlockwiseKernel
from jaxsp.attention.kernels.cudnn.cudnn_kernel import CudnnKernel
from jaxsp.attention.kernels.kernel import (
    Device,
    Kernel,
    KernelSettings,
    KernelWorkload,
    ScoreConfig,
    UnsupportedReason,
)
from jaxsp.attention.strategies.strategy import Strategy
from jaxsp.core import errors
from jaxsp.core.errors import UserError

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CudnnKernel(), BlockwiseKernel())}
"""Kernels by name. `auto` uses the first that has no unsupported reasons."""


def choose(
    name: str,
    workloads: Sequence[KernelWorkload],
    devices: Sequence[Device],
    device_bytes: int | None,
) -> tuple[Kernel, str]:
    """Chooses the requested kernel, or the first that supports all workloads.

    Returns: the kernel, and the reason that an earlier kernel cannot run; empty if there is none.
    Raises: UserError if the requested kernel does not support a workload.
    """

    def find_reasons(kernel: Kernel) -> list[UnsupportedReason]:
        reasons = (
            kernel.unsupported_reasons(workload, devices=devices, device_bytes=device_bytes)
            for workload in workloads
        )
        return next(filter(None, reasons), [])

    requested = KERNELS.get(name)
    if requested is not None:
        reasons = find_reasons(requested)
        if reasons:
            raise UserError(
                f"attention.kernel = {name}: {requested.title} {reason.reason}. {reason.suggestion}"
                for reason in reasons
            )
        return requested, ""
    fallback_reason = ""
    needs_chunks = workloads[0].chunks_per_row > 1
    for kernel in KERNELS.values():
        if needs_chunks and not _has_chunk_kernel(kernel):
            continue
        reasons = find_reasons(kernel)
        if not reasons:
            return kernel, fallback_reason
        fallback_reason = fallback_reason or f"{kernel.title} {reasons[0].reason}"
    raise AssertionError("one kernel supports everything")


def configure(
    kernel: Kernel,
    workloads: Sequence[KernelWorkload],
    requested_chunks: int | None,
    fallback_reason: str,
    devices: Sequence[Device],
    device_bytes: int | None,
) -> KernelSettings:
    """Chooses settings that all kinds of layers share, with the largest memory that a kind needs.

    Raises: UserError for head chunks that a kind of layer does not support.
    """

    def configure_each(head_chunks: int | None) -> list[KernelSettings]:
        return [
            _configure(kernel, workload, head_chunks, fallback_reason, devices, device_bytes)
            for workload in workloads
        ]

    settings = configure_each(requested_chunks)
    most_chunks = max(x.head_chunks for x in settings)
    if any(x.head_chunks != most_chunks for x in settings):
        legal = set.intersection(*(set(kernel.legal_head_chunks(x)) for x in workloads))
        enough = [n for n in sorted(legal) if n >= most_chunks]
        if not enough:
            kv_heads = max(x.num_kv_heads for x in workloads)
            raise UserError(
                f"attention.head_chunks = null: some layers need {most_chunks} head chunks, and "
                "the heads of layers with windows cannot be divided into that number. Use "
                f"attention.kv_heads_per_gather={kv_heads}."
            )
        settings = configure_each(enough[0])
    return KernelSettings(
        head_chunks=settings[0].head_chunks,
        capacity_factor=min(x.capacity_factor for x in settings),
        copies_segments=settings[0].copies_segments,
        workspace_bytes=max(x.workspace_bytes for x in settings),
        lse_bytes=max(x.lse_bytes for x in settings),
    )


def _configure(
    kernel: Kernel,
    workload: KernelWorkload,
    chunks: int | None,
    fallback_reason: str,
    devices: Sequence[Device],
    device_bytes: int | None,
) -> KernelSettings:
    if chunks is not None and not kernel.supports_head_chunks:
        supporting = [k.name for k in KERNELS.values() if k.supports_head_chunks]
        because = f", because {fallback_reason}" if fallback_reason else ""
        raise UserError(
            f"attention.head_chunks = {chunks}: works only with the "
            f"{errors.format_choices(supporting)} kernel, and this is {kernel.name}{because}. "
            "Use attention.head_chunks=null."
        )
    legal = kernel.legal_head_chunks(workload)
    if chunks is not None and chunks not in legal:
        raise UserError(
            f"attention.head_chunks = {chunks}: must divide the {workload.num_heads} query and "
            f"{workload.num_kv_heads} K/V heads of a device into equal chunks that the kernel "
            f"supports for {workload.num_tokens:,} tokens. Use {errors.format_choices(legal)}, or "
            "null."
        )
    return kernel.configure(
        workload, devices=devices, device_bytes=device_bytes, head_chunks=chunks
    )


def raise_if_whole_rows_only(kernel: Kernel, strategy: Strategy) -> None:
    """Raises: UserError if the strategy needs chunks of rows and the kernel computes none."""
    if strategy.layout.keeps_order or _has_chunk_kernel(kernel):
        return
    names = errors.format_choices(k.name for k in KERNELS.values() if _has_chunk_kernel(k))
    raise UserError(
        f"attention.kernel = {kernel.name}: computes whole rows only, and {strategy.description} "
        f"needs chunks of them. Use attention.kernel={names}, or attention.strategy=ulysses."
    )


def _has_chunk_kernel(kernel: Kernel) -> bool:
    return kernel.make_chunk_kernel(KernelSettings(), ScoreConfig()) is not None
