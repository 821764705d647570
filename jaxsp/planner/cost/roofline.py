"""Estimates the time of a compiled step from published peak rates of its devices. Nothing is
measured.

A kernel takes the longer of two times: its matrix products at the rate of large products, and its
reads and writes at the rate of the memory. Attention takes its arithmetic at the rate of flash
attention. Collectives and host copies overlap as XLA has scheduled them (`timeline`). Left out:
kernel launches, imbalance between groups, waiting for data, and the slowdown of kernels that
overlap collectives.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxsp.model import flops
from jaxsp.planner.compile import hlo
from jaxsp.planner.compile.compiled import PlannedStep
from jaxsp.planner.compile.gpus import Ceilings
from jaxsp.planner.compile.hlo import HloModule
from jaxsp.planner.cost import comms, hlo_cost, timeline
from jaxsp.planner.cost.comms import Collective
from jaxsp.planner.cost.hlo_cost import KernelCost
from jaxsp.planner.cost.timeline import ExposedTime, ScheduledTransfer, Timeline

MATMULS, MEMORY_BANDWIDTH, ATTENTION, EXPOSED_COLLECTIVES, EXPOSED_HOST_COPIES = (
    "matrix products",
    "memory bandwidth",
    "attention",
    "waiting for collectives",
    "waiting for copies from and to the host",
)
"""Causes of a step's time; their seconds add up to it."""

HIDDEN_COLLECTIVES, HIDDEN_HOST_COPIES = (
    "collectives that overlap kernels",
    "host copies that overlap kernels",
)

LIKELY_RANGE = (1.0, 1.3)
"""Likely range of a measured step's time over its estimate.

Published runs of other systems with cuDNN's attention took 0.98 to 1.13 times the estimate. One on
H100s limited to 500 W, with another kernel, took 1.45 times (scripts/bench/anchors.py).
"""

FROM_HOST, TO_HOST = "from host", "to host"
"""Kinds of transfers beside those of `comms.KINDS`."""

COLLECTIVE_STREAM = "collectives"
"""The stream of all collectives: they share the links."""

_TERA, _GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferEstimate:
    """A collective or a host copy of the program, with its time in a step."""

    operation: str
    """One of comms.KINDS, FROM_HOST or TO_HOST."""
    op_name: str
    """Name that JAX gave the operation."""
    total_bytes: float
    """Sum over all its runs."""
    seconds: float
    """Duration, sum over all its runs."""
    exposed_s: float
    """Part of `seconds` that no kernel overlaps."""
    num_runs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Work and time of a step on each device."""

    hardware_flops: float
    """Arithmetic of the compiled program, with recomputation, and attention's backward pass as flash attention does it."""
    host_copy_bytes: tuple[float, float]
    """Bytes from and to host memory."""
    seconds: Mapping[str, float]
    """Time by cause: PRODUCTS to HOST_WAITED add up to step_s; OVERLAPPED and HOST_OVERLAPPED are
    not part of it."""
    step_s: float
    transfers: Sequence[TransferEstimate]
    """In the order of the program's text."""


def make_segment_lengths(*, rows: int, row_tokens: int, document_tokens: int) -> np.ndarray:
    """Lengths of the pieces of rows that documents of so many tokens fill, the last of each row cut."""
    whole, rest = divmod(row_tokens, document_tokens)
    return np.array(rows * ([document_tokens] * whole + [rest] * (rest > 0)))


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
    program, model = step.program, step.program.model
    call_prefix = step.choice.kernel.custom_call_prefix
    if not call_prefix or program.dtype != jnp.bfloat16:
        return None
    forward = flops.attention_flops(model, segment_lengths) / program.mesh.size
    # Five products where forward has two: the scores again, and the gradients of both sides of both products
    backward = 2.5 * forward
    forward *= 1 if program.remat_policy.is_attention_saved else 2
    kernels, text = (
        hlo_cost.read_kernel_costs(step.dump.hlo_text),
        hlo.parse_module(step.dump.hlo_text),
    )
    on_host = {
        kernel.begin_line: kernel
        for kernel in kernels
        if kernel.bytes_from_host or kernel.bytes_to_host
    }
    on_device = {
        kernel.line_number: kernel for kernel in kernels if kernel.begin_line not in on_host
    }
    seconds = {number: _estimate_kernel_s(kernel, ceilings) for number, kernel in on_device.items()}
    of_attention = _estimate_attention_s(
        text,
        call_prefix=call_prefix,
        forward_s=forward / (ceilings.attention_forward_tflops * _TERA),
        backward_s=backward / (ceilings.attention_backward_tflops * _TERA),
    )
    scheduled = {
        one.begin_line: ScheduledTransfer(
            stream=COLLECTIVE_STREAM,
            seconds=estimate_collective_s(one, ceilings=ceilings, node_devices=node_devices)
            / one.num_runs,
            begin_line=one.begin_line,
            end_line=one.end_line,
        )
        for one in collectives
    }
    copies = {begin: _make_host_copy(kernel, ceilings) for begin, kernel in on_host.items()}
    simulated = timeline.simulate(text, seconds | of_attention, scheduled | copies)
    transfers = [
        *(
            _make_transfer(
                one.operation, one.op_name, one.total_bytes, scheduled[one.begin_line], simulated
            )
            for one in collectives
        ),
        *(
            _make_transfer(
                copies[begin].stream,
                kernel.op_name,
                kernel.num_runs * max(kernel.bytes_from_host, kernel.bytes_to_host),
                copies[begin],
                simulated,
            )
            for begin, kernel in on_host.items()
        ),
    ]
    by_kind = {True: [one for one in transfers if one.operation in comms.COLLECTIVES]}
    by_kind[False] = [one for one in transfers if one.operation not in comms.COLLECTIVES]
    waited = {
        kind: sum((one.exposed_s for one in some), start=0.0) for kind, some in by_kind.items()
    }
    total = {kind: sum((one.seconds for one in some), start=0.0) for kind, some in by_kind.items()}
    return TimeEstimate(
        hardware_flops=sum((one.num_runs * one.flops for one in kernels), start=0.0)
        + forward
        + backward,
        host_copy_bytes=(
            sum((one.num_runs * one.bytes_from_host for one in kernels), start=0.0),
            sum((one.num_runs * one.bytes_to_host for one in kernels), start=0.0),
        ),
        seconds={
            MATMULS: _sum_seconds(
                simulated, (number for number, kernel in on_device.items() if kernel.flops)
            ),
            MEMORY_BANDWIDTH: _sum_seconds(
                simulated, (number for number, kernel in on_device.items() if not kernel.flops)
            ),
            ATTENTION: _sum_seconds(simulated, of_attention),
            EXPOSED_COLLECTIVES: waited[True],
            EXPOSED_HOST_COPIES: waited[False],
            HIDDEN_COLLECTIVES: total[True] - waited[True],
            HIDDEN_HOST_COPIES: total[False] - waited[False],
        },
        step_s=simulated.seconds,
        transfers=transfers,
    )


