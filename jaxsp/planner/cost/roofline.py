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
from jaxsp.planner.compile import compiled, gpus, hlo
from jaxsp.planner.cost import comms, hlo_cost, timeline

PRODUCTS, MEMORY, ATTENTION, WAITED, HOST_WAITED = (
    "matrix products",
    "memory bandwidth",
    "attention",
    "waiting for collectives",
    "waiting for copies from and to the host",
)
"""Causes of a step's time; their seconds add up to it."""

OVERLAPPED, HOST_OVERLAPPED = "collectives that overlap kernels", "host copies that overlap kernels"

LIKELY = (1.0, 1.3)
"""Likely range of a measured step's time over its estimate.

Published runs of other systems with cuDNN's attention took 0.98 to 1.13 times the estimate. One on
H100s limited to 500 W, with another kernel, took 1.45 times (scripts/bench/anchors.py).
"""

FROM_HOST, TO_HOST = "from host", "to host"
"""Kinds of transfers beside those of `comms.KINDS`."""

COLLECTIVES = "collectives"
"""The stream of all collectives: they share the links."""

_TERA, _GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """A collective or a host copy of the program, with its time in a step."""

    kind: str
    """One of comms.KINDS, FROM_HOST or TO_HOST."""
    op_name: str
    """Name that JAX gave the operation."""
    bytes: float
    """Sum over all its runs."""
    seconds: float
    """Duration, sum over all its runs."""
    waited_s: float
    """Part of `seconds` that no kernel overlaps."""
    runs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Work and time of a step on each device."""

    flops_executed: float
    """Arithmetic of the compiled program, with recomputation, and attention's backward pass as flash attention does it."""
    host_bytes: tuple[float, float]
    """Bytes from and to host memory."""
    seconds: Mapping[str, float]
    """Time by cause: PRODUCTS to HOST_WAITED add up to step_s; OVERLAPPED and HOST_OVERLAPPED are
    not part of it."""
    step_s: float
    transfers: Sequence[Transfer]
    """In the order of the program's text."""


def filled(*, rows: int, row_tokens: int, document_tokens: int) -> np.ndarray:
    """Lengths of the pieces of rows that documents of so many tokens fill, the last of each row cut."""
    whole, rest = divmod(row_tokens, document_tokens)
    return np.array(rows * ([document_tokens] * whole + [rest] * (rest > 0)))


def estimate(
    step: compiled.Step, sent: list[comms.Sent], *, ceilings: gpus.Ceilings, node_devices: int, piece_lengths: np.ndarray
) -> Estimate | None:
    """Estimates a step over segments of these lengths, on nodes of `node_devices` devices.

    None if the dtype is not bfloat16 or the kernel is not cuDNN: the published rates are for these.
    """
    program, model = step.program, step.program.model
    if step.choice.kernel != "cudnn" or program.dtype != jnp.bfloat16:
        return None
    forward = flops.attention_flops(model, piece_lengths) / program.mesh.size
    # Five products where forward has two: the scores again, and the gradients of both sides of both products
    backward = 2.5 * forward
    forward *= 2 if program.how.remat == "full" else 1
    kernels, text = hlo_cost.kernels(step.written.text), hlo.parsed(step.written.text)
    on_host = {kernel.begin: kernel for kernel in kernels if kernel.from_host or kernel.to_host}
    on_device = {kernel.number: kernel for kernel in kernels if kernel.begin not in on_host}
    seconds = {number: _alone_s(kernel, ceilings) for number, kernel in on_device.items()}
    of_attention = _attention_s(
        text,
        forward_s=forward / (ceilings.attention_forward_tflops * _TERA),
        backward_s=backward / (ceilings.attention_backward_tflops * _TERA),
    )
    collectives = {
        one.begin: timeline.Transfer(
            stream=COLLECTIVES,
            seconds=travel_s(one, ceilings=ceilings, node_devices=node_devices) / one.times,
            begin=one.begin,
            end=one.end,
        )
        for one in sent
    }
    copies = {begin: _host_copy(kernel, ceilings) for begin, kernel in on_host.items()}
    simulated = timeline.simulate(text, seconds | of_attention, collectives | copies)
    transfers = [
        *(_transfer(one.kind, one.op_name, one.bytes, collectives[one.begin], simulated) for one in sent),
        *(
            _transfer(
                copies[begin].stream,
                kernel.op_name,
                kernel.times * max(kernel.from_host, kernel.to_host),
                copies[begin],
                simulated,
            )
            for begin, kernel in on_host.items()
        ),
    ]
    by_kind = {True: [one for one in transfers if one.kind in comms.KINDS]}
    by_kind[False] = [one for one in transfers if one.kind not in comms.KINDS]
    waited = {kind: sum((one.waited_s for one in some), start=0.0) for kind, some in by_kind.items()}
    total = {kind: sum((one.seconds for one in some), start=0.0) for kind, some in by_kind.items()}
    return Estimate(
        flops_executed=sum((one.times * one.flops for one in kernels), start=0.0) + forward + backward,
        host_bytes=(
            sum((one.times * one.from_host for one in kernels), start=0.0),
            sum((one.times * one.to_host for one in kernels), start=0.0),
        ),
        seconds={
            PRODUCTS: _sum(simulated, (number for number, kernel in on_device.items() if kernel.flops)),
            MEMORY: _sum(simulated, (number for number, kernel in on_device.items() if not kernel.flops)),
            ATTENTION: _sum(simulated, of_attention),
            WAITED: waited[True],
            HOST_WAITED: waited[False],
            OVERLAPPED: total[True] - waited[True],
            HOST_OVERLAPPED: total[False] - waited[False],
        },
        step_s=simulated.seconds,
        transfers=transfers,
    )


