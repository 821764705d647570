"""Memory options: checks, suggestions for a step that does not fit, and descriptions."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import jax

from jaxsp import attention
from jaxsp.config.schema import Config, MemoryConfig
from jaxsp.core import axes, errors
from jaxsp.core.errors import UserError
from jaxsp.model.remat import RematPolicy
from jaxsp.runtime import device_mesh, distributed
from jaxsp.training import (
    available_memory,
    compile_options,
    host_offload,
    memory_fit,
    memory_formula,
    train_step,
)
from jaxsp.training.memory_fit import CompiledStep, MemoryUse
from jaxsp.training.program import Program

WRONG_OFFLOAD_RELEASES = ("0.10.2", "0.11.0")
"""jax releases that read offloaded activations back in the wrong order (openxla/xla PR 46231)."""

MIN_HOST_STATE_RELEASE = host_offload.MIN_RELEASE

MIN_DOUBLE_BUFFER_RELEASE = (0, 11, 2)
"""First jax release whose copies of offloaded arrays are right in double-buffered loops, which XLA
uses from optimization level O1 on."""


def find_problems(config: Config, *, platform: str, version: str = jax.__version__) -> list[str]:
    """Reasons that the memory options of a config of one row length do not work with this release
    of JAX on these devices."""
    memory = config.memory
    problems = []
    release = compile_options.parse_version(version)
    if memory.offload_activations != "none":
        requested = f"memory.offload_activations = {memory.offload_activations}: jax {version}"
        if version in WRONG_OFFLOAD_RELEASES:
            problems.append(
                f"{requested} reads offloaded activations back in the wrong order, and gradients "
                "would be wrong. Install another release, or use memory.offload_activations=none."
            )
        elif release < MIN_HOST_STATE_RELEASE and platform == "cpu":
            problems.append(
                f"{requested} cannot compile it for CPUs. Install jax 0.11.1 or later (Python "
                "3.12), or use memory.offload_activations=none; on GPUs it works."
            )
    if memory.offload_optimizer != "none" and release < MIN_HOST_STATE_RELEASE:
        problems.append(
            f"memory.offload_optimizer = {memory.offload_optimizer}: jax {version} cannot keep "
            "arrays in host memory inside shard_map and loops. Install jax 0.11.1 or later "
            "(Python 3.12), or use memory.offload_optimizer=none."
        )
    problems += _find_layer_stack_problems(memory, version)
    problems += _find_level_problems(memory, release)
    tokens = config.data.max_row_tokens * config.batch.rows_per_microbatch
    tokens //= config.mesh.degree
    tile = memory.mlp_tile_tokens
    if RematPolicy(remat=memory.remat).is_mlp_saved and tile != "auto" and tile < tokens:
        problems.append(
            f"memory.mlp_tile_tokens = {tile}: must be at least {tokens}, all tokens of a device, "
            f"because memory.remat = {memory.remat} cannot keep activations of tiles. "
            "Use memory.mlp_tile_tokens=auto, or memory.remat=auto."
        )
    return problems


def _find_level_problems(memory: MemoryConfig, release: tuple[int, ...]) -> list[str]:
    """Reasons that offloading does not work at the optimization level that the user has set."""
    level = jax.config.values["jax_optimization_level"]
    is_offloaded = not memory.offload_activations == memory.offload_optimizer == "none"
    if not is_offloaded or level not in ("O1", "O2", "O3") or release >= MIN_DOUBLE_BUFFER_RELEASE:
        return []
    return [
        f"JAX_OPTIMIZATION_LEVEL = {level}: copies of offloaded arrays would have wrong offsets in "
        "loops (openxla/xla PR 47218). Unset it, install jax 0.11.2 or later, or use "
        "memory.offload_activations=none memory.offload_optimizer=none."
    ]


def _find_layer_stack_problems(memory: MemoryConfig, version: str) -> list[str]:
    """Reasons that the backward pass of model/layer_stack.py does not work with this release."""
    if compile_options.parse_version(version) >= MIN_HOST_STATE_RELEASE:
        return []
    requested = []
    if memory.offload_every > 1:
        requested.append(("offload_every", str(memory.offload_every), "1"))
    if memory.offload_during_attention == "always":
        requested.append(("offload_during_attention", "always", "auto"))
    return [
        f"memory.{name} = {value}: jax {version} cannot keep arrays in host memory inside "
        "shard_map and loops. Install jax 0.11.1 or later (Python 3.12), or use "
        f"memory.{name}={default}."
        for name, value, default in requested
    ]


def compile_fitting_step(
    program: Program,
    *,
    workspace_bytes: int,
    on_candidate: Callable[[Program], None] = lambda candidate: None,
) -> CompiledStep:
    """Chooses the memory options that are `auto`, and compiles the step.

    Args:
        workspace_bytes: estimate of the attention kernel's workspace.
        on_candidate: called with a program before it is compiled.

    Raises: UserError if the step does not fit; RuntimeError if XLA ignored some offloading.
    """

    def measure(run: jax.stages.Compiled) -> MemoryUse:
        return memory_fit.max_over_processes(
            memory_fit.read_memory_use(
                run, kernel=program.attend.kernel, workspace_bytes=workspace_bytes
            )
        )

    def compile_candidate(candidate: Program) -> jax.stages.Compiled:
        on_candidate(candidate)
        return train_step.compile(candidate)

    limits = available_memory.find_limits(program.mesh.devices.flat)
    usable = available_memory.subtract_reserves(program, limits)
    step = memory_fit.fit(
        program,
        limit=usable,
        workspace_bytes=workspace_bytes,
        compile_step=compile_candidate,
        measure=measure,
    )
    check_offloads(step.program, step.memory_use)
    # Refuse only what exceeds the real limits: reserves and estimates may be too large
    is_device_short = step.memory_use.device > limits.device
    if is_device_short or step.memory_use.host > limits.pinned:
        shortage = step.shortage
        if not is_device_short:
            shortage = memory_fit.describe_shortage(
                step.memory_use, usable._replace(device=math.inf)
            )
        changes = suggest_changes(program, is_device_short=is_device_short)
        raise UserError(f"the step needs {shortage}. Try {errors.format_choices(changes)}.")
    return step


def suggest_changes(program: Program, *, is_device_short: bool) -> list[str]:
    """Suggestions: changes that reduce a step's memory and work with this release of JAX and this
    model."""
    if is_device_short:
        memory_changes = _device_memory_changes(program)
    else:
        memory_changes = [
            change
            for field in _OFFLOAD_FIELDS
            for change in _adjacent_levels(program, field, offset=-1)
        ]
        memory_changes = _host_memory_changes(program) + memory_changes
        if not memory_changes:
            return [
                "nodes with more memory: a checkpoint's copy of the weights and the optimizer "
                "state has to fit"
            ]
    suggestions = []
    for change in memory_changes:
        config = memory_fit.replace_memory(program, **change).config
        if not find_problems(config, platform="gpu"):  # a limit is known only for GPUs
            suggestions += [f"memory.{name}={value}" for name, value in change.items()]
    if is_device_short:
        suggestions += _batch_changes(program)
    seq = 2 * program.mesh.shape[axes.SEQ]
    if _can_split_rows(program, seq):
        suggestions.append(f"mesh.seq={seq} on twice the devices")
    return [*suggestions, "shorter rows"]


_OFFLOAD_FIELDS = ("offload_activations", "offload_optimizer")
"""Fields of MemoryConfig whose values are levels of offloading."""


def _adjacent_levels(program: Program, field: str, *, offset: int) -> list[dict[str, str]]:
    """Change of a field of _OFFLOAD_FIELDS to the level at this offset; empty if there is none."""
    levels = get_args(MemoryConfig.model_fields[field].annotation)
    index = levels.index(getattr(program.config.memory, field)) + offset
    return [{field: levels[index]}] if 0 <= index < len(levels) else []


def _host_memory_changes(program: Program) -> list[dict[str, Any]]:
    """Changes of `offload_every` that reduce host memory."""
    memory = program.config.memory
    policy = RematPolicy(remat="full", offload_activations=memory.offload_activations)
    if not policy.can_split_layers or policy.is_attention_offloaded:
        return []
    num_layers = program.model.num_layers
    now = dataclasses.replace(policy, offload_every=memory.offload_every)
    more = dataclasses.replace(policy, offload_every=2 * memory.offload_every)
    if more.num_offloaded_inputs(num_layers) >= now.num_offloaded_inputs(num_layers):
        return []
    change: dict[str, Any] = {"offload_every": more.offload_every}
    if memory.remat not in ("auto", "full"):
        change["remat"] = "full"
    return [change]


def _device_memory_changes(program: Program) -> list[dict[str, Any]]:
    """Changes of memory options that reduce device memory, each by one level."""
    policy = program.remat_policy
    changes: list[dict[str, Any]] = []
    is_fixed = program.config.memory.remat != "auto"
    if is_fixed and policy.is_attention_saved and not policy.is_attention_offloaded:
        changes.append({"remat": "auto"})
    if policy.can_split_layers and program.config.memory.offload_during_attention == "never":
        changes.append({"offload_during_attention": "auto"})
    if not policy.is_input_offloaded:
        changes += _adjacent_levels(program, "offload_activations", offset=1)
    changes += _adjacent_levels(program, "offload_optimizer", offset=1)
    automatic = memory_fit.replace_memory(program, mlp_tile_tokens="auto", loss_tile_tokens="auto")
    if min(automatic.mlp_tiles) < min(program.mlp_tiles):
        changes.append({"mlp_tile_tokens": "auto"})
    if min(automatic.loss_tiles) < min(program.loss_tiles):
        changes.append({"loss_tile_tokens": "auto"})
    return changes


def _batch_changes(program: Program) -> list[str]:
    """Changes of rows and segments that reduce device memory."""
    config = program.config
    changes = []
    if config.batch.rows_per_microbatch > 1:
        changes.append("batch.rows_per_microbatch=1")
    if program.num_microbatches > 1:  # with one, gradients exist only in the backward pass
        changes.append(
            f"batch.rows_per_step={config.batch.rows_per_step // program.num_microbatches}"
        )
    if config.data.max_segments_per_row > 1:
        segments = 1 if config.data.max_segments_per_row <= 8 else 8
        changes.append(f"data.max_segments_per_row={segments}")
    return changes


def _can_split_rows(program: Program, seq: int) -> bool:
    """True if the config's attention can shard rows over `seq` devices."""
    config = program.config
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"seq": seq})})
    try:
        strategy = attention.choose_strategy(config, program.model)
    except UserError:
        return False
    sizes = dict(program.mesh.shape) | {axes.SEQ: seq}
    return not device_mesh.find_division_problems(
        config, sizes, layout=strategy.layout, with_training=False
    )


