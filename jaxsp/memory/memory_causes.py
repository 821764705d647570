"""Memory of a compiled step by cause, from the formulas that chose its memory options."""

import dataclasses
import math
from collections.abc import Mapping

from jaxsp.memory import memory_formula
from jaxsp.memory.memory_fit import CompiledStep

WEIGHTS = "weights"
OPTIMIZER = "optimizer state"
GRADIENTS = "gradients"
ACTIVATIONS = "saved activations"
WORKSPACE = "cuDNN workspace"
OTHER = "other temporaries"

CAUSES: Mapping[str, str] = {
    WEIGHTS: "float32 master weights, copies in the compute dtype if they are on the host, and "
    "frozen weights",
    OPTIMIZER: "such as moments",
    WORKSPACE: "of attention's backward pass",
    GRADIENTS: "summed over the step, one shard on each device",
    ACTIVATIONS: "saved for the backward pass by all layers: their inputs, attention's outputs, "
    "and the matrix products that memory.remat keeps",
    OTHER: "all else: attention's arrays, tiles of the MLP and of logits, gathered weights",
}
"""Causes of memory, with what belongs to each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of a compiled step for each device, by cause.

    The totals are those of the compiled program. Weights and optimizer state are exact. Gradients
    and saved activations are formulas. `other temporaries` is the rest of the program's total.
    """

    remat: str
    """Value of memory.remat that was chosen."""
    device: Mapping[str, int]
    """Bytes of device memory, by cause."""
    host: Mapping[str, int]
    """Bytes of host memory for one device, by cause; empty if nothing is offloaded."""
    device_available: int | None
    """Bytes of device memory available to the step. None if they are unknown."""


def find_causes(step: CompiledStep) -> StepMemory:
    """Attributes the memory of a compiled step to its causes."""
    resident = memory_formula.resident_bytes(step.spec)
    offloaded = memory_formula.step_offloaded_bytes(step.spec)
    use = step.memory_use
    workspace = use.workspace
    if use.uncounted_workspace:  # a plan adds only what does not fit into free memory
        workspace = use.estimated_workspace
    available = step.memory_limit.device
    return StepMemory(
        remat=step.spec.remat_policy.remat,
        device=_split(
            use.device_total,
            {
                WEIGHTS: resident.weights,
                OPTIMIZER: resident.moments,
                WORKSPACE: workspace,
                GRADIENTS: resident.gradients,
                ACTIVATIONS: resident.activations,
            },
        ),
        host=_split(
            use.host,
            {
                WEIGHTS: offloaded.weights + offloaded.frozen,
                OPTIMIZER: offloaded.moments,
                GRADIENTS: offloaded.gradients,
                ACTIVATIONS: offloaded.activations,
            },
        ),
        device_available=int(available) if math.isfinite(available) else None,
    )


def _split(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes by cause that add up to the total, in the order of `sizes`.

    The compiler shares memory between arrays that are not live together, so formulas can add up to
    more than the total. The last causes are reduced then.
    """
    parts = {}
    rest = total
    for cause, size in sizes.items():
        parts[cause] = min(size, rest)
        rest -= parts[cause]
    parts[OTHER] = rest
    return {cause: size for cause, size in parts.items() if size}
