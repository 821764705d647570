"""Compiles the step with the memory options that fit, and reserves its host memory."""

import math
from collections.abc import Callable

import jax

from jaxsp.core import errors, units
from jaxsp.core.errors import UserError
from jaxsp.memory import available_memory, memory_fit, memory_formula, memory_suggestions
from jaxsp.memory.memory_fit import CompiledStep, MemoryUse
from jaxsp.sharding import host_offload
from jaxsp.system import distributed
from jaxsp.training import train_step
from jaxsp.training.specs import StepSpec


def compile_fitting_step(
    spec: StepSpec,
    *,
    on_candidate: Callable[[StepSpec], None] = lambda candidate: None,
) -> CompiledStep:
    """Chooses the memory options that are `auto`, and compiles the step.

    Args: on_candidate: called with a step before it is compiled.
    Raises: UserError if the step does not fit; RuntimeError if XLA ignored some offloading.
    """

    def measure(run: jax.stages.Compiled) -> MemoryUse:
        return memory_fit.max_over_processes(memory_fit.read_memory_use(run, spec.attention))

    def compile_candidate(candidate: StepSpec) -> jax.stages.Compiled:
        on_candidate(candidate)
        return train_step.compile(candidate)

    limits = available_memory.find_limits(spec.mesh.devices.flat)
    usable = available_memory.subtract_reserves(spec, limits)
    step = memory_fit.fit(
        spec,
        limit=usable,
        compile_step=compile_candidate,
        measure=measure,
    )
    check_offloads(step.spec, step.memory_use)
    # Refuse only what exceeds the real limits: reserves and estimates may be too large
    is_device_short = step.memory_use.device > limits.device
    if is_device_short or step.memory_use.host > limits.pinned:
        shortage = step.shortage
        if not is_device_short:
            shortage = memory_fit.describe_shortage(
                step.memory_use, usable._replace(device=math.inf)
            )
        changes = memory_suggestions.suggest_changes(spec, is_device_short=is_device_short)
        raise UserError(f"the step needs {shortage}. Try {errors.format_choices(changes)}.")
    return step


def check_offloads(spec: StepSpec, memory_use: MemoryUse) -> None:
    """Checks that the compiled step offloads what the config requests.

    Raises: RuntimeError if XLA ignored some of the offloading.
    """
    offloaded = memory_formula.step_offloaded_bytes(spec)
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
    if host_bytes and is_gpu(spec):
        if jax.process_index() == 0:
            distributed.log(
                f"reserving {units.format_bytes(host_bytes)} of pinned host memory for each "
                "GPU, which can take minutes"
            )
        try:
            host_offload.reserve_pool(spec.mesh.local_devices, host_bytes)
        except jax.errors.JaxRuntimeError as error:
            changes = memory_suggestions.suggest_changes(spec, is_device_short=False)
            raise UserError(
                f"XLA could not reserve {units.format_bytes(host_bytes)} of pinned host "
                f"memory for each device: {str(error).splitlines()[0]} Try "
                f"{errors.format_choices(changes)}, or a larger XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB "
                "(for each device) if the node has more free memory."
            ) from None


def is_gpu(spec: StepSpec) -> bool:
    """True if the devices are GPUs, which have memory of their own."""
    return spec.mesh.devices.flat[0].platform == "gpu"