def describe(program: Program) -> str:
    """Describes the memory options of a run; those that are `auto` are not decided yet."""
    memory = program.config.memory
    tiles = f": {_describe_tiles(program)}"
    if "auto" in (memory.mlp_tile_tokens, memory.loss_tile_tokens):
        tiles = ", in tiles only if the step does not fit otherwise"
    remat: str = memory.remat
    if program.remat_policy.is_attention_offloaded:
        remat = program.remat_policy.remat
    parts = [f"{program.tokens_per_device:,} tokens per device{tiles}", _RECOMPUTED[remat]]
    if program.remat_policy.is_input_offloaded:
        arrays = "layer inputs"
        if memory.offload_every > 1:
            arrays = f"one of {memory.offload_every} layer inputs"
        if program.remat_policy.is_attention_offloaded:
            arrays += " and attention outputs"
        parts.append(f"{arrays} offloaded to host memory")
    if program.has_offloaded_state:
        parts.append(_describe_traffic(program))
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
    size = memory_fit.format_bytes
    use = step.memory_use
    program = step.program
    device = f"{size(use.device)} on each device"
    if use.uncounted_workspace:
        device += f" and about {size(use.uncounted_workspace)} for cuDNN"
    if use.workspace:
        estimate = size(use.estimated_workspace)
        device += f" ({size(use.workspace)} of it cuDNN's workspace, estimated {estimate})"
    if math.isfinite(step.memory_limit.device):
        device += f" of {size(step.memory_limit.device)} available"
    has_offloaded = program.has_offloaded_state or program.remat_policy.is_input_offloaded
    if has_offloaded and program.mesh.devices.flat[0].platform == "cpu":
        device += " (including what is offloaded: a CPU has one memory)"
    if use.host:
        device += f", {size(use.host)} of host memory per device"
    remat = f"remat {program.remat_policy.remat}"
    if step.full_remat_reason:
        remat += f", because {step.full_remat_reason}"
    parts = [f"it needs {device}", remat, _describe_tiles(program)]
    if program.remat_policy.offloads_during_attention:
        parts.append("a layer's input and gradient in host memory during attention")
    if step.shortage:
        parts.append(
            "fragmentation, NCCL and checkpoints may need more than is left: "
            "it may run out of memory"
        )
    return "; ".join(parts)


