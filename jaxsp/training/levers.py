"""What a run's memory levers are, whether they can be pulled here, and what the compiled step takes with them."""

import dataclasses
import functools
import math
import os
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp import attention
from jaxsp.core import axes, config, errors, jobs, processes
from jaxsp.core import mesh as meshes
from jaxsp.model import layers
from jaxsp.training import host, loss, optimizer, step, xla

WRONG_GRADIENTS = ("0.10.2", "0.11.0")
"""Releases that read offloaded activations back in the wrong order, without a word (openxla/xla PR 46231)."""

HOST_STATE_FROM = (0, 11, 1)
"""The first release of jax whose arrays in host memory go through shard_map and loops."""

GIB = 2**30


class Needs(NamedTuple):
    """What a compiled step takes for each device, in bytes."""

    device: int
    host: int
    uncounted: int
    """An estimate of what the attention kernel takes on the device beside that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A step that is compiled."""

    run: jax.stages.Compiled
    program: step.Program
    """With memory.remat decided."""
    needs: Needs
    room: "Room"
    """What there is."""
    why_full: str = ""
    """What made `auto` compute attention again; empty otherwise."""


def problems(settings: config.Config, *, platform: str, version: str = jax.__version__) -> list[str]:
    """What speaks against the levers that a config asks for, with this release of JAX on these devices."""
    memory, found = settings.memory, []
    if memory.offload_activations == "residual_and_attention" and settings.attention.kernel == "reference":
        found.append(
            "memory.offload_activations = residual_and_attention: attention.kernel = reference, which is for tests, keeps its "
            "scores and names nothing else. Use memory.offload_activations=residual, or another attention.kernel."
        )
    release = xla.numbers(version)
    if memory.offload_activations != "none":
        asked = f"memory.offload_activations = {memory.offload_activations}"
        if version in WRONG_GRADIENTS:
            found.append(
                f"{asked}: jax {version} reads offloaded activations back in the wrong order, and gradients would be wrong "
                "without a word. Install another release, or use memory.offload_activations=none."
            )
        elif release < HOST_STATE_FROM and platform == "cpu":
            found.append(
                f"{asked}: jax {version} cannot compile it for CPUs. Install jax 0.11.1 or later (Python 3.12), "
                "or use memory.offload_activations=none; on GPUs it works."
            )
    if memory.offload_optimizer != "none" and release < HOST_STATE_FROM:
        found.append(
            f"memory.offload_optimizer = {memory.offload_optimizer}: jax {version} cannot keep arrays in host memory inside "
            "shard_map and loops. Install jax 0.11.1 or later (Python 3.12), or use memory.offload_optimizer=none."
        )
    return found


def ready(program: step.Program, *, uncounted: int) -> Ready:
    """The compiled step; where memory.remat is auto, the first of attention and full that fits.

    Raises: UserError where the devices cannot hold it; RuntimeError where nothing was offloaded that should have been.
    """
    room, why = _room(program), ""
    for remat in remats(program):
        decided = dataclasses.replace(program, config=changed(program.config, remat=remat))
        run = step.compile(decided)
        needs = _most(measured(run, uncounted))
        check_offloads(decided, needs)
        last = Ready(run=run, program=decided, needs=needs, room=room, why_full=why)
        short = shortage(needs, room)
        if not short:
            return last
        why = f"to keep what it gave takes {short}"
    if needs.device <= room.device and needs.host <= room.host:
        return last  # but for the estimate
    ways = ways_out(program, device_is_short=needs.device + needs.uncounted > room.device)
    raise errors.UserError(f"the step takes {short}. Try {', '.join(ways[:-1])}{', or ' * (len(ways) > 1)}{ways[-1]}.")


def remats(program: step.Program) -> list[str]:
    """What memory.remat may become, in the order of trying: the first that fits is taken."""
    also_full = program.config.memory.remat == "auto" and not program.how.offloads_attention
    return [program.how.remat, *(["full"] if also_full else [])]


