"""Decides the memory options that the config leaves open, so that the step fits its devices.

Less recomputation and larger tiles are faster, so candidates are tried from the fastest to the
slowest. A formula skips those that cannot fit, because compiling with autotuning takes minutes on a
GPU. For the others, the memory of the compiled program decides.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.attention import strategies, ulysses
from jaxsp.attention.kernels import cudnn_calls
from jaxsp.config import schema
from jaxsp.core import axes
from jaxsp.model import decoder, layers
from jaxsp.model.config import ModelConfig
from jaxsp.runtime import cluster, device_mesh, distributed
from jaxsp.training import host_offload, sharding, train_step

GIB = 2**30

SKIPPED_ABOVE = 1.1
"""A candidate is not compiled if the formula gives more than this times the memory available on the
device. The formula is 0.93 to 1.08 times what jax 0.12 compiles
(tests/training/test_memory_fit.py)."""

FRAGMENTATION = 0.022
"""Fraction of JAX's part of a device that is left free: 2 % of the device. The step's temporaries
need one contiguous block, and loading weights leaves holes."""

CUDA_BYTES = GIB
"""Memory of a device for CUDA's context, kernels, cuBLAS and cuDNN, outside of JAX's part."""

COMMUNICATOR_BYTES = 1.2 * GIB
"""NCCL's buffers for each communicator. Source: NVIDIA/nccl issue 864: 1.6 GB for one, 6 GB for
three or more; issue 1685: 1.06 GB on 8 H100s."""

ALL_TO_ALL_BYTES = 3.3 * GIB
"""NCCL's additional buffers for all-to-alls among the 8 GPUs of a node, with 7 peers each. Source:
NVIDIA/nccl issue 1685: 4.34 GB after the first all-to-all, 1.06 before."""

REMOTE_PEER_BYTES = 0.07 * GIB
"""NCCL's additional buffers for all-to-alls with each peer on another node: an assumption."""


class Needs(NamedTuple):
    """Memory of a compiled step for each device, in bytes."""

    device: int
    host: int
    uncounted: int = 0
    """Estimate of cuDNN's workspace, where the compiled program does not count it: for GPUs that are absent."""
    workspace: int = 0
    """cuDNN's workspace, where the compiled program counts it."""
    estimate: int = 0
    """Estimate of it, to compare."""

    @property
    def total(self) -> int:
        """Memory of the device, counted or not."""
        return self.device + self.uncounted


class Room(NamedTuple):
    """Memory available to a step on each device, in bytes; infinite if it is unknown."""

    device: float
    host: float
    pool: float = math.inf
    """XLA's limit for pinned host memory, which holds what a step offloads, but no checkpoints."""

    @property
    def pinned(self) -> float:
        """Host memory available for what a step offloads."""
        return float(min(self.host, self.pool))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """A step whose memory options are decided."""

    program: train_step.Program
    run: Any
    """Result of the `compile_step` of `fit`."""
    needs: Needs
    room: Room
    shortage: str = ""
    """Description of what does not fit; empty if everything fits."""
    why_full: str = ""
    """Reason that `auto` recomputes attention; empty if it does not."""


def fit(
    program: train_step.Program,
    *,
    room: Room,
    uncounted: int,
    compile_step: Callable[[train_step.Program], Any],
    measure: Callable[[Any], Needs],
) -> Fitted:
    """Compiles candidates, and returns the first that fits, or else the last one.

    Args:
        uncounted: estimate of the attention kernel's workspace, in bytes.
        compile_step: compiles a program whose memory options are decided.
        measure: memory of what `compile_step` returned; must be equal in all processes, so that all
            choose the same candidate.
    """
    tried = list(candidates(program, is_known=math.isfinite(room.device)))
    scale, why_full = 1.0, ""
    for candidate in tried:
        formula = scale * predict(candidate, uncounted=uncounted)
        is_last = candidate is tried[-1]
        keeps = candidate.how.keeps_attention
        if not is_last and formula > SKIPPED_ABOVE * room.device:
            if keeps:
                why_full = f"keeping attention's output needs about {size(formula)} on each device"
            continue
        run = compile_step(candidate)
        needs = measure(run)
        short = shortage(needs, room)
        # Offloaded arrays are the same for all candidates: another one does not help if host memory is short
        if needs.total <= room.device or is_last:
            because = "" if keeps or program.config.memory.remat == "full" else why_full
            return Fitted(program=candidate, run=run, needs=needs, room=room, shortage=short, why_full=because)
        if keeps:
            why_full = f"keeping attention's output needs {short}"
        scale *= max(1.0, needs.total / formula)
    raise AssertionError("there is at least one candidate, and the last one is compiled")


