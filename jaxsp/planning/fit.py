"""Decides the memory options that the config leaves open, so that the step fits its devices.

Less recomputation and larger tiles are faster, so candidates are tried from the fastest to the
slowest. A prediction skips those that cannot fit, because compiling with autotuning takes minutes
on a GPU. For the others, the memory of the compiled program decides.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.attention.selection import AttentionChoice
from jaxsp.core import errors, units
from jaxsp.core.errors import UserError
from jaxsp.model.remat import list_kept
from jaxsp.planning import candidates, estimate
from jaxsp.sharding import host_offload
from jaxsp.system import device_memory, distributed
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training import train_step
from jaxsp.training.specs import StepSpec

MAX_REPEATED_RATIO = 0.99
"""Maximum ratio of a candidate's predicted memory to that of one that did not fit, for which it is
compiled: smaller tiles do not help where memory is fullest elsewhere."""

KEPT_MARGIN = 0.01
"""Fraction of the device memory that is left free when the number of layers that keep the MLP's
products is computed."""

MAX_KEPT_TRIES = 3
"""Maximum number of numbers of such layers that are compiled."""

MIN_MORE_KEPT = 1 / 20
"""Minimum fraction of the layers that another number of them has to be larger by."""


class MemoryUse(NamedTuple):
    """Memory of a compiled step for each device, in bytes."""

    device: int
    host: int
    uncounted_workspace: int = 0
    """Estimate of cuDNN's workspace, if the compiled program does not count it (absent GPUs)."""
    workspace: int = 0
    """cuDNN's workspace, if the compiled program counts it."""
    estimated_workspace: int = 0
    """Estimate of cuDNN's workspace, to compare with `workspace`."""

    @property
    def device_total(self) -> int:
        return self.device + self.uncounted_workspace


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step whose memory options are decided."""

    spec: StepSpec
    executable: Any
    """Result of `compile_step`, an argument of `fit`."""
    memory_use: MemoryUse
    memory_limit: MemoryLimit
    shortage: str = ""
    """Description of what does not fit; empty if everything fits."""
    full_remat_reason: str = ""
    """Reason that `auto` recomputes attention; empty if it does not."""


def fit(
    spec: StepSpec,
    *,
    limit: MemoryLimit,
    compile_step: Callable[[StepSpec], Any],
    measure: Callable[[Any], MemoryUse],
) -> CompiledStep:
    """Compiles candidates, and returns the first that fits, or else the last one.

    Args:
        compile_step: compiles a step whose memory options are decided.
        measure: memory of what `compile_step` returned; must be equal in all processes, so that all
            choose the same candidate.
    """
    scale = 1.0
    too_large = math.inf
    reason = ""

    def compile_candidate(candidate: StepSpec) -> CompiledStep:
        executable = compile_step(candidate)
        memory_use = measure(executable)
        return CompiledStep(
            spec=candidate,
            executable=executable,
            memory_use=memory_use,
            memory_limit=limit,
            shortage=describe_shortage(memory_use, limit),
            full_remat_reason="" if candidate.remat_policy.is_attention_saved else reason,
        )

    if math.isinf(limit.device):
        return compile_candidate(next(candidates.list_candidates(spec, is_memory_known=False)))
    sizes: dict[int, int] = {}

    def predict(candidate: StepSpec) -> int:
        if id(candidate) not in sizes:
            sizes[id(candidate)] = estimate.predict_bytes(candidate)
        return sizes[id(candidate)]

    groups = candidates.group_candidates(spec)
    last = groups[-1][-1]
    for candidate, smallest in ((step, group[-1]) for group in groups for step in group):
        formula = predict(smallest)
        if scale * formula <= candidates.MAX_PREDICTED_RATIO * limit.device:
            formula = predict(candidate)
        predicted = scale * formula
        saves_attention = candidate.remat_policy.is_attention_saved
        if candidate is not last:
            if formula > MAX_REPEATED_RATIO * too_large:
                continue
            if predicted > candidates.MAX_PREDICTED_RATIO * limit.device:
                if saves_attention:
                    size = units.format_bytes(predicted)
                    reason = f"keeping attention's output needs about {size} on each device"
                continue
        step = compile_candidate(candidate)
        # All candidates offload the same arrays: no other one helps if host memory is short
        if step.memory_use.device_total <= limit.device:
            break
        if saves_attention:
            reason = f"keeping attention's output needs {step.shortage}"
        # A prediction that is far off says little about other candidates
        ratio = scale * step.memory_use.device_total / predicted
        scale = max(scale, min(ratio, 1 / candidates.MIN_PREDICTED_RATIO))
        too_large = formula
    if not candidates.can_keep_more(spec, step.spec):
        return step

    # Keep the MLP's products in as many layers as fit, or almost as many
    keep = lambda number: {"remat": "save_attention_and_mlp", "kept_mlp_layers": number}
    none, all_layers = (
        estimate.saved_bytes(step.spec.respec(memory=keep(number)))
        for number in (0, spec.model.num_layers)
    )
    numbers = list_kept(spec.model)
    totals = [(all_layers - none) * number // numbers[-1] for number in numbers]
    target = int((1 - KEPT_MARGIN) * limit.device)
    room = target - step.memory_use.device_total
    for _ in range(MAX_KEPT_TRIES):
        kept = step.spec.config.memory.kept_mlp_layers
        assert isinstance(kept, int)
        fitting = bisect.bisect_right(totals, totals[kept] + room) - 1
        number = totals.index(totals[fitting])
        if number - kept < max(1, MIN_MORE_KEPT * len(totals)):
            break
        larger = compile_candidate(step.spec.respec(memory=keep(number)))
        if larger.memory_use.device_total <= limit.device:
            step = larger
            room = target - step.memory_use.device_total
        else:
            room -= larger.memory_use.device_total - target
    return step


def read_memory_use(executable: jax.stages.Compiled, choice: AttentionChoice) -> MemoryUse:
    """Memory of a compiled step, from XLA's memory analysis.

    If the step was compiled with a GPU present, cuDNN's workspace is a call's last result, and so
    part of the temporaries. Otherwise the estimate is added.
    """
    analysis = executable.memory_analysis()

    def total(prefix: str) -> int:
        kinds = ("argument", "output", "temp", "alias")
        *sizes, alias = (getattr(analysis, f"{prefix}{kind}_size_in_bytes") for kind in kinds)
        return sum(sizes) - alias

    workspace = None
    workspace_bytes = choice.workspace_bytes
    if workspace_bytes:
        workspace = choice.library_kernel.read_workspace_bytes(executable.as_text() or "")
    return MemoryUse(
        device=total(""),
        host=total("host_"),
        uncounted_workspace=workspace_bytes if workspace is None else 0,
        workspace=workspace or 0,
        estimated_workspace=workspace_bytes,
    )


def describe_shortage(memory_use: MemoryUse, limit: MemoryLimit) -> str:
    """Describes what does not fit; empty if everything fits."""
    size = units.format_bytes
    if memory_use.device_total > limit.device:
        cudnn = ""
        if memory_use.uncounted_workspace:
            cudnn = f" (about {size(memory_use.uncounted_workspace)} of it for cuDNN)"
        needed = f"{size(memory_use.device_total)} on each device{cudnn}"
        return f"{needed}, but only {size(limit.device)} is available"
    if limit.host < 0:
        missing = size(memory_use.host - limit.host)
        return f"{missing} more host memory per device than is available, with a checkpoint's copy"
    if memory_use.host > limit.pinned:
        needed = f"{size(memory_use.host)} of host memory per device"
        return f"{needed}, but only {size(limit.pinned)} is available"
    return ""


# On this machine


def compile_fitting_step(
    spec: StepSpec,
    *,
    on_candidate: Callable[[StepSpec], None] = lambda candidate: None,
) -> CompiledStep:
    """Chooses the memory options that are `auto`, and compiles the step.

    Args: on_candidate: called with a step before it is compiled.
    Raises: UserError if the step does not fit; RuntimeError if XLA ignored some offloading.
    """

    def compile_and_print(candidate: StepSpec) -> jax.stages.Compiled:
        on_candidate(candidate)
        return train_step.compile(candidate)

    def measure(executable: jax.stages.Compiled) -> MemoryUse:
        """Maximum over all processes: each compiles for its own devices, and all must choose the
        same options."""
        use = read_memory_use(executable, spec.attention)
        # JAX has no 64-bit integers by default
        parts = np.array([divmod(num_bytes, units.MIB) for num_bytes in use], np.int32)
        gathered = multihost_utils.process_allgather(parts).astype(np.int64)
        sizes = gathered.reshape(-1, len(use), 2) @ [units.MIB, 1]
        return MemoryUse(*map(int, sizes.max(0)))

    memory = device_memory.find_limits(spec.mesh.devices.flat)
    usable = estimate.subtract_reserves(spec, memory)
    step = fit(spec, limit=usable, compile_step=compile_and_print, measure=measure)
    check_offloads(step.spec, step.memory_use)
    # Refuse only what exceeds the real limits: reserves and estimates may be too large
    is_device_short = step.memory_use.device > memory.device
    if is_device_short or step.memory_use.host > memory.pinned:
        shortage = step.shortage
        if not is_device_short:
            shortage = describe_shortage(step.memory_use, usable._replace(device=math.inf))
        changes = candidates.suggest_changes(spec, is_device_short=is_device_short)
        raise UserError(f"the step needs {shortage}. Try {errors.format_choices(changes)}.")
    return step


def check_offloads(spec: StepSpec, memory_use: MemoryUse) -> None:
    """Checks that the compiled step offloads what the config requests.

    Raises: RuntimeError if XLA ignored some of the offloading.
    """
    offloaded = estimate.step_offloaded_bytes(spec)
    least = offloaded.total - offloaded.gradients
    policy = spec.remat_policy
    # XLA may put the gradient of a layer's output in place of a layer's input, and keep the input
    # of a layer that is not in a loop
    num_left_out = policy.offloads_during_attention + sum(
        segment.num_layers == 1 for segment in spec.model.segments
    )
    per_input = offloaded.activations // policy.num_offloaded_inputs(spec.model.num_layers)
    least -= num_left_out * per_input
    if is_gpu(spec) and memory_use.host < least:
        size = units.format_bytes
        raise RuntimeError(
            f"memory.offload_activations and memory.offload_optimizer need {size(least)} of host "
            f"memory per device, but the compiled step has {size(memory_use.host)}: XLA has "
            "ignored some of the offloading. This is a bug. As a workaround, use "
            "memory.offload_activations=none memory.offload_optimizer=none."
        )


def reserve_host_memory(spec: StepSpec, host_bytes: int) -> None:
    """Reserves the host memory that each device's step needs.

    Call before weights are loaded: see `host_offload.reserve_pool`.
    """
    if not (host_bytes and is_gpu(spec)):
        return
    size = units.format_bytes(host_bytes)
    if jax.process_index() == 0:
        distributed.log(
            f"reserving {size} of pinned host memory for each GPU, which can take minutes"
        )
    try:
        host_offload.reserve_pool(spec.mesh.local_devices, host_bytes)
    except jax.errors.JaxRuntimeError as error:
        changes = candidates.suggest_changes(spec, is_device_short=False)
        raise UserError(
            f"XLA could not reserve {size} of pinned host memory for each device: "
            f"{str(error).splitlines()[0]} Try {errors.format_choices(changes)}, or a larger "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (for each device) if the node has more free memory."
        ) from None


def is_gpu(spec: StepSpec) -> bool:
    """True if the devices are GPUs, which have memory of their own."""
    return spec.mesh.devices.flat[0].platform == "gpu"


# Descriptions of memory options, and of the memory of a compiled step

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
