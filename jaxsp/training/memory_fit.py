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

from jaxsp.attention import LayerWorkload, Strategy
from jaxsp.attention.kernels.kernel import Kernel
from jaxsp.config.schema import Config
from jaxsp.core import axes
from jaxsp.model import decoder
from jaxsp.model.config import ModelConfig
from jaxsp.model.layers import Parameter
from jaxsp.runtime import cluster, device_mesh, distributed, memory_limits
from jaxsp.training import host_offload, sharding
from jaxsp.training.program import Program

GIB = 2**30

MAX_PREDICTED_RATIO = 1.1
"""A candidate is not compiled if the formula gives more than this times the memory available on the
device. The formula is 0.93 to 1.08 times what jax 0.12 compiles
(tests/training/test_memory_fit.py)."""

FRAGMENTATION_FRACTION = 0.022
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


class MemoryUse(NamedTuple):
    """Memory of a compiled step for each device, in bytes."""

    device: int
    host: int
    uncounted_workspace: int = 0
    """Estimate of cuDNN's workspace, where the compiled program does not count it: for GPUs that are absent."""
    workspace: int = 0
    """cuDNN's workspace, where the compiled program counts it."""
    estimated_workspace: int = 0
    """Estimate of it, to compare."""

    @property
    def device_total(self) -> int:
        """Memory of the device, counted or not."""
        return self.device + self.uncounted_workspace


class MemoryLimit(NamedTuple):
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
class CompiledStep:
    """A step whose memory options are decided."""

    program: Program
    executable: Any
    """Result of the `compile_step` of `fit`."""
    memory_use: MemoryUse
    memory_limit: MemoryLimit
    shortage: str = ""
    """Description of what does not fit; empty if everything fits."""
    full_remat_reason: str = ""
    """Reason that `auto` recomputes attention; empty if it does not."""


def fit(
    program: Program,
    *,
    limit: MemoryLimit,
    workspace_bytes: int,
    compile_step: Callable[[Program], Any],
    measure: Callable[[Any], MemoryUse],
) -> CompiledStep:
    """Compiles candidates, and returns the first that fits, or else the last one.

    Args:
        uncounted: estimate of the attention kernel's workspace, in bytes.
        compile_step: compiles a program whose memory options are decided.
        measure: memory of what `compile_step` returned; must be equal in all processes, so that all
            choose the same candidate.
    """
    tried = list(list_candidates(program, is_memory_known=math.isfinite(limit.device)))
    scale, why_full = 1.0, ""
    for candidate in tried:
        formula = scale * predict_bytes(candidate, workspace_bytes=workspace_bytes)
        is_last = candidate is tried[-1]
        keeps = candidate.remat_policy.is_attention_saved
        if not is_last and formula > MAX_PREDICTED_RATIO * limit.device:
            if keeps:
                why_full = (
                    f"keeping attention's output needs about {format_bytes(formula)} on each device"
                )
            continue
        run = compile_step(candidate)
        needs = measure(run)
        short = describe_shortage(needs, limit)
        # Offloaded arrays are the same for all candidates: another one does not help if host memory is short
        if needs.device_total <= limit.device or is_last:
            because = "" if keeps or program.config.memory.remat == "full" else why_full
            return CompiledStep(
                program=candidate,
                executable=run,
                memory_use=needs,
                memory_limit=limit,
                shortage=short,
                full_remat_reason=because,
            )
        if keeps:
            why_full = f"keeping attention's output needs {short}"
        scale *= max(1.0, needs.device_total / formula)
    raise AssertionError("there is at least one candidate, and the last one is compiled")


def list_candidates(program: Program, *, is_memory_known: bool) -> Iterator[Program]:
    """Programs whose memory options are decided, the fastest first.

    Args: is_known: True if the devices' memory is known; if not, tiles have a safe size.
    """
    for remat in _remat_candidates(program, is_memory_known=is_memory_known):
        mlp_tiles = program.mlp_tiles if is_memory_known else [program.mlp_tile]
        if remat == "save_attention_and_mlp":  # activations of tiles cannot be kept
            mlp_tiles = [tile for tile in program.mlp_tiles if tile == program.tokens_per_device]
        for mlp_tile in mlp_tiles:
            for loss_tile in program.loss_tiles if is_memory_known else [program.loss_tile]:
                yield replace_memory(
                    program, remat=remat, mlp_tile_tokens=mlp_tile, loss_tile_tokens=loss_tile
                )


