"""Estimates the time of a compiled step from published peak rates of its devices. Nothing is
measured.

A kernel takes the longer of two times: its matrix products at the rate of large products, and its
reads and writes at the rate of the memory. Attention takes its arithmetic at the rate of flash
attention. Kernels of gated delta nets are listed apart, without their projections. Collectives and
host copies overlap as XLA has scheduled them (`timeline`). Left out: kernel launches, waiting for
data, the slowdown of kernels that overlap collectives, and unequal attention of devices, which
training logs as `attention_imbalance`.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from jaxsp.blocks import delta_net
from jaxsp.model import flops
from jaxsp.planner.compile import hlo
from jaxsp.planner.compile.compiled import PlannedStep
from jaxsp.planner.compile.gpus import Ceilings
from jaxsp.planner.compile.hlo import HloModule
from jaxsp.planner.cost import hlo_cost, timeline
from jaxsp.planner.cost.comms import Collective
from jaxsp.planner.cost.hlo_cost import KernelCost
from jaxsp.planner.cost.timeline import ScheduledTransfer, Timeline

MATMULS = "matrix products"
MEMORY_BANDWIDTH = "memory bandwidth"
ATTENTION = "attention"
DELTA_NETS = "delta nets"
EXPOSED_COLLECTIVES = "waiting for collectives"
EXPOSED_HOST_COPIES = "waiting for copies from and to the host"
CAUSES = (
    *(MATMULS, MEMORY_BANDWIDTH, ATTENTION, DELTA_NETS),
    *(EXPOSED_COLLECTIVES, EXPOSED_HOST_COPIES),
)
"""Causes of a step's time; their seconds add up to it."""

HIDDEN_COLLECTIVES = "collectives that overlap kernels"
HIDDEN_HOST_COPIES = "host copies that overlap kernels"

LIKELY_RANGE = (1.0, 1.3)
"""Likely range of a measured step's time over its estimate.

Published runs of other systems with cuDNN's attention took 0.98 to 1.13 times the estimate. One on
H100s limited to 500 W, with another kernel, took 1.45 times (scripts/bench/LOG.md).
"""

_IN_DELTA_NET = re.compile(rf"\b{delta_net.SCOPE}\)*/")
"""Part of the names of a delta net's operations, also of those that JAX derives from them."""

_TERA = 1e12
_GIGA = 1e9
_MICRO = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Work and time of a step on each device."""

    hardware_flops: float
    """Operations of the compiled program, with recomputation; attention's backward pass as in
    flash attention."""
    host_copy_bytes: tuple[float, float]
    """Bytes from and to host memory."""
    seconds: Mapping[str, float]
    """Time by cause. CAUSES add up to step_s; HIDDEN_COLLECTIVES and HIDDEN_HOST_COPIES are not
    part of it."""
    step_s: float
    transfer_seconds: Mapping[int, tuple[float, float]]
    """Seconds of all runs of each collective and host copy, and those that no kernel overlaps, by
    the line number where it begins."""


def make_segment_lengths(*, rows: int, row_tokens: int, document_tokens: int) -> np.ndarray:
    """Segment lengths of rows that are full of equal documents; the last one of a row is cut."""
    lengths = np.full(-(-row_tokens // document_tokens), document_tokens)
    lengths[-1] = row_tokens - lengths[:-1].sum()
    return np.tile(lengths, rows)


def estimate_step(
    step: PlannedStep,
    collectives: list[Collective],
    *,
    ceilings: Ceilings,
    node_devices: int,
    segment_lengths: np.ndarray,
) -> TimeEstimate | None:
    """Estimates a step over segments of these lengths, on nodes of `node_devices` devices.

    None if the dtype is not bfloat16 or XLA compiles the kernel: the published rates are for cuDNN.
    """
    spec = step.spec
    prefix = step.spec.attention.kernel.custom_call_prefix
    if not prefix or spec.dtype != jnp.bfloat16:
        return None
    module = hlo.parse_module(step.dump.hlo_text)
    kernels = hlo_cost.read_kernel_costs(step.dump.hlo_text)
    sends = {
        collective.begin_line: _schedule_collective(collective, ceilings, node_devices)
        for collective in collectives
    }
    copies = {
        kernel.begin_line: _schedule_host_copy(kernel, ceilings)
        for kernel in kernels
        if kernel.bytes_from_host or kernel.bytes_to_host
    }
    on_device = [kernel for kernel in kernels if kernel.begin_line not in copies]
    kernel_s = {
        kernel.line_number: max(
            kernel.flops / (kernel.efficiency * ceilings.matmul_tflops * _TERA),
            kernel.device_bytes / (ceilings.memory_gb_s * _GIGA),
        )
        for kernel in on_device
    }
    forward_flops = flops.attention_flops(spec.model, segment_lengths)
    forward = forward_flops / spec.mesh.size
    # five products instead of two: the scores again, and both gradients of both products
    backward = 2.5 * forward
    if not spec.remat_policy.is_attention_saved:
        forward *= 2 + spec.remat_policy.num_extra_passes(spec.model.num_layers)
    if spec.scores_pairs_first:
        forward += forward_flops / spec.mesh.size
    operations = forward, backward
    attention_s = _estimate_attention_s(module, prefix, operations, ceilings)
    simulated = timeline.simulate(module, kernel_s | attention_s, sends | copies)
    transfer_seconds = {
        line: (transfer.seconds * simulated.num_runs[line], simulated.exposed_s[line])
        for line, transfer in (sends | copies).items()
    }
    lines: dict[str, list[int]] = {MATMULS: [], MEMORY_BANDWIDTH: [], DELTA_NETS: []}
    for kernel in on_device:
        cause = MATMULS if kernel.flops else MEMORY_BANDWIDTH
        if _IN_DELTA_NET.search(kernel.op_name):
            cause = DELTA_NETS
        lines[cause].append(kernel.line_number)
    collectives_s, exposed_collectives_s = sum_transfers(transfer_seconds, sends)
    copies_s, exposed_copies_s = sum_transfers(transfer_seconds, copies)
    return TimeEstimate(
        hardware_flops=_sum_runs(kernels, "flops") + sum(operations),
        host_copy_bytes=(
            _sum_runs(kernels, "bytes_from_host"),
            _sum_runs(kernels, "bytes_to_host"),
        ),
        seconds={
            **{cause: _sum_kernels(simulated, of_cause) for cause, of_cause in lines.items()},
            ATTENTION: _sum_kernels(simulated, attention_s),
            EXPOSED_COLLECTIVES: exposed_collectives_s,
            EXPOSED_HOST_COPIES: exposed_copies_s,
            HIDDEN_COLLECTIVES: collectives_s - exposed_collectives_s,
            HIDDEN_HOST_COPIES: copies_s - exposed_copies_s,
        },
        step_s=simulated.seconds,
        transfer_seconds=transfer_seconds,
    )


def find_bottleneck(seconds: Mapping[str, float]) -> str:
    """Finds the cause that takes most of a step's time."""
    return max(CAUSES, key=lambda cause: seconds.get(cause, 0.0))


