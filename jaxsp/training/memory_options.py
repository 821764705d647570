"""Memory options: checks, suggestions if a step does not fit, and descriptions."""

import math

import jax

from jaxsp import attention
from jaxsp.config.schema import Config, MemoryConfig
from jaxsp.core import axes, errors
from jaxsp.core.errors import UserError
from jaxsp.runtime import device_mesh
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
"""Releases that silently read offloaded activations in the wrong order (openxla/xla PR 46231)."""

MIN_HOST_STATE_RELEASE = (0, 11, 1)
"""First release of jax that permits arrays in host memory in shard_map and loops."""


def find_problems(config: Config, *, platform: str, version: str = jax.__version__) -> list[str]:
    """Reasons that a config's memory options do not work with this release of JAX on these
    devices."""
    memory, found = config.memory, []
    release = compile_options.parse_version(version)
    if memory.offload_activations != "none":
        asked = f"memory.offload_activations = {memory.offload_activations}"
        if version in WRONG_OFFLOAD_RELEASES:
            found.append(
                f"{asked}: jax {version} reads offloaded activations back in the wrong order, and gradients would be "
                "wrong. Install another release, or use memory.offload_activations=none."
            )
        elif release < MIN_HOST_STATE_RELEASE and platform == "cpu":
            found.append(
                f"{asked}: jax {version} cannot compile it for CPUs. Install jax 0.11.1 or later (Python 3.12), "
                "or use memory.offload_activations=none; on GPUs it works."
            )
    if memory.offload_optimizer != "none" and release < MIN_HOST_STATE_RELEASE:
        found.append(
            f"memory.offload_optimizer = {memory.offload_optimizer}: jax {version} cannot keep arrays in host memory inside "
            "shard_map and loops. Install jax 0.11.1 or later (Python 3.12), or use memory.offload_optimizer=none."
        )
    tokens = config.data.max_row_tokens * config.batch.rows_per_microbatch // config.mesh.seq
    tile = memory.mlp_tile_tokens
    if memory.remat == "save_attention_and_mlp" and tile != "auto" and tile < tokens:
        found.append(
            f"memory.mlp_tile_tokens = {tile}: must be at least {tokens}, all tokens of a device, "
            "because memory.remat = save_attention_and_mlp cannot keep activations of tiles. "
            "Use memory.mlp_tile_tokens=auto, or memory.remat=auto."
        )
    return found


def compile_fitting_step(program: Program, *, workspace_bytes: int) -> CompiledStep:
    """Chooses the memory options that are `auto`, and compiles the step.

    Args:
        workspace_bytes: estimate of the attention kernel's workspace.

    Raises: UserError if the step does not fit; RuntimeError if XLA ignored some offloading.
    """

    def measure(run: jax.stages.Compiled) -> MemoryUse:
        return memory_fit.max_over_processes(
            memory_fit.read_memory_use(
                run, kernel=program.attend.kernel, workspace_bytes=workspace_bytes
            )
        )

    limits = available_memory.find_limits(program)
    room = available_memory.subtract_reserves(program, limits)
    found = memory_fit.fit(
        program,
        limit=room,
        workspace_bytes=workspace_bytes,
        compile_step=train_step.compile,
        measure=measure,
    )
    check_offloads(found.program, found.memory_use)
    # a step is not refused because of margins and estimates only
    if found.memory_use.device > limits.device or found.memory_use.host > limits.pinned:
        ways = suggest_changes(program, is_device_short=found.memory_use.device_total > room.device)
        raise UserError(f"the step needs {found.shortage}. Try {errors.format_choices(ways)}.")
    return found


def suggest_changes(program: Program, *, is_device_short: bool) -> list[str]:
    """Suggestions: changes that reduce a step's memory and work with this release of JAX and this
    model."""
    config = program.config
    memory = config.memory
    if not is_device_short and memory.offload_activations == memory.offload_optimizer == "none":
        return [
            "nodes with more memory: a checkpoint's copy of the weights and the optimizer state has to fit"
        ]
    changes = (
        _device_memory_changes(program) if is_device_short else _host_memory_changes(config.memory)
    )
    platform = "gpu"  # only GPUs have a known size
    works = [
        change
        for change in changes
        if not find_problems(_replace_memory(config, change), platform=platform)
    ]
    ways = [f"memory.{name}={value}" for change in works for name, value in change.items()]
    if is_device_short:
        ways += _batch_changes(program)
    seq = program.mesh.shape[axes.SEQ]
    if _can_split_rows(program, 2 * seq):
        ways.append(f"mesh.seq={2 * seq} on twice the devices")
    return [*ways, "shorter rows"]


