"""Memory of a step: what it needs on the device, from its traced program, and on the host, by
formulas; and what is available to it."""

import functools
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxsp.attention import nodes
from jaxsp.attention.strategy import Strategy
from jaxsp.attention.workload import AttentionWorkload, count_workloads
from jaxsp.blocks import layers, registry
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core import axes
from jaxsp.core.batch import Batch
from jaxsp.core.units import GIB
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from jaxsp.optimizers import optimizer
from jaxsp.planning import gpus, live_bytes
from jaxsp.sharding import host_offload, sharding
from jaxsp.system import device_mesh, hardware
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training import microbatch, specs, step_gradients, train_state
from jaxsp.training.specs import StepSpec
from jaxsp.training.step_config import StepConfig


def predict_bytes(spec: StepSpec) -> int:
    """Predicts a step's memory on each device, in bytes: its state, and the most that the traced
    program of the gradients needs at once."""
    state, batch = train_state.abstract_inputs(spec)
    compute = functools.partial(step_gradients.compute_gradients, spec)
    peak = live_bytes.find_peak(
        jax.make_jaxpr(compute)(state.master, batch),
        workspace_bytes=spec.attention.workspace_bytes,
    )
    held = resident_bytes(spec)
    return held.weights + held.moments + peak


class ResidentBytes(NamedTuple):
    """Bytes of a device's weights and their gradients, and of the optimizer state."""

    weights: int
    """Float32 weights, copies in the compute dtype of those in host memory, and frozen weights."""
    moments: int
    """Bytes of the optimizer state, such as AdamW's moments."""
    gradients: int


def resident_bytes(spec: StepSpec) -> ResidentBytes:
    """Weights, optimizer state and gradients that a device holds."""
    weights = moments = gradients = 0
    for param in jax.tree.leaves(spec.state_table):
        weight, state = _held_bytes(spec, param)
        weights += weight
        moments += state
        if not param.is_trainable:
            continue
        size = sharding.shard_size(param, device_mesh.num_shards(spec.mesh))
        is_stacked_on_host = host_offload.should_offload_gradient(param)
        if not (is_stacked_on_host and spec.has_offloaded_gradients):
            gradients += 4 * size
            if is_stacked_on_host and spec.has_offloaded_state:
                weights += spec.dtype.itemsize * size
    return ResidentBytes(weights, moments, gradients)


def _held_bytes(spec: StepSpec, param: Parameter) -> tuple[int, int]:
    """Bytes of a weight and its optimizer state in a device's own memory."""
    num_shards = device_mesh.num_shards(spec.mesh)
    state = optimizer.state_bytes(spec.config.optimizer, param, num_shards)
    if spec.is_on_host(param):
        return 0, state.others
    return sharding.shard_bytes(param, num_shards), sum(state)


def saved_bytes(spec: StepSpec) -> int:
    """Bytes on the device of what all layers save for the backward pass: the arrays that the vjp
    of the layers keeps, except its inputs."""
    saved = 0

    def trace(master: layers.Weights, batch: Batch) -> jax.Array:
        batch = jax.tree.map(lambda x: x[0], batch.without_pairs())
        keys = microbatch.make_token_keys(spec, batch, jnp.int32(0), 0)
        values = spec.select_own(master)
        holders = spec.gather.make_grad_holders(spec.table, values)

        def run(holders: layers.Weights, x_BlD: jax.Array, values: layers.Weights) -> Any:
            make_shard = lambda _, value, holder: sharding.Shard(value=value, grad_holder=holder)
            shards = jax.tree.map(make_shard, spec.table, values, holders)
            return decoder.run_layers(
                shards,
                x_BlD,
                batch,
                config=spec.model,
                attend=spec.attend,
                gather=spec.gather,
                policy=spec.remat_policy,
                tile_tokens=spec.mlp_tile,
                token_keys=keys,
            )

        def keep(holders: layers.Weights, x_BlD: jax.Array, values: layers.Weights) -> list:
            run_own = functools.partial(run, values=values)
            return jax.tree.leaves(jax.vjp(run_own, holders, x_BlD)[1])

        x_BlD = jnp.zeros((*batch.tokens_BL.shape, spec.model.hidden_size), spec.dtype)
        nonlocal saved
        saved = live_bytes.sum_results(jax.make_jaxpr(keep)(holders, x_BlD, values))
        return jnp.int32(0)

    run_on_mesh = functools.partial(step_gradients.run_on_mesh, spec, trace)
    state, batch = train_state.abstract_inputs(spec)
    jax.eval_shape(functools.partial(run_on_mesh, out_specs=PartitionSpec()), state.master, batch)
    return saved


