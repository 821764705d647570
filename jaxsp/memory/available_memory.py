"""Memory available to a step on each device and on the host."""

import functools
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.attention.strategies import nodes
from jaxsp.attention.strategies.strategy import Strategy
from jaxsp.attention.strategies.workload import GroupRows, HasHeads, count_workloads
from jaxsp.core import axes
from jaxsp.core.units import GIB
from jaxsp.memory import memory_formula
from jaxsp.system import cluster, distributed, memory_limits
from jaxsp.training.specs import StepSpec

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


def find_limits(devices: Iterable[Any]) -> MemoryLimit:
    """Memory that JAX may use on this run's devices and on the host.

    The minimum over all processes, so that all choose the same memory options. All must call it
    together.
    """
    index = jax.process_index()
    local = _find_local_limits(tuple(device for device in devices if device.process_index == index))
    if jax.process_count() == 1:
        return local  # exact, not rounded to float32
    gathered = multihost_utils.process_allgather(np.array(local, np.float32))
    return MemoryLimit(*map(float, gathered.min(0)))


def find_free_bytes(devices: Iterable[Any]) -> float:
    """Memory of a device that nothing uses now; of a CPU, its part of the host's memory; 0 if it is
    unknown.

    The minimum over all devices and processes. All must call it together.
    """
    index = jax.process_index()
    local = [device for device in devices if device.process_index == index]
    if all(device.platform == "cpu" for device in local):
        free = _find_host_bytes(max(1, len(local)))
    else:
        stats = [device.memory_stats() or {} for device in local]
        free = min(stat.get("bytes_limit", 0.0) - stat.get("bytes_in_use", 0.0) for stat in stats)
    if jax.process_count() == 1:
        return free
    return float(multihost_utils.process_allgather(np.float32(free)).min())


def _find_host_bytes(num_devices: int) -> float:
    """Memory of the host for each of this process's devices."""
    num_processes = cluster.count_local_processes(
        distributed.this_process(), os.environ, devices_per_process=num_devices
    )
    return memory_limits.host_bytes_per_device(num_processes=num_processes, num_devices=num_devices)


@functools.cache
def _find_local_limits(devices: tuple[Any, ...]) -> MemoryLimit:
    stats = [device.memory_stats() or {} for device in devices]
    limits = [limit for device_stats in stats if (limit := device_stats.get("bytes_limit"))]
    if not limits:
        return MemoryLimit(math.inf, math.inf)
    host = _find_host_bytes(len(devices))
    return MemoryLimit(min(limits), host, memory_limits.pinned_pool_limit(os.environ))


def subtract_reserves(spec: StepSpec, limits: MemoryLimit) -> MemoryLimit:
    """Memory available to a step, after fragmentation, CUDA, NCCL and checkpoints.

    Args:
        limits: JAX's fraction of a device (`memory_limits.gpu_memory_fraction`), and a device's
            part of its node's memory.
    """
    fraction = memory_limits.gpu_memory_fraction(os.environ)
    memory = limits.device / fraction
    # In a run, `raise_limits` has already reduced JAX's fraction; in a plan, nothing has
    fraction = min(fraction, memory_limits.choose_fraction(memory, outside_bytes(spec)))
    device = memory * fraction * (1 - FRAGMENTATION_FRACTION)
    host = limits.host - memory_formula.checkpoint_bytes(spec)
    return MemoryLimit(device, host, limits.pool)


class GroupLayout(NamedTuple):
    """Devices that communicate in the steps with rows of one length."""

    sizes: Mapping[str, int]
    """Sizes of the mesh's axes."""
    strategy: Strategy
    has_permutes: bool
    """True if devices send to single others: NCCL has a communicator for that."""


def make_layout(
    rows: GroupRows, model: HasHeads, sizes: Mapping[str, int], strategy: Strategy
) -> GroupLayout:
    """Layout for steps of such rows."""
    workloads = count_workloads(rows, model)
    has_permutes = any(nodes.PERMUTE in strategy.sent_bytes(workload) for workload in workloads)
    return GroupLayout(sizes, strategy, has_permutes)


def outside_bytes(spec: StepSpec) -> float:
    """Estimate of a device's memory that a step needs outside of JAX's part, for CUDA and NCCL."""
    layout = make_layout(spec.config.rows, spec.model, spec.mesh.shape, spec.attention.strategy)
    return CUDA_BYTES + nccl_bytes(layout)


def nccl_bytes(layout: GroupLayout) -> float:
    """Estimate of NCCL's buffers on each device, with memory_limits.DEVICES_PER_NODE per node."""
    node_size = memory_limits.DEVICES_PER_NODE
    all_to_all_size = layout.strategy.heads.degree
    peers = min(all_to_all_size, node_size) - 1
    remote_peers = max(0, all_to_all_size - node_size)
    num_communicators = len(list_communicators(layout.sizes, layout.strategy))
    # XLA's permutes have one of their own, of all devices. Source: GpuCliqueKey's is_p2p, and
    # GetP2PConfigForCollectivePermute, openxla/xla xla/backends/gpu/runtime
    num_communicators += layout.has_permutes
    buffers = num_communicators * COMMUNICATOR_BYTES
    return buffers + ALL_TO_ALL_BYTES * peers / (node_size - 1) + REMOTE_PEER_BYTES * remote_peers


def list_communicators(sizes: Mapping[str, int], strategy: Strategy) -> set[frozenset[int]]:
    """Groups of devices in which the first device communicates, as device numbers in mesh order."""
    devices = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in axes.ALL])

    def along(names: tuple[str, ...]) -> np.ndarray:
        return devices[tuple(slice(None) if axis in names else 0 for axis in axes.ALL)]

    group = along((axes.SEQ,))
    groups = [*map(along, (axes.ALL, axes.SHARDS, axes.GROUPS, (axes.REPLICA,)))]
    groups += [group[positions] for positions in strategy.communicators()]
    communicators = {frozenset(group.ravel().tolist()) for group in groups}
    return {communicator for communicator in communicators if len(communicator) > 1}