def _remat_candidates(program: Program, *, is_memory_known: bool) -> list[str]:
    """Values of memory.remat in the order in which they are tried."""
    memory = program.config.memory
    if memory.remat != "auto":
        return [memory.remat]
    if program.remat_policy.is_attention_offloaded:
        return ["save_attention"]
    frees_memory = memory.offload_activations != "none" or memory.offload_optimizer != "none"
    first = [] if frees_memory or not is_memory_known else ["save_attention_and_mlp"]
    return [*first, "save_attention", "full"]


def replace_memory(program: Program, **memory: Any) -> Program:
    """The program with other values in the config's group `memory`."""
    config = program.config
    update = {"memory": config.memory.model_copy(update=memory)}
    return dataclasses.replace(program, config=config.model_copy(update=update))


def predict_bytes(program: Program, *, workspace_bytes: int = 0) -> int:
    """Formula for a step's memory on each device, in bytes.

    Arguments, gradients and saved activations are live during the whole step. The largest of four
    phases is added: the backward pass of a layer's MLP, that of its attention, the loss, and the
    gradient of the embedding.

    Args: uncounted: estimate of the attention kernel's workspace.
    """
    model, memory, how = program.model, program.config.memory, program.remat_policy
    itemsize, tokens = program.dtype.itemsize, program.tokens_per_device
    D, F, V, N = model.hidden_size, model.intermediate_size, model.vocab_size, model.num_layers
    state, gradients = _state_bytes(program)
    stream = tokens * D * itemsize
    results = tokens * model.num_heads * (model.head_dim * itemsize + 4)
    heads = model.num_heads + 2 * model.num_kv_heads

    # what the backward pass keeps
    of_layer = (0 if memory.offload_activations != "none" else stream) + (
        results if how.is_attention_saved and not how.is_attention_offloaded else 0
    )
    if (
        how.remat in ("save_attention_and_mlp", "none") and program.mlp_tile >= tokens
    ):  # activations of tiles are not kept
        of_layer += 2 * tokens * F * itemsize
    if how.remat == "none":
        of_layer += tokens * (heads * model.head_dim + D) * itemsize
    kept = N * of_layer
    prefetched = 0
    if memory.offload_activations != "none":
        prefetched = 2 * (stream + (results if how.is_attention_offloaded else 0))

    # the backward pass of one layer
    tile = min(program.mlp_tile, tokens)
    after = 3 * D * F + D * model.num_heads * model.head_dim
    if tile < tokens:
        mlp = (
            4 * tile * F * itemsize + 2 * stream + 5 * tile * D * itemsize + (itemsize + 4) * after
        )
    else:
        mlp = 4 * tile * F * itemsize + 6 * stream + itemsize * after + 5 * D * F
    weights = sum(row.size for row in jax.tree.leaves(program.table["layers"]))
    layer = LayerWorkload.from_config(program.config, model)
    attention = program.attend.strategy.backward_bytes(layer, program.attend.settings)
    attention += 2 * stream + itemsize * weights + workspace_bytes

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


def _state_bytes(program: Program) -> tuple[int, int]:
    """Bytes of a device's weights, optimizer state and copies to compute with; and of its gradients."""
    memory, per_weight = program.config.memory, _bytes_per_weight(program)
    state = gradients = 0
    for row in jax.tree.leaves(program.table):
        shard, away = (
            _shard_size(row, program),
            program.has_offloaded_state and host_offload.should_offload(row),
        )
        state += 0 if away else per_weight * shard
        if away and row.num_layers and memory.offload_optimizer == "state":
            state += program.dtype.itemsize * shard
        on_host = away and row.num_layers and memory.offload_optimizer == "state_and_gradients"
        gradients += 0 if on_host else 4 * shard
    return state, gradients


def _bytes_per_weight(program: Program) -> int:
    """Float32 weight and, with AdamW, two moments."""
    return 12 if program.config.optimizer.name == "adamw" else 4


def _shard_size(row: Parameter, program: Program) -> int:
    """Elements of a weight that a device holds, all layers together."""
    return sharding.shard_size(row, device_mesh.num_shards(program.mesh))