def _describe_tiles(program: Program) -> str:
    """Describes the tile sizes of the layers and of the loss."""

    def describe_tile(tile: int) -> str:
        is_whole = tile >= program.tokens_per_device
        return "all tokens at once" if is_whole else f"{tile:,} tokens at a time"

    return f"layers {describe_tile(program.mlp_tile)}, loss {describe_tile(program.loss_tile)}"


def _describe_traffic(program: Program) -> str:
    """Describes the arrays of offload_optimizer in host memory, and the bytes copied per step."""
    offloaded = memory_formula.program_offloaded_bytes(program)
    weights = offloaded.weights
    state = weights + offloaded.moments
    arrays = "float32 weights"
    to_device = weights + state
    to_host = state
    if program.has_offloaded_gradients:
        # To the device, with m microbatches: weights 2 m times (forward and backward), gradients
        # 2 (m - 1) times (both terms of each sum), and their total 3 times (to divide it by the
        # loss tokens, for the norm, and for the update). To the host: gradients m times, their sums
        # m - 1 times, and the divided total. Frozen weights go to the device only
        num_microbatches = program.num_microbatches
        to_device = (4 * num_microbatches + 1) * weights + state
        to_device += 2 * num_microbatches * offloaded.frozen
        to_host = 2 * num_microbatches * weights + state
        arrays = "float32 weights, moments and gradients"
        if offloaded.frozen:
            arrays = "frozen weights, and float32 adapters, moments and gradients"
    elif offloaded.moments:
        arrays = "float32 weights and moments"
    size = memory_fit.format_bytes
    return (
        f"{arrays} in host memory; each step copies {size(to_device)} to each device and "
        f"{size(to_host)} back"
    )