# Host memory


def checkpoint_bytes(spec: StepSpec) -> int:
    """Host memory for an asynchronous checkpoint of the state on the device, in bytes per device.

    The copies of trained weights and state, and XLA's buffers for the transfers, which are pinned
    and stay allocated. They have a pool of their own, with the limit of the pool for offloaded
    arrays (`pool_bytes`). Arrays that are in host memory are written from there.

    Source: PjRtStreamExecutorRawBuffer::CopyRawDeviceToHostAndReturnEvent, openxla/xla
        xla/pjrt/se_raw_buffer.cc. Arrays of 1 GiB and more per device have no such buffer.
    """
    num_shards = device_mesh.num_shards(spec.mesh)
    copies = buffers = 0
    for param in jax.tree.leaves(spec.table):
        if param.is_trainable:
            held = sum(_held_bytes(spec, param))
            copies += held
            buffers += held if 4 * sharding.shard_size(param, num_shards) < GIB else 0
    offloaded = step_offloaded_bytes(spec)
    return copies + (min(buffers, pool_bytes(offloaded)) if offloaded.total else buffers)


class OffloadedBytes(NamedTuple):
    """Bytes of each device's arrays in host memory."""

    activations: int
    weights: int
    """Bytes of trained weights, float32."""
    moments: int
    """Bytes of the optimizer state, such as AdamW's moments."""
    gradients: int
    frozen: int = 0
    """Bytes of frozen weights."""

    @property
    def total(self) -> int:
        return sum(self)