# Available memory


def find_limits(program: Program) -> MemoryLimit:
    """Memory that JAX may use on this run's devices and on the host: the minimum over all
    processes.

    All processes get the same limits, so that they choose the same memory options.
    """
    own = _find_local_limits(tuple(program.mesh.local_devices))
    if jax.process_count() == 1:
        return own
    of_all = multihost_utils.process_allgather(np.array(own, np.float32))
    return MemoryLimit(*map(float, of_all.min(0)))


@functools.cache
def _find_local_limits(devices: tuple[Any, ...]) -> MemoryLimit:
    known = [
        limit for device in devices if (limit := (device.memory_stats() or {}).get("bytes_limit"))
    ]
    if not known:
        return MemoryLimit(math.inf, math.inf)
    num_local = cluster.count_local_processes(
        distributed.this_process(), os.environ, devices_per_process=len(devices)
    )
    host_room = memory_limits.host_bytes_per_device(
        num_processes=num_local, num_devices=len(devices)
    )
    return MemoryLimit(min(known), host_room, memory_limits.pinned_pool_limit(os.environ))


def subtract_reserves(program: Program, limits: MemoryLimit) -> MemoryLimit:
    """Memory available to a step: these limits minus the needs of fragmentation, NCCL and
    checkpoints.

    Args: limits: JAX's part of a device, meshes.gpu_share of it; and a device's part of its node's
    memory.
    """
    # the rest of the device is for CUDA and NCCL
    missing = max(
        0.0,
        CUDA_BYTES
        + nccl_bytes(program)
        - limits.device * (1 / memory_limits.gpu_memory_fraction(os.environ) - 1),
    )
    device = limits.device * (1 - FRAGMENTATION_FRACTION) - missing
    return MemoryLimit(device, limits.host - checkpoint_bytes(program), limits.pool)


def nccl_bytes(program: Program) -> float:
    """Estimate of NCCL's buffers on each device, in nodes of meshes.NODE_DEVICES devices."""
    kind = program.attend.strategy
    peers = min(kind.all_to_all_size, memory_limits.DEVICES_PER_NODE) - 1
    remote_peers = max(0, kind.all_to_all_size - memory_limits.DEVICES_PER_NODE)
    buffers = len(list_communicators(program.mesh.shape, kind)) * COMMUNICATOR_BYTES
    return (
        buffers
        + ALL_TO_ALL_BYTES * peers / (memory_limits.DEVICES_PER_NODE - 1)
        + REMOTE_PEER_BYTES * remote_peers
    )


def list_communicators(sizes: Mapping[str, int], strategy: Strategy) -> set[frozenset[int]]:
    """Groups of devices in which the first device communicates, as device numbers in mesh order."""
    devices = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in axes.ALL])

    def along(names: tuple[str, ...]) -> np.ndarray:
        return devices[tuple(slice(None) if axis in names else 0 for axis in axes.ALL)]

    row = along((axes.SEQ,))
    groups = [*map(along, (axes.ALL, axes.SHARDS, axes.GROUPS, (axes.REPLICA,)))]
    groups += [row[positions] for positions in strategy.communicators()]
    found = {frozenset(group.ravel().tolist()) for group in groups}
    return {group for group in found if len(group) > 1}


def checkpoint_bytes(program: Program) -> int:
    """Host memory, in bytes per device, for an asynchronous checkpoint's copy of the state on the
    device."""
    per_weight = _bytes_per_weight(program)
    rows = jax.tree.leaves(program.table)
    return sum(
        per_weight * _shard_size(row, program)
        for row in rows
        if not (program.has_offloaded_state and host_offload.should_offload(row))
    )


class OffloadedBytes(NamedTuple):
    """Formula for the bytes of each device's arrays in host memory."""

    activations: int
    weights: int
    moments: int
    """AdamW's moments."""
    gradients: int

    @property
    def total(self) -> int:
        return sum(self)