def sum_transfers(
    seconds: Mapping[int, tuple[float, float]], lines: Iterable[int]
) -> tuple[float, float]:
    """Sums the seconds of the transfers that begin in these lines, and those not overlapped."""
    totals = [seconds[line] for line in lines]
    return sum((total for total, _ in totals), start=0.0), sum(
        (exposed for _, exposed in totals), start=0.0
    )


def _sum_kernels(simulated: Timeline, lines: Iterable[int]) -> float:
    """Sums the seconds of all runs of the kernels in these lines."""
    return sum((simulated.kernel_seconds[line] for line in lines), start=0.0)


def _sum_runs(kernels: list[KernelCost], field: str) -> float:
    return sum((kernel.num_runs * getattr(kernel, field) for kernel in kernels), start=0.0)


def _estimate_attention_s(
    module: HloModule,
    call_prefix: str,
    forward_and_backward: tuple[float, float],
    ceilings: Ceilings,
) -> dict[int, float]:
    """Seconds of one run of each cuDNN call, by line number, assuming equal times for all calls of
    a direction.

    Args: forward_and_backward: operations of all calls.
    """
    runs = hlo.count_runs(
        module,
        lambda line: line.opcode == "custom-call" and call_prefix in line.attributes,
        include_branches=True,
    )
    seconds: dict[int, float] = {}
    rates = (ceilings.attention_forward_tflops, ceilings.attention_backward_tflops)
    for is_backward, operations, rate in zip(
        (False, True), forward_and_backward, rates, strict=True
    ):
        calls = {
            line.line_number: num_runs
            for line, num_runs in runs
            if ("Backward" in line.attributes) == is_backward
        }
        seconds |= {line: operations / (rate * _TERA) / sum(calls.values()) for line in calls}
    return seconds


def _schedule_collective(
    collective: Collective, ceilings: Ceilings, node_devices: int
) -> ScheduledTransfer:
    """Schedules a collective on the stream of those that share its links: all inside a node, or
    all between nodes."""
    seconds = estimate_collective_s(collective, ceilings=ceilings, node_devices=node_devices)
    return ScheduledTransfer(
        stream="network" if collective.find_load(node_devices).network else "links",
        seconds=seconds / collective.num_runs,
        begin_line=collective.begin_line,
        end_line=collective.end_line,
    )


def _schedule_host_copy(kernel: KernelCost, ceilings: Ceilings) -> ScheduledTransfer:
    """Schedules a copy on the stream of its direction."""
    num_bytes = max(kernel.bytes_from_host, kernel.bytes_to_host)
    return ScheduledTransfer(
        stream="to host" if kernel.bytes_to_host == num_bytes else "from host",
        seconds=num_bytes / (ceilings.host_gb_s * _GIGA),
        begin_line=kernel.begin_line,
        end_line=kernel.end_line,
    )


def estimate_collective_s(
    collective: Collective, *, ceilings: Ceilings, node_devices: int
) -> float:
    """Estimates the seconds of all runs of a collective.

    It takes as long as its busiest device inside a node (NVLink) or its busiest network card, and
    the latency of its hops: see `attention/strategies/nodes.py`.
    """
    load = collective.find_load(node_devices)
    bandwidth_s = collective.total_bytes * max(
        load.link / (ceilings.link_gb_s * _GIGA), load.network / (ceilings.network_gb_s * _GIGA)
    )
    if not bandwidth_s:
        return 0.0
    hops_us = load.link_hops * ceilings.link_hop_us + load.network_hops * ceilings.network_hop_us
    return bandwidth_s + collective.num_runs * hops_us * _MICRO