def candidates(program: train_step.Program, *, is_known: bool) -> Iterator[train_step.Program]:
    """Programs whose memory options are decided, the fastest first.

    Args: is_known: True if the devices' memory is known; if not, tiles have a safe size.
    """
    for remat in _remats(program, is_known=is_known):
        mlp_tiles = program.mlp_tiles if is_known else [program.tile]
        if remat == "attention_and_mlp":  # activations of tiles cannot be kept
            mlp_tiles = [tile for tile in program.mlp_tiles if tile == program.tokens]
        for mlp_tile in mlp_tiles:
            for loss_tile in program.loss_tiles if is_known else [program.loss_tile]:
                yield changed(program, remat=remat, mlp_tile_tokens=mlp_tile, loss_tile_tokens=loss_tile)


def _remats(program: train_step.Program, *, is_known: bool) -> list[str]:
    """Values of memory.remat in the order in which they are tried."""
    memory = program.config.memory
    if memory.remat != "auto":
        return [memory.remat]
    if program.how.offloads_attention:
        return ["attention"]
    frees_memory = memory.offload_activations != "none" or memory.offload_optimizer != "none"
    first = [] if frees_memory or not is_known else ["attention_and_mlp"]
    return [*first, "attention", "full"]


def changed(program: train_step.Program, **memory: Any) -> train_step.Program:
    """The program with other values in the config's group `memory`."""
    settings = program.config
    update = {"memory": settings.memory.model_copy(update=memory)}
    return dataclasses.replace(program, config=settings.model_copy(update=update))


def predict(program: train_step.Program, *, uncounted: int = 0) -> int:
    """Formula for a step's memory on each device, in bytes.

    Arguments, gradients and saved activations are live during the whole step. The largest of four
    phases is added: the backward pass of a layer's MLP, that of its attention, the loss, and the
    gradient of the embedding.

    Args: uncounted: estimate of the attention kernel's workspace.
    """
    model, memory, how = program.model, program.config.memory, program.how
    itemsize, tokens = program.dtype.itemsize, program.tokens
    D, F, V, N = model.hidden_size, model.intermediate_size, model.vocab_size, model.num_layers
    state, gradients = _state_bytes(program)
    stream = tokens * D * itemsize
    results = tokens * model.num_heads * (model.head_dim * itemsize + 4)
    heads = model.num_heads + 2 * model.num_kv_heads

    # what the backward pass keeps
    of_layer = (0 if memory.offload_activations != "none" else stream) + (
        results if how.keeps_attention and not how.offloads_attention else 0
    )
    if how.remat in ("attention_and_mlp", "none") and program.tile >= tokens:  # activations of tiles are not kept
        of_layer += 2 * tokens * F * itemsize
    if how.remat == "none":
        of_layer += tokens * (heads * model.head_dim + D) * itemsize
    kept = N * of_layer
    prefetched = 0
    if memory.offload_activations != "none":
        prefetched = 2 * (stream + (results if how.offloads_attention else 0))

    # the backward pass of one layer
    tile = min(program.tile, tokens)
    after = 3 * D * F + D * model.num_heads * model.head_dim
    if tile < tokens:
        mlp = 4 * tile * F * itemsize + 2 * stream + 5 * tile * D * itemsize + (itemsize + 4) * after
    else:
        mlp = 4 * tile * F * itemsize + 6 * stream + itemsize * after + 5 * D * F
    weights = sum(row.size for row in jax.tree.leaves(program.table["layers"]))
    attention = _attention_bytes(program) + 2 * stream + itemsize * weights + uncounted

    # the loss, before which there are no gradients of this step's first microbatch
    tile = min(program.loss_tile, tokens)
    head, logits = itemsize * V * D, 6 * tile * V
    if tile < tokens:
        at_loss = head + logits + 4 * V * D + 2 * stream
    else:
        at_loss = head + max(logits, 2 * tile * V + 4 * V * D) + 2 * stream
    phases = (
        kept + gradients + prefetched + mlp,
        kept + gradients + prefetched + attention,
        kept + (gradients if program.num_microbatches > 1 else 0) + at_loss,
        gradients + 4 * V * D + 2 * stream,
    )
    return int(state + max(phases))


def _state_bytes(program: train_step.Program) -> tuple[int, int]:
    """Bytes of a device's weights, optimizer state and copies to compute with; and of its gradients."""
    memory, per_weight = program.config.memory, _bytes_per_weight(program)
    state = gradients = 0
    for row in jax.tree.leaves(program.table):
        shard, away = _shard_size(row, program), program.offloads and host_offload.worth_it(row)
        state += 0 if away else per_weight * shard
        if away and row.num_layers and memory.offload_optimizer == "state":
            state += program.dtype.itemsize * shard
        on_host = away and row.num_layers and memory.offload_optimizer == "state_and_gradients"
        gradients += 0 if on_host else 4 * shard
    return state, gradients