def offloaded_bytes(
    model: ModelConfig, config: Config, *, num_shards: int, seq: int
) -> OffloadedBytes:
    """Arrays in host memory with a config, if weights are sharded over `num_shards` devices and
    rows over `seq`."""
    memory, itemsize = config.memory, np.dtype(config.model.compute_dtype).itemsize
    per_token = 0 if memory.offload_activations == "none" else model.hidden_size * itemsize
    if memory.offload_activations == "layer_inputs_and_attention":
        per_token += model.num_heads * (model.head_dim * itemsize + 4)
    tokens = config.data.max_row_tokens * config.batch.rows_per_microbatch // seq
    away = [
        row
        for row in jax.tree.leaves(decoder.param_table(model))
        if host_offload.should_offload(row)
    ]
    away = [] if memory.offload_optimizer == "none" else away
    weights = sum(4 * sharding.shard_size(row, num_shards) for row in away)
    gradients = sum(4 * sharding.shard_size(row, num_shards) for row in away if row.num_layers)
    rows_at_a_time = (
        config.batch.rows_per_microbatch * config.mesh.replica * max(1, num_shards // seq)
    )
    if config.batch.rows_per_step > rows_at_a_time:
        gradients *= 2  # a microbatch's, and their sums
    return OffloadedBytes(
        activations=model.num_layers * tokens * per_token,
        weights=weights,
        moments=2 * weights if config.optimizer.name == "adamw" else 0,
        gradients=gradients if memory.offload_optimizer == "state_and_gradients" else 0,
    )


def pool_bytes(offloaded: OffloadedBytes) -> int:
    """Size for XLA's pool of pinned host memory: the formula, and a margin for XLA's other
    arrays."""
    return int(1.1 * offloaded.total) + 2 * GIB


def program_offloaded_bytes(program: Program) -> OffloadedBytes:
    """Arrays that a program keeps in host memory."""
    shape = program.mesh.shape
    return offloaded_bytes(
        program.model,
        program.config,
        num_shards=device_mesh.num_shards(program.mesh),
        seq=shape[axes.SEQ],
    )


# Memory of a compiled step


def read_memory_use(
    executable: jax.stages.Compiled, *, kernel: Kernel, workspace_bytes: int
) -> MemoryUse:
    """Memory of a compiled step from XLA's memory analysis, with the estimate of cuDNN's workspace
    if XLA did not count it.

    If compiled with a GPU present, the workspace is a call's last result, and so part of the
    temporaries.
    """
    found = executable.memory_analysis()
    device, of_host = (
        getattr(found, f"{where}argument_size_in_bytes")
        + getattr(found, f"{where}output_size_in_bytes")
        - getattr(found, f"{where}alias_size_in_bytes")
        + getattr(found, f"{where}temp_size_in_bytes")
        for where in ("", "host_")
    )
    workspace = None
    if workspace_bytes:
        workspace = kernel.read_workspace_bytes(executable.as_text() or "")
    return MemoryUse(
        device,
        of_host,
        workspace_bytes if workspace is None else 0,
        workspace or 0,
        workspace_bytes,
    )


def max_over_processes(memory_use: MemoryUse) -> MemoryUse:
    """Maximum over all processes: each compiles for its own devices, and all must choose the same
    options."""
    if jax.process_count() == 1:
        return memory_use
    # JAX has no 64-bit integers by default
    parts = np.array([divmod(num_bytes, 2**20) for num_bytes in memory_use], np.int32)
    of_all = multihost_utils.process_allgather(parts).astype(np.int64)
    return MemoryUse(*map(int, (of_all @ [2**20, 1]).max(0)))


def describe_shortage(memory_use: MemoryUse, limit: MemoryLimit) -> str:
    """Describes what does not fit; empty if everything fits."""
    if memory_use.device_total > limit.device:
        cudnn = (
            f" (about {format_bytes(memory_use.uncounted_workspace)} of it for cuDNN)"
            if memory_use.uncounted_workspace
            else ""
        )
        return f"{format_bytes(memory_use.device_total)} on each device{cudnn}, but only {format_bytes(limit.device)} is available"
    if limit.host < 0:
        return f"{format_bytes(memory_use.host - limit.host)} more host memory per device than is available, with a checkpoint's copy"
    if memory_use.host > limit.pinned:
        return f"{format_bytes(memory_use.host)} of host memory per device, but only {format_bytes(limit.pinned)} is available"
    return ""


def format_bytes(num_bytes: int | float) -> str:
    """Formats a number of bytes. Example: `1.5 GiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
