"""How long a compiled step would take at least, by what its devices do at most: an estimate, in no way a measurement.

Each kernel takes as long as its products at the rate of large products, or as what it reads and writes at the memory's rate,
whichever is more; attention as long as its arithmetic at the rate of flash attention. A collective hides behind what the
program runs between its begin and its end, and copies in the loops over layers behind these loops; what is left is waited for.
Left out: launches, imbalance between groups, waiting for data.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxsp.planner import comms, compiled, gpus, hlo, work
from jaxsp.training import metrics
from jaxsp.training import step as steps

KERNELS, ATTENTION, WAITED, BESIDE, HOST_WAITED, HOST_BESIDE = (
    "kernels",
    "attention",
    "collectives, waited for",
    "collectives, beside kernels",
    "to the host and back, waited for",
    "to the host and back, beside kernels",
)

_TERA, _GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step does on each device, and how long that would take."""

    flops_executed: float
    """What the compiled program does: with what is computed again, and attention's backward pass as flash attention does it."""
    host_bytes: tuple[float, float]
    """From and to the host's memory."""
    seconds: Mapping[str, float]
    """By what takes them."""
    step_s: float


def filled(*, rows: int, row_tokens: int, document_tokens: int) -> np.ndarray:
    """Lengths of the pieces of rows that documents of so many tokens fill, the last of each row cut."""
    whole, rest = divmod(row_tokens, document_tokens)
    return np.array(rows * ([document_tokens] * whole + [rest] * (rest > 0)))


def estimate(
    step: compiled.Step, sent: list[comms.Sent], *, ceilings: gpus.Ceilings, node_devices: int, piece_lengths: np.ndarray
) -> Estimate | None:
    """The estimate for a step that learns from pieces of these lengths, on nodes of so many devices.

    None where the ceilings are for something else: another dtype than bfloat16, another kernel than cuDNN's.
    """
    program, model = step.program, step.program.model
    if step.choice.kernel != "cudnn" or program.dtype != jnp.bfloat16:
        return None
    kernels = work.kernels(step.written.text)
    forward = metrics.attention_flops(model, piece_lengths) / program.mesh.size
    forwards = 2 if program.how.remat == "full" else 1
    # five products where forward has two: the scores once more, and the gradients of both products' sides
    backward = 2.5 * forward
    alone = {one.number: _alone_s(one, ceilings) for one in kernels}
    beside = _beside(step.written.text, alone)
    travels = [(one, travel_s(one, ceilings=ceilings, node_devices=node_devices)) for one in sent]
    waited = sum((max(0.0, travel - one.times * beside(one)) for one, travel in travels), start=0.0)
    turns = steps.shapes(program)[1].tokens_BL.shape[0]
    in_loops = [one for one in kernels if one.times > turns and ("shard_map" in one.op_name or not one.op_name)]
    rest = [one for one in kernels if one not in in_loops]
    ways = {name: _host_bytes(some) for name, some in ((HOST_BESIDE, in_loops), (HOST_WAITED, rest))}
    seconds = {
        KERNELS: sum((one.times * alone[one.number] for one in kernels), start=0.0),
        ATTENTION: forwards * forward / (ceilings.attention_forward_tflops * _TERA)
        + backward / (ceilings.attention_backward_tflops * _TERA),
        WAITED: waited,
        BESIDE: sum((travel for _, travel in travels), start=0.0) - waited,
        **{name: max(both) / (ceilings.host_gb_s * _GIGA) for name, both in ways.items()},
    }
    from_host, to_host = (sum(both[way] for both in ways.values()) for way in (0, 1))
    return Estimate(
        flops_executed=sum((one.times * one.flops for one in kernels), start=0.0) + forwards * forward + backward,
        host_bytes=(from_host, to_host),
        seconds=seconds,
        step_s=max(seconds[KERNELS] + seconds[ATTENTION] + waited, seconds[HOST_BESIDE]) + seconds[HOST_WAITED],
    )


def _alone_s(kernel: work.Kernel, ceilings: gpus.Ceilings) -> float:
    """Seconds of a kernel, each time."""
    return max(kernel.flops / (ceilings.products_tflops * _TERA), kernel.device_bytes / (ceilings.memory_gb_s * _GIGA))


def _beside(text: str, alone: Mapping[int, float]) -> Callable[[comms.Sent], float]:
    """Seconds of what a program runs between the begin and the end of a collective, each time; all, where that is a loop or
    attention.
    """
    program = hlo.parsed(text)
    long = {
        line.number
        for name in work.not_fused(program)
        for line in program.computations[name]
        if line.opcode in ("while", "conditional") or (line.opcode == "custom-call" and "fmha" in line.attributes)
    }
    numbers = sorted(alone)

    def between(one: comms.Sent) -> float:
        if any(one.begin < number < one.end for number in long):
            return math.inf
        first, last = bisect.bisect_right(numbers, one.begin), bisect.bisect_left(numbers, one.end)
        return sum((alone[number] for number in numbers[first:last]), start=0.0)

    return between


def _host_bytes(kernels: Sequence[work.Kernel]) -> tuple[float, float]:
    """That come from the host and go there."""
    return (
        sum((one.times * one.from_host for one in kernels), start=0.0),
        sum((one.times * one.to_host for one in kernels), start=0.0),
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