def _bytes_per_weight(program: train_step.Program) -> int:
    """Float32 weight and, with AdamW, two moments."""
    return 12 if program.config.optimizer.name == "adamw" else 4


def _shard_size(row: layers.Parameter, program: train_step.Program) -> int:
    """Elements of a weight that a device holds, all layers together."""
    return sharding.shard_size(row, device_mesh.num_shards(program.mesh))


def _attention_bytes(program: train_step.Program) -> int:
    """Queries, keys, values, output and their gradients in the backward pass, as the strategy holds them."""
    model, kind = program.model, program.attend.kind
    head = program.tokens * model.head_dim * program.dtype.itemsize
    repeats = ulysses.kv_repeats(num_kv_heads=model.num_kv_heads, seq=kind.inner)
    q, kv = model.num_heads * head, 2 * model.num_kv_heads * repeats * head
    inputs = 3 * q + kv  # with the output and its gradient
    if kind.degree > 1:
        return inputs + 4 * (q + kv)  # sums in float32, and what travels
    chunks = program.attend.head_chunks
    if chunks == 1:
        return inputs + q + kv + q
    shares_kv = chunks > model.num_kv_heads * repeats // kind.inner
    return inputs + (3 * q + 2 * kv) // chunks + (2 * kv if shares_kv else 0)


# Available memory


def limits(program: train_step.Program) -> Room:
    """Memory that JAX may use on this run's devices and on the host: the minimum over all
    processes.

    All processes get the same limits, so that they choose the same memory options.
    """
    own = _limits(tuple(program.mesh.local_devices))
    if jax.process_count() == 1:
        return own
    of_all = multihost_utils.process_allgather(np.array(own, np.float32))
    return Room(*map(float, of_all.min(0)))


@functools.cache
def _limits(devices: tuple[Any, ...]) -> Room:
    known = [limit for device in devices if (limit := (device.memory_stats() or {}).get("bytes_limit"))]
    if not known:
        return Room(math.inf, math.inf)
    num_local = cluster.num_local(distributed.here(), os.environ, num_devices=len(devices))
    host_room = device_mesh.host_room(num_processes=num_local, num_devices=len(devices))
    return Room(min(known), host_room, device_mesh.pool_limit(os.environ))


def room_of(program: train_step.Program, limits: Room) -> Room:
    """Memory available to a step: these limits minus the needs of fragmentation, NCCL and
    checkpoints.

    Args: limits: JAX's part of a device, meshes.gpu_share of it; and a device's part of its node's
    memory.
    """
    # the rest of the device is for CUDA and NCCL
    missing = max(0.0, CUDA_BYTES + nccl_bytes(program) - limits.device * (1 / device_mesh.gpu_share(os.environ) - 1))
    device = limits.device * (1 - FRAGMENTATION) - missing
    return Room(device, limits.host - checkpoint_bytes(program), limits.pool)


def nccl_bytes(program: train_step.Program) -> float:
    """Estimate of NCCL's buffers on each device, in nodes of meshes.NODE_DEVICES devices."""
    kind = program.attend.kind
    peers = min(kind.inner, device_mesh.NODE_DEVICES) - 1
    remote_peers = max(0, kind.inner - device_mesh.NODE_DEVICES)
    buffers = len(communicators(program.mesh.shape, kind)) * COMMUNICATOR_BYTES
    return buffers + ALL_TO_ALL_BYTES * peers / (device_mesh.NODE_DEVICES - 1) + REMOTE_PEER_BYTES * remote_peers


def communicators(sizes: Mapping[str, int], kind: strategies.Kind) -> set[frozenset[int]]:
    """Groups of devices in which the first device communicates, as device numbers in mesh order."""
    devices = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in axes.ALL])

    def along(names: tuple[str, ...]) -> np.ndarray:
        return devices[tuple(slice(None) if axis in names else 0 for axis in axes.ALL)]

    row = along((axes.SEQ,))
    groups = [*map(along, (axes.ALL, axes.SHARDS, axes.GROUPS, (axes.REPLICA,)))]
    # Ulysses among neighbors, a ring or an all-gather between them
    groups += [row[: kind.inner], row[:: kind.inner]]
    found = {frozenset(group.ravel().tolist()) for group in groups}
    return {group for group in found if len(group) > 1}


