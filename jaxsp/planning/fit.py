"""Decides the memory options that the config leaves open, so that the step fits its devices.

Less recomputation and larger tiles are faster, so candidates are tried from the fastest to the
slowest. A formula skips those that cannot fit, because compiling with autotuning takes minutes on a
GPU. For the others, the memory of the compiled program decides.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.attention.selection import AttentionChoice
from jaxsp.core import errors, units
from jaxsp.core.errors import UserError
from jaxsp.model.remat import list_kept
from jaxsp.planning import candidates, estimate, limits, memory_problems
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
    *others, last = candidates.list_candidates(spec)
    for candidate in (*others, last):
        formula = estimate.predict_bytes(candidate)
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
        scale *= max(1.0, step.memory_use.device_total / predicted)
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
    usable = limits.subtract_reserves(spec, memory)
    step = fit(spec, limit=usable, compile_step=compile_and_print, measure=measure)
    check_offloads(step.spec, step.memory_use)
    # Refuse only what exceeds the real limits: reserves and estimates may be too large
    is_device_short = step.memory_use.device > memory.device
    if is_device_short or step.memory_use.host > memory.pinned:
        shortage = step.shortage
        if not is_device_short:
            shortage = describe_shortage(step.memory_use, usable._replace(device=math.inf))
        changes = memory_problems.suggest_changes(spec, is_device_short=is_device_short)
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
        changes = memory_problems.suggest_changes(spec, is_device_short=False)
        raise UserError(
            f"XLA could not reserve {size} of pinned host memory for each device: "
            f"{str(error).splitlines()[0]} Try {errors.format_choices(changes)}, or a larger "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (for each device) if the node has more free memory."
        ) from None


def is_gpu(spec: StepSpec) -> bool:
    """True if the devices are GPUs, which have memory of their own."""
    return spec.mesh.devices.flat[0].platform == "gpu"