def _device_memory_changes(program: Program) -> list[dict[str, str]]:
    """Changes of memory options that reduce memory of the device, each by one level."""
    memory = program.config.memory
    states = ("none", "state", "state_and_gradients")
    changes = []
    if (
        memory.remat not in ("auto", "full")
        and memory.offload_activations != "layer_inputs_and_attention"
    ):
        changes.append({"remat": "auto"})
    if memory.offload_activations == "none":
        changes.append({"offload_activations": "layer_inputs"})
    if memory.offload_optimizer != states[-1]:
        changes.append({"offload_optimizer": states[states.index(memory.offload_optimizer) + 1]})
    automatic = memory_fit.replace_memory(program, mlp_tile_tokens="auto", loss_tile_tokens="auto")
    if min(automatic.mlp_tiles) < min(program.mlp_tiles):
        changes.append({"mlp_tile_tokens": "auto"})
    if min(automatic.loss_tiles) < min(program.loss_tiles):
        changes.append({"loss_tile_tokens": "auto"})
    return changes


def _host_memory_changes(memory: MemoryConfig) -> list[dict[str, str]]:
    """Changes of memory options that reduce memory of the host, each by one level."""
    changes = []
    if memory.offload_activations != "none":
        below = (
            "layer_inputs" if memory.offload_activations == "layer_inputs_and_attention" else "none"
        )
        changes.append({"offload_activations": below})
    if memory.offload_optimizer != "none":
        changes.append(
            {
                "offload_optimizer": "state"
                if memory.offload_optimizer == "state_and_gradients"
                else "none"
            }
        )
    return changes


def _batch_changes(program: Program) -> list[str]:
    """Changes of rows and documents that reduce memory of the device."""
    config, ways = program.config, []
    rows = device_mesh.num_groups(program.mesh) * config.batch.rows_per_microbatch
    if config.batch.rows_per_microbatch > 1:
        ways.append("batch.rows_per_microbatch=1")
    if (
        config.batch.rows_per_step > rows
    ):  # with one microbatch, gradients exist only in the backward pass
        ways.append(f"batch.rows_per_step={rows}")
    if config.data.max_segments_per_row > 1:
        ways.append(
            f"data.max_segments_per_row={1 if config.data.max_segments_per_row <= 8 else 8}"
        )
    return ways


def _replace_memory(config: Config, change: dict[str, str]) -> Config:
    return config.model_copy(update={"memory": config.memory.model_copy(update=change)})


def _can_split_rows(program: Program, seq: int) -> bool:
    """True if the config's attention can shard rows over `seq` devices."""
    config, model = program.config, program.model
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"seq": seq})})
    try:
        kind = attention.choose_strategy(config, model)
    except UserError:
        return False
    sizes = dict(program.mesh.shape) | {axes.SEQ: seq}
    return not device_mesh.find_division_problems(
        config, sizes, degree=kind.layout_degree, with_training=False
    )


def describe(program: Program) -> str:
    """Describes the memory options of a run; those that are `auto` are not decided yet."""
    memory, parts = program.config.memory, []
    if "auto" in (memory.mlp_tile_tokens, memory.loss_tile_tokens):
        parts.append(
            f"{program.tokens_per_device:,} tokens per device, in tiles only if the step does not fit otherwise"
        )
    else:
        parts.append(f"{program.tokens_per_device:,} tokens per device: {_describe_tiles(program)}")
    recomputed = {
        "none": "elementwise operations are recomputed in the backward pass",
        "save_attention_and_mlp": "layers are recomputed in the backward pass, except attention and the MLP's wide products",
        "save_attention": "layers are recomputed in the backward pass, except attention",
        "full": "layers are recomputed in the backward pass, including attention",
        "auto": "layers are recomputed in the backward pass, as far as needed to fit",
    }
    parts.append(
        recomputed[
            "save_attention"
            if memory.remat == "auto" and program.remat_policy.is_attention_offloaded
            else memory.remat
        ]
    )
    offloaded = {
        "layer_inputs": "layer inputs",
        "layer_inputs_and_attention": "layer inputs and attention outputs",
    }
    if memory.offload_activations != "none":
        parts.append(f"{offloaded[memory.offload_activations]} offloaded to host memory")
    if program.has_offloaded_state:
        parts.append(_describe_traffic(program))
    parts.append(f"gradients summed in {memory.grad_reduce_dtype}")
    return "; ".join(parts)