def ways_out(program: step.Program, *, device_is_short: bool) -> list[str]:
    """Changes that make a step smaller where it is too large, and that work with this release of JAX and this model."""
    settings = program.config
    memory, platform = settings.memory, "gpu"  # only a GPU says how much it holds
    changes: list[dict[str, str]] = []
    state = ("none", "state", "state_and_gradients")
    if device_is_short:
        if memory.remat in ("none", "attention") and memory.offload_activations != "residual_and_attention":
            changes.append({"remat": "auto"})
        if memory.offload_activations == "none":
            changes.append({"offload_activations": "residual"})
        if memory.offload_optimizer != state[-1]:
            changes.append({"offload_optimizer": state[state.index(memory.offload_optimizer) + 1]})
    else:
        if memory.offload_activations != "none":
            below = "residual" if memory.offload_activations == "residual_and_attention" else "none"
            changes.append({"offload_activations": below})
        if memory.offload_optimizer != "none":
            changes.append({"offload_optimizer": state[state.index(memory.offload_optimizer) - 1]})
    works = [change for change in changes if not problems(changed(settings, **change), platform=platform)]
    ways = [f"memory.{name}={value}" for change in works for name, value in change.items()]
    tile, seq = min(program.tile, program.tokens), program.mesh.shape[axes.SEQ]
    if device_is_short and tile > 1024:
        ways.append(f"memory.mlp_tile_tokens={tile // 4}")
    if _can_share(program, 2 * seq):
        ways.append(f"mesh.seq={2 * seq} on twice the devices")
    return [*ways, "shorter rows"]


def _can_share(program: step.Program, seq: int) -> bool:
    """Whether so many devices could share rows by the attention that the config asks for."""
    settings, model = program.config, program.model
    settings = settings.model_copy(update={"mesh": settings.mesh.model_copy(update={"seq": seq})})
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    try:
        kind = attention.choose_kind(settings, window=model.sliding_window, **heads)
    except errors.UserError:
        return False
    sizes = dict(program.mesh.shape) | {axes.SEQ: seq}
    return not meshes.divisions(settings, sizes, degree=kind.degree, with_training=False)


def changed(settings: config.Config, **memory: str) -> config.Config:
    """The config with other fields of its group memory."""
    return settings.model_copy(update={"memory": settings.memory.model_copy(update=memory)})


def describe(program: step.Program) -> str:
    """The levers of a run in words."""
    memory, tokens, parts = program.config.memory, program.tokens, []
    by, to = (_at_a_time(tile, tokens) for tile in (program.tile, _logit_tile(program)))
    parts.append(f"a device's {tokens:,} tokens go through a layer {by}, and to logits {to}")
    again = {
        "none": "these tiles are computed again in the backward pass, attention is not"
        if program.tile < tokens
        else "no matrix product and no attention is computed again in the backward pass",
        "attention": "layers are computed again in the backward pass, attention is not",
        "full": "layers are computed again in the backward pass, attention too",
        "auto": "layers are computed again in the backward pass, attention only if it does not fit otherwise",
    }
    parts.append(again["attention" if memory.remat == "auto" and program.how.offloads_attention else memory.remat])
    waits = {"residual": "each layer's input", "residual_and_attention": "each layer's input and what attention gave"}
    if memory.offload_activations != "none":
        parts.append(f"{waits[memory.offload_activations]} in host memory meanwhile")
    if program.offloads:
        parts.append(_traffic(program))
    parts.append(f"gradients summed in {memory.grad_reduce_dtype}")
    return "; ".join(parts)


def _logit_tile(program: step.Program) -> int:
    """Tokens whose logits exist at a time."""
    asked = program.config.memory.loss_tile_tokens
    return loss.tile_tokens(num_tokens=program.tokens, vocab_size=program.model.vocab_size, asked=asked)


def takes(ready: Ready) -> str:
    """What a compiled step takes, in words."""
    needs, room = ready.needs, ready.room
    parts = [f"{_size(needs.device)} on each device"]
    if needs.uncounted:
        parts[0] += f" and about {_size(needs.uncounted)} for cuDNN"
    if math.isfinite(room.device):
        parts[0] += f", of {_size(room.device)}"
    if needs.host:
        parts.append(f"{_size(needs.host)} of host memory for each")
    program = ready.program
    if program.mesh.devices.flat[0].platform == "cpu" and (program.offloads or program.how.offload_activations != "none"):
        parts[0] += " (with what is offloaded: a CPU has one memory)"
    again = f"; attention is computed again in the backward pass, because {ready.why_full}" if ready.why_full else ""
    return f"it takes {', '.join(parts)}{again}"


def _at_a_time(tile: int, tokens: int) -> str:
    return "at once" if tile >= tokens else f"{tile:,} at a time"


def _size(of_bytes: int | float) -> str:
    return f"{of_bytes / GIB:.1f} GiB" if of_bytes >= GIB / 10 else f"{of_bytes / 2**20:.1f} MiB"