def checkpoint_bytes(program: train_step.Program) -> int:
    """Host memory, in bytes per device, for an asynchronous checkpoint's copy of the state on the
    device."""
    per_weight = _bytes_per_weight(program)
    rows = jax.tree.leaves(program.table)
    return sum(per_weight * _shard_size(row, program) for row in rows if not (program.offloads and host_offload.worth_it(row)))


class Offloaded(NamedTuple):
    """Formula for the bytes of each device's arrays in host memory."""

    activations: int
    weights: int
    moments: int
    """AdamW's moments."""
    gradients: int

    @property
    def total(self) -> int:
        return sum(self)


def offloaded(model: ModelConfig, settings: schema.Config, *, num_shards: int, seq: int) -> Offloaded:
    """Arrays in host memory with a config, if weights are sharded over `num_shards` devices and
    rows over `seq`."""
    memory, itemsize = settings.memory, np.dtype(settings.model.compute_dtype).itemsize
    per_token = 0 if memory.offload_activations == "none" else model.hidden_size * itemsize
    if memory.offload_activations == "residual_and_attention":
        per_token += model.num_heads * (model.head_dim * itemsize + 4)
    tokens = settings.data.longest_row * settings.batch.rows_at_once // seq
    away = [row for row in jax.tree.leaves(decoder.table(model)) if host_offload.worth_it(row)]
    away = [] if memory.offload_optimizer == "none" else away
    weights = sum(4 * sharding.shard_size(row, num_shards) for row in away)
    gradients = sum(4 * sharding.shard_size(row, num_shards) for row in away if row.num_layers)
    rows_at_a_time = settings.batch.rows_at_once * settings.mesh.replica * max(1, num_shards // seq)
    if settings.batch.rows_per_step > rows_at_a_time:
        gradients *= 2  # a microbatch's, and their sums
    return Offloaded(
        activations=model.num_layers * tokens * per_token,
        weights=weights,
        moments=2 * weights if settings.optimizer.name == "adamw" else 0,
        gradients=gradients if memory.offload_optimizer == "state_and_gradients" else 0,
    )


def pool_bytes(found: Offloaded) -> int:
    """Size for XLA's pool of pinned host memory: the formula, and a margin for XLA's other
    arrays."""
    return int(1.1 * found.total) + 2 * GIB


def offloaded_by(program: train_step.Program) -> Offloaded:
    """Arrays that a program keeps in host memory."""
    shape = program.mesh.shape
    return offloaded(program.model, program.config, num_shards=device_mesh.num_shards(program.mesh), seq=shape[axes.SEQ])


# Memory of a compiled step


def measured(run: jax.stages.Compiled, uncounted: int) -> Needs:
    """Memory of a compiled step from XLA's memory analysis, with the estimate of cuDNN's workspace
    if XLA did not count it.

    If compiled with a GPU present, the workspace is a call's last result, and so part of the
    temporaries.
    """
    found = run.memory_analysis()
    device, of_host = (
        getattr(found, f"{where}argument_size_in_bytes")
        + getattr(found, f"{where}output_size_in_bytes")
        - getattr(found, f"{where}alias_size_in_bytes")
        + getattr(found, f"{where}temp_size_in_bytes")
        for where in ("", "host_")
    )
    workspace = cudnn_calls.workspace_bytes(run.as_text() or "") if uncounted else None
    return Needs(device, of_host, uncounted if workspace is None else 0, workspace or 0, uncounted)


def largest(needs: Needs) -> Needs:
    """Maximum over all processes: each compiles for its own devices, and all must choose the same
    options."""
    if jax.process_count() == 1:
        return needs
    # JAX has no 64-bit integers by default
    parts = np.array([divmod(num_bytes, 2**20) for num_bytes in needs], np.int32)
    of_all = multihost_utils.process_allgather(parts).astype(np.int64)
    return Needs(*map(int, (of_all @ [2**20, 1]).max(0)))


def shortage(needs: Needs, room: Room) -> str:
    """Describes what does not fit; empty if everything fits."""
    if needs.total > room.device:
        cudnn = f" (about {size(needs.uncounted)} of it for cuDNN)" if needs.uncounted else ""
        return f"{size(needs.total)} on each device{cudnn}, but only {size(room.device)} is available"
    if room.host < 0:
        return f"{size(needs.host - room.host)} more host memory per device than is available, with a checkpoint's copy"
    if needs.host > room.pinned:
        return f"{size(needs.host)} of host memory per device, but only {size(room.pinned)} is available"
    return ""


def size(num_bytes: int | float) -> str:
    """Formats a number of bytes. Example: `1.5 GiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
