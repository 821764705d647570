"""Descriptions of the memory options of a run, and of the memory of its compiled step, by cause."""

import dataclasses
import math
from collections.abc import Mapping

from jaxsp.core import units
from jaxsp.planning import estimate
from jaxsp.planning.fit import CompiledStep
from jaxsp.training.specs import StepSpec

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
    resident = estimate.resident_bytes(step.spec)
    offloaded = estimate.step_offloaded_bytes(step.spec)
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
                ACTIVATIONS: estimate.saved_bytes(step.spec),
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


def describe(spec: StepSpec) -> str:
    """Describes the memory options of a run; those that are `auto` are not decided yet."""
    memory = spec.config.memory
    tiles = f": {_describe_tiles(spec)}"
    if "auto" in (memory.mlp_tile_tokens, memory.loss_tile_tokens):
        tiles = ", in tiles only if the step does not fit otherwise"
    remat: str = memory.remat
    if spec.remat_policy.is_attention_offloaded:
        remat = spec.remat_policy.remat
    recomputed = _RECOMPUTED[remat]
    recomputed += _describe_kept_layers(spec)
    parts = [f"{spec.tokens_per_device:,} tokens per device{tiles}", recomputed]
    if spec.remat_policy.is_input_offloaded:
        arrays = "layer inputs"
        if memory.offload_every > 1:
            arrays = f"one of {memory.offload_every} layer inputs"
        if spec.remat_policy.is_attention_offloaded:
            arrays += " and attention outputs"
        parts.append(f"{arrays} offloaded to host memory")
    if spec.has_offloaded_state:
        parts.append(_describe_traffic(spec))
    parts.append(f"gradients summed in {memory.grad_reduce_dtype}")
    return "; ".join(parts)


_RECOMPUTED = {
    "none": "elementwise operations are recomputed in the backward pass",
    "save_attention_and_mlp": "layers are recomputed in the backward pass, except attention and "
    "the MLP's wide products",
    "save_attention": "layers are recomputed in the backward pass, except attention",
    "full": "layers are recomputed in the backward pass, including attention",
    "auto": "layers are recomputed in the backward pass, as far as needed to fit",
}
"""Descriptions of the values of memory.remat."""


def describe_compiled(step: CompiledStep) -> str:
    """Describes the memory of a compiled step, and the memory options that were chosen for it."""
    size = units.format_bytes
    use = step.memory_use
    spec = step.spec
    device = f"{size(use.device)} on each device"
    if use.uncounted_workspace:
        device += f" and about {size(use.uncounted_workspace)} for cuDNN"
    if use.workspace:
        estimate = size(use.estimated_workspace)
        device += f" ({size(use.workspace)} of it cuDNN's workspace, estimated {estimate})"
    if math.isfinite(step.memory_limit.device):
        device += f" of {size(step.memory_limit.device)} available"
    has_offloaded = spec.has_offloaded_state or spec.remat_policy.is_input_offloaded
    if has_offloaded and spec.mesh.devices.flat[0].platform == "cpu":
        device += " (including what is offloaded: a CPU has one memory)"
    if use.host:
        device += f", {size(use.host)} of host memory per device"
    remat = f"remat {spec.remat_policy.remat}{_describe_kept_layers(spec)}"
    if step.full_remat_reason:
        remat += f", because {step.full_remat_reason}"
    parts = [f"it needs {device}", remat, _describe_tiles(spec)]
    if spec.remat_policy.offloads_during_attention:
        parts.append("a layer's input and gradient in host memory during attention")
    if step.shortage:
        parts.append(
            "fragmentation, NCCL and checkpoints may need more than is left: "
            "it may run out of memory"
        )
    return "; ".join(parts)


def _describe_kept_layers(spec: StepSpec) -> str:
    """Describes in which layers the MLP's products are kept; empty if in all or in none."""
    kept = spec.remat_policy.kept_mlp_layers
    is_part = spec.remat_policy.is_mlp_saved and kept not in (None, spec.model.num_layers)
    return f" of the last {kept} layers" if is_part else ""


def _describe_tiles(spec: StepSpec) -> str:
    def describe_tile(tile: int) -> str:
        is_whole = tile >= spec.tokens_per_device
        return "all tokens at once" if is_whole else f"{tile:,} tokens at a time"

    return f"layers {describe_tile(spec.mlp_tile)}, loss {describe_tile(spec.loss_tile)}"


def _describe_traffic(spec: StepSpec) -> str:
    """Describes the arrays of offload_optimizer in host memory, and the bytes copied per step."""
    offloaded = estimate.step_offloaded_bytes(spec)
    weights = offloaded.weights
    state = weights + offloaded.moments
    arrays = "float32 weights"
    to_device = weights + state
    to_host = state
    if spec.has_offloaded_gradients:
        # To the device, with m microbatches: weights 2 m times (forward and backward), gradients
        # 2 (m - 1) times (both terms of each sum), and their total 3 times (to divide it by the
        # loss tokens, for the norm, and for the update). To the host: gradients m times, their sums
        # m - 1 times, and the divided total. Frozen weights go to the device only
        num_microbatches = spec.num_microbatches
        to_device = (4 * num_microbatches + 1) * weights + state
        to_device += 2 * num_microbatches * offloaded.frozen
        to_host = 2 * num_microbatches * weights + state
        arrays = "float32 weights, moments and gradients"
        if offloaded.frozen:
            arrays = "frozen weights, and float32 adapters, moments and gradients"
    elif offloaded.moments:
        arrays = "float32 weights and moments"
    size = units.format_bytes
    return (
        f"{arrays} in host memory; each step copies {size(to_device)} to each device and "
        f"{size(to_host)} back"
    )