def _traffic(program: step.Program) -> str:
    """What offloading the optimizer sends between host and device in a step."""
    weights, averages = _offloaded_state(program)
    state = weights + averages
    turns = step.shapes(program)[1].tokens_BL.shape[0]
    if program.config.memory.offload_optimizer == "state":
        there, what = weights + state, "float32 weights and optimizer" if averages else "float32 weights"
        back = state
    else:
        # weights forward and backward, gradients summed, finished, measured, used
        there = 2 * turns * weights + (turns - 1) * 2 * weights + 3 * weights + state
        back = turns * weights + (turns - 1) * weights + weights + state
        what = "float32 weights, optimizer and gradients"
    return f"{what} in host memory, {_size(there)} to each device and {_size(back)} back in a step"


def measured(run: jax.stages.Compiled, uncounted: int) -> Needs:
    """What a compiled step takes, by XLA's account, and beside it an estimate of what that leaves out."""
    found = run.memory_analysis()
    device, of_host = (
        getattr(found, f"{where}argument_size_in_bytes")
        + getattr(found, f"{where}output_size_in_bytes")
        - getattr(found, f"{where}alias_size_in_bytes")
        + getattr(found, f"{where}temp_size_in_bytes")
        for where in ("", "host_")
    )
    return Needs(device, of_host, uncounted)


class Room(NamedTuple):
    """Bytes for each device of this process; infinite where it is not known."""

    device: float
    host: float


@functools.cache
def _room_of(devices: tuple[Any, ...]) -> Room:
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [limit for limit in limits if limit]
    if not known:
        return Room(math.inf, math.inf)
    return Room(min(known), meshes.host_room(os.environ, num_local=jobs.num_local(processes.here(), os.environ)) / len(devices))


def _most(needs: Needs) -> Needs:
    """The needs of the process that needs most: each compiles on its own devices, and all have to decide alike."""
    if jax.process_count() == 1:
        return needs
    return Needs(*map(int, multihost_utils.process_allgather(np.array(needs, np.float32)).max(0)))


def _room(program: step.Program) -> Room:
    local = tuple(program.mesh.local_devices)
    own = _room_of(local)
    if jax.process_count() == 1:
        return own
    # all processes have to decide alike
    of_all = multihost_utils.process_allgather(np.array(own, np.float32))
    return Room(*map(float, of_all.min(0)))


def shortage(needs: Needs, room: Room) -> str:
    """What does not fit, in words; empty if all does."""
    if needs.device + needs.uncounted > room.device:
        cudnn = f", about {_size(needs.uncounted)} of it for cuDNN" if needs.uncounted else ""
        return f"{_size(needs.device + needs.uncounted)} on each device{cudnn}, and there is room for {_size(room.device)}"
    if needs.host > room.host:
        return f"{_size(needs.host)} of host memory for each device, and there is room for {_size(room.host)}"
    return ""


def check_offloads(program: step.Program, needs: Needs) -> None:
    """Raises: RuntimeError where nothing was offloaded that should have been."""
    least = offloaded_bytes(program)
    if _is_gpu(program) and needs.host < least:
        raise RuntimeError(
            f"memory.offload_activations and offload_optimizer put {_size(least)} of each device in host memory, and the "
            f"compiled step has {_size(needs.host)} there: XLA has ignored some of it. This is a bug; "
            "memory.offload_activations=none memory.offload_optimizer=none is right meanwhile."
        )


def _is_gpu(program: step.Program) -> bool:
    return program.mesh.devices.flat[0].platform == "gpu"


def offloaded_bytes(program: step.Program) -> int:
    """What of a device's arrays waits in host memory, at least: layers' inputs, what attention gave, weights and averages."""
    model, how = program.model, program.how
    per_token = 0 if how.offload_activations == "none" else model.hidden_size * program.dtype.itemsize
    if how.offloads_attention:
        per_token += model.num_heads * (model.head_dim * program.dtype.itemsize + 4)
    return model.num_layers * program.tokens * per_token + (sum(_offloaded_state(program)) if program.offloads else 0)


def _offloaded_state(program: step.Program) -> tuple[int, int]:
    """Bytes of a device's float32 weights and of the optimizer's averages that are worth to be offloaded."""
    state = step.shapes(program)[0]

    def of_weight(row: layers.Parameter, weight: Any, opt: Any) -> tuple[int, int]:
        own = 4 * math.prod(weight.sharding.shard_shape(weight.shape)) if host.worth_it(row) else 0
        return own, own * sum(x.shape == weight.shape for x in jax.tree.leaves(opt))

    weights, averages = optimizer.apart(program.table, of_weight, state.master, state.opt)
    return sum(jax.tree.leaves(weights)), sum(jax.tree.leaves(averages))