def _sum_seconds(simulated: Timeline, lines: Iterable[int]) -> float:
    """Seconds of all runs of some kernels."""
    return sum((simulated.kernel_seconds.get(number, 0.0) for number in lines), start=0.0)


def find_bottleneck(seconds: Mapping[str, float]) -> str:
    """The cause that takes most of a step's time."""
    return max(
        (MATMULS, MEMORY_BANDWIDTH, ATTENTION, EXPOSED_COLLECTIVES, EXPOSED_HOST_COPIES),
        key=lambda cause: seconds.get(cause, 0.0),
    )


def _make_transfer(
    kind: str, op_name: str, size: float, one: ScheduledTransfer, simulated: Timeline
) -> TransferEstimate:
    waited = simulated.exposed.get(one.begin_line, ExposedTime(num_runs=0, seconds=0.0))
    return TransferEstimate(
        operation=kind,
        op_name=op_name,
        total_bytes=size,
        seconds=one.seconds * waited.num_runs,
        exposed_s=waited.seconds,
        num_runs=waited.num_runs,
    )


def _estimate_kernel_s(kernel: KernelCost, ceilings: Ceilings) -> float:
    """Seconds of one run of a kernel."""
    return max(
        kernel.flops / (ceilings.matmul_tflops * _TERA),
        kernel.device_bytes / (ceilings.memory_gb_s * _GIGA),
    )


def _estimate_attention_s(
    program: HloModule, *, call_prefix: str, forward_s: float, backward_s: float
) -> dict[int, float]:
    """Seconds of one run of each cuDNN call, by line number, assuming equal times for all calls of
    a direction."""
    found: dict[int, float] = {}
    runs = hlo.count_runs(
        program,
        lambda line: line.opcode == "custom-call" and call_prefix in line.attributes,
        include_branches=True,
    )
    for is_backward, total in ((False, forward_s), (True, backward_s)):
        calls = [
            (line, times) for line, times in runs if ("Backward" in line.attributes) == is_backward
        ]
        num_runs = sum(times for _, times in calls)
        found |= {line.line_number: total / num_runs for line, _ in calls}
    return found


def _make_host_copy(kernel: KernelCost, ceilings: Ceilings) -> ScheduledTransfer:
    size = max(kernel.bytes_from_host, kernel.bytes_to_host)
    return ScheduledTransfer(
        stream=TO_HOST if kernel.bytes_to_host >= kernel.bytes_from_host else FROM_HOST,
        seconds=size / (ceilings.host_gb_s * _GIGA),
        begin_line=kernel.begin_line,
        end_line=kernel.end_line,
    )


def estimate_collective_s(sent: Collective, *, ceilings: Ceilings, node_devices: int) -> float:
    """Seconds that a collective takes, all times together: within a node over NVLink, between nodes over their network.

    In an all-to-all each device sends to each other one, most of them elsewhere, through a network card of its own; so does the
    device whose next one is elsewhere when all pass on what they have, and the others wait for it. The other collectives go
    round in rings, each of which leaves a node once, and all cards of the node carry them together.
    """
    nodes = {device // node_devices for device in sent.device_ids}
    if len(nodes) == 1:
        return sent.total_bytes / (ceilings.link_gb_s * _GIGA)
    count = len(sent.device_ids)
    if sent.operation == "all-to-all":
        here = sum(
            device // node_devices == sent.device_ids[0] // node_devices
            for device in sent.device_ids
        )
        away = sent.total_bytes * (count - here) / (count - 1)
        return max(
            (sent.total_bytes - away) / (ceilings.link_gb_s * _GIGA),
            away / (ceilings.network_gb_s * _GIGA),
        )
    if sent.operation == "collective-permute":
        return sent.total_bytes / (ceilings.network_gb_s * _GIGA)
    per_node = count // len(nodes)
    return sent.total_bytes / (min(ceilings.link_gb_s, per_node * ceilings.network_gb_s) * _GIGA)