def offloaded_bytes(model: ModelConfig, config: StepConfig, *, num_shards: int) -> OffloadedBytes:
    """Arrays in host memory with a config.

    Args: num_shards: number of devices that weights are sharded over.
    """
    weights = moments = gradients = frozen = 0
    memory = config.memory
    if memory.offload_optimizer != "none":
        table = specs.build_table(model, config)
        for param in filter(host_offload.should_offload, jax.tree.leaves(table)):
            num_bytes = sharding.shard_bytes(param, num_shards)
            if param.is_trainable:
                weights += num_bytes
                state = optimizer.state_bytes(config.optimizer, param, num_shards)
                moments += state.like_weight
                gradients += num_bytes if host_offload.should_offload_gradient(param) else 0
            else:
                frozen += num_bytes
    if memory.offload_optimizer != "state_and_gradients":
        gradients = frozen = 0
    num_groups = config.mesh.replica * max(1, num_shards // config.mesh.degree)
    if config.rows_per_step > config.microbatch_rows * num_groups:
        gradients *= 2  # the gradients of a microbatch, and their sums
    policy = RematPolicy(
        offload_activations=memory.offload_activations,
        offload_every=memory.offload_every,
        offloads_during_attention=memory.offload_during_attention == "always",
    ).with_whole_periods(model)
    per_token = 0
    itemsize = np.dtype(config.compute_dtype).itemsize
    if policy.is_input_offloaded:
        num_inputs = policy.num_offloaded_inputs(model.num_layers)
        if not policy.has_own_backward_pass:
            num_inputs += model.inner_loop  # its arrays are copied into those of all periods
        per_token = num_inputs * model.hidden_size * itemsize
    if policy.is_attention_offloaded:
        per_token += sum(
            registry.MIXERS[layer.mixer].output_bytes(model.of_kind(layer.kind), itemsize)
            for layer in model.layers
        )
    tokens_per_device = config.row_tokens * config.microbatch_rows // config.mesh.degree
    return OffloadedBytes(
        activations=tokens_per_device * per_token,
        weights=weights,
        moments=moments,
        gradients=gradients,
        frozen=frozen,
    )


def step_offloaded_bytes(spec: StepSpec) -> OffloadedBytes:
    """Arrays that a step keeps in host memory."""
    num_shards = device_mesh.num_shards(spec.mesh)
    return offloaded_bytes(spec.model, spec.config, num_shards=num_shards)


def pool_bytes(offloaded: OffloadedBytes) -> int:
    """Size for XLA's pool of pinned host memory: the formula, and a margin for other arrays."""
    return int(1.1 * offloaded.total) + 2 * GIB


# Available memory

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

REMOTE_PEER_BYTES = gpus.ASSUMED["all"]["remote_peer_gib"][0] * GIB
"""NCCL's additional buffers for all-to-alls with each peer on another node."""


def subtract_reserves(spec: StepSpec, limits: MemoryLimit) -> MemoryLimit:
    """Memory available to a step, after fragmentation, CUDA, NCCL and checkpoints.

    Args: limits: JAX's fraction of a device (`hardware.gpu_memory_fraction`), and a device's
        part of its node's memory.
    """
    if math.isinf(limits.device):  # CPUs
        return limits
    fraction = hardware.gpu_memory_fraction(os.environ)
    memory = limits.device / fraction
    # In a run, `raise_limits` has already reduced JAX's fraction; in a plan, nothing has
    fraction = min(fraction, hardware.choose_fraction(memory, outside_bytes(spec)))
    device = memory * fraction * (1 - FRAGMENTATION_FRACTION)
    return MemoryLimit(device, limits.host - checkpoint_bytes(spec), limits.pool)


def outside_bytes(spec: StepSpec) -> float:
    """Estimate of a device's memory that a step needs outside of JAX's part, for CUDA and NCCL."""
    workloads = count_workloads(spec.config.rows, spec.model)
    return CUDA_BYTES + nccl_bytes(spec.mesh.shape, spec.attention.strategy, workloads)


def nccl_bytes(
    sizes: Mapping[str, int], strategy: Strategy, workloads: Iterable[AttentionWorkload] = ()
) -> float:
    """Estimate of NCCL's buffers on each device, with hardware.DEVICES_PER_NODE devices per node.

    Args: sizes: of the mesh's axes. workloads: attention of the layers, if it is known.
    """
    node_size = hardware.DEVICES_PER_NODE
    all_to_all_size = strategy.heads.degree
    peers = min(all_to_all_size, node_size) - 1
    remote_peers = max(0, all_to_all_size - node_size)
    # Groups of devices in which the first device communicates
    numbers = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in axes.ALL])
    along = [
        numbers[tuple(slice(None) if axis in names else 0 for axis in axes.ALL)]
        for names in ((axes.SEQ,), axes.ALL, axes.SHARDS, axes.GROUPS, (axes.REPLICA,))
    ]
    groups = [*along[1:], *(along[0][positions] for positions in strategy.communicators())]
    communicators = {frozenset(group.ravel().tolist()) for group in groups if group.size > 1}
    # XLA's permutes have one of their own, of all devices. Source: GpuCliqueKey's is_p2p, and
    # GetP2PConfigForCollectivePermute, openxla/xla xla/backends/gpu/runtime
    has_permutes = any(nodes.PERMUTE in strategy.sent_bytes(each) for each in workloads)
    buffers = (len(communicators) + has_permutes) * COMMUNICATOR_BYTES
    return buffers + ALL_TO_ALL_BYTES * peers / (node_size - 1) + REMOTE_PEER_BYTES * remote_peers