def _sum(simulated: timeline.Timeline, lines: Iterable[int]) -> float:
    """Seconds of all runs of some kernels."""
    return sum((simulated.kernels.get(number, 0.0) for number in lines), start=0.0)


def limiting(seconds: Mapping[str, float]) -> str:
    """The cause that takes most of a step's time."""
    return max((PRODUCTS, MEMORY, ATTENTION, WAITED, HOST_WAITED), key=lambda cause: seconds.get(cause, 0.0))


def _transfer(kind: str, op_name: str, size: float, one: timeline.Transfer, simulated: timeline.Timeline) -> Transfer:
    waited = simulated.waited.get(one.begin, timeline.Waited(runs=0, seconds=0.0))
    return Transfer(
        kind=kind,
        op_name=op_name,
        bytes=size,
        seconds=one.seconds * waited.runs,
        waited_s=waited.seconds,
        runs=waited.runs,
    )


def _alone_s(kernel: hlo_cost.Kernel, ceilings: gpus.Ceilings) -> float:
    """Seconds of one run of a kernel."""
    return max(kernel.flops / (ceilings.products_tflops * _TERA), kernel.device_bytes / (ceilings.memory_gb_s * _GIGA))


def _attention_s(program: hlo.Program, *, forward_s: float, backward_s: float) -> dict[int, float]:
    """Seconds of one run of each cuDNN call, by line number, assuming equal times for all calls of
    a direction."""
    found: dict[int, float] = {}
    runs = hlo.runs(program, lambda line: line.opcode == "custom-call" and "__cudnn$fmha" in line.attributes, may=True)
    for is_backward, total in ((False, forward_s), (True, backward_s)):
        calls = [(line, times) for line, times in runs if ("Backward" in line.attributes) == is_backward]
        num_runs = sum(times for _, times in calls)
        found |= {line.number: total / num_runs for line, _ in calls}
    return found


def _host_copy(kernel: hlo_cost.Kernel, ceilings: gpus.Ceilings) -> timeline.Transfer:
    size = max(kernel.from_host, kernel.to_host)
    return timeline.Transfer(
        stream=TO_HOST if kernel.to_host >= kernel.from_host else FROM_HOST,
        seconds=size / (ceilings.host_gb_s * _GIGA),
        begin=kernel.begin,
        end=kernel.end,
    )


def travel_s(sent: comms.Sent, *, ceilings: gpus.Ceilings, node_devices: int) -> float:
    """Seconds that a collective takes, all times together: within a node over NVLink, between nodes over their network.

    In an all-to-all each device sends to each other one, most of them elsewhere, through a network card of its own; so does the
    device whose next one is elsewhere when all pass on what they have, and the others wait for it. The other collectives go
    round in rings, each of which leaves a node once, and all cards of the node carry them together.
    """
    nodes = {device // node_devices for device in sent.group}
    if len(nodes) == 1:
        return sent.bytes / (ceilings.link_gb_s * _GIGA)
    count = len(sent.group)
    if sent.kind == "all-to-all":
        here = sum(device // node_devices == sent.group[0] // node_devices for device in sent.group)
        away = sent.bytes * (count - here) / (count - 1)
        return max((sent.bytes - away) / (ceilings.link_gb_s * _GIGA), away / (ceilings.network_gb_s * _GIGA))
    if sent.kind == "collective-permute":
        return sent.bytes / (ceilings.network_gb_s * _GIGA)
    per_node = count // len(nodes)
    return sent.bytes / (min(ceilings.link_gb_s, per_node * ceilings.network_gb_s) * _GIGA)