def describe_compiled(compiled: CompiledStep) -> str:
    """Describes the memory of a compiled step, and the memory options that were chosen for it."""
    size, needs, room, program = (
        memory_fit.format_bytes,
        compiled.memory_use,
        compiled.memory_limit,
        compiled.program,
    )
    parts = [f"{size(needs.device)} on each device"]
    if needs.uncounted_workspace:
        parts[0] += f" and about {size(needs.uncounted_workspace)} for cuDNN"
    if needs.workspace:
        parts[0] += (
            f" ({size(needs.workspace)} of it cuDNN's workspace, estimated {size(needs.estimated_workspace)})"
        )
    if math.isfinite(room.device):
        parts[0] += f" of {size(room.device)} available"
    if needs.host:
        parts.append(f"{size(needs.host)} of host memory per device")
    if program.mesh.devices.flat[0].platform == "cpu" and (
        program.has_offloaded_state or program.remat_policy.offload_activations != "none"
    ):
        parts[0] += " (including what is offloaded: a CPU has one memory)"
    decided = f"remat {program.remat_policy.remat}"
    if compiled.full_remat_reason:
        decided += f", because {compiled.full_remat_reason}"
    decided += f"; {_describe_tiles(program)}"
    tight = ""
    if compiled.shortage:
        tight = "; fragmentation, NCCL and checkpoints may need more than is left: it may run out of memory"
    return f"it needs {', '.join(parts)}; {decided}{tight}"


def _describe_tiles(program: Program) -> str:
    """Describes the tile sizes of the layers and of the loss."""
    layers, loss = (
        _describe_tile(tile, program.tokens_per_device)
        for tile in (program.mlp_tile, program.loss_tile)
    )
    return f"layers {layers}, loss {loss}"


def _describe_tile(tile: int, tokens: int) -> str:
    return "all tokens at once" if tile >= tokens else f"{tile:,} tokens at a time"


def _describe_traffic(program: Program) -> str:
    """Describes what the offloaded optimizer keeps on the host, and the copies of a step."""
    found = memory_formula.program_offloaded_bytes(program)
    weights, state = found.weights, found.weights + found.moments
    size = memory_fit.format_bytes
    num_microbatches = program.num_microbatches
    if program.config.memory.offload_optimizer == "state":
        there, what = (
            weights + state,
            "float32 weights and moments" if found.moments else "float32 weights",
        )
        back = state
    else:
        # weights forward and backward, gradients summed, finished, measured, used
        there = (
            2 * num_microbatches * weights
            + (num_microbatches - 1) * 2 * weights
            + 3 * weights
            + state
        )
        back = num_microbatches * weights + (num_microbatches - 1) * weights + weights + state
        what = "float32 weights, moments and gradients"
    return f"{what} in host memory; each step copies {size(there)} to each device and {size(back)} back"


def check_offloads(program: Program, memory_use: MemoryUse) -> None:
    """Raises: RuntimeError if the compiled step offloads less than the config requests."""
    found = memory_formula.program_offloaded_bytes(program)
    least = found.total - found.gradients
    if is_gpu(program) and memory_use.host < least:
        raise RuntimeError(
            f"memory.offload_activations and memory.offload_optimizer need {memory_fit.format_bytes(least)} of "
            f"host memory per device, but the compiled step has {memory_fit.format_bytes(memory_use.host)}: XLA has "
            "ignored some of the offloading. This is a bug. As a workaround, use "
            "memory.offload_activations=none memory.offload_optimizer=none."
        )


def reserve_host_memory(program: Program, host_bytes: int) -> None:
    """Reserves the host memory that each device's step needs. Call before weights are loaded: see
    `host.reserve`."""
    if host_bytes and is_gpu(program):
        try:
            host_offload.reserve_pool(program.mesh.local_devices, host_bytes)
        except jax.errors.JaxRuntimeError as error:
            ways = suggest_changes(program, is_device_short=False)
            raise UserError(
                f"XLA could not reserve {memory_fit.format_bytes(host_bytes)} of pinned host memory for each device: "
                f"{str(error).splitlines()[0]} Try {errors.format_choices(ways)}, or a larger "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (for each device) if the node has more free memory."
            ) from None


def is_gpu(program: Program) -> bool:
    """True if the devices have their own memory."""
    return program.mesh.devices.flat[0].platform == "gpu"