def check_offloads(program: Program, memory_use: MemoryUse) -> None:
    """Checks that the compiled step offloads what the config requests.

    Raises: RuntimeError if XLA ignored some of the offloading.
    """
    offloaded = memory_formula.program_offloaded_bytes(program)
    least = offloaded.total - offloaded.gradients
    if is_gpu(program) and memory_use.host < least:
        size = memory_fit.format_bytes
        raise RuntimeError(
            f"memory.offload_activations and memory.offload_optimizer need {size(least)} of host "
            f"memory per device, but the compiled step has {size(memory_use.host)}: XLA has "
            "ignored some of the offloading. This is a bug. As a workaround, use "
            "memory.offload_activations=none memory.offload_optimizer=none."
        )


def reserve_host_memory(program: Program, host_bytes: int) -> None:
    """Reserves the host memory that each device's step needs.

    Call before weights are loaded: see `host_offload.reserve_pool`.
    """
    if host_bytes and is_gpu(program):
        if jax.process_index() == 0:
            distributed.log(
                f"reserving {memory_fit.format_bytes(host_bytes)} of pinned host memory for each "
                "GPU, which can take minutes"
            )
        try:
            host_offload.reserve_pool(program.mesh.local_devices, host_bytes)
        except jax.errors.JaxRuntimeError as error:
            changes = suggest_changes(program, is_device_short=False)
            raise UserError(
                f"XLA could not reserve {memory_fit.format_bytes(host_bytes)} of pinned host "
                f"memory for each device: {str(error).splitlines()[0]} Try "
                f"{errors.format_choices(changes)}, or a larger XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB "
                "(for each device) if the node has more free memory."
            ) from None


def is_gpu(program: Program) -> bool:
    """True if the devices are GPUs, which have memory of their own."""
    return program.mesh.devices.flat[0].platform == "gpu"
