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
from jaxsp.attention.strategies.workload import LayerWorkload, count_workloads
from jaxsp.core import axes
from jaxsp.core.units import GIB
from jaxsp.planning import estimate, gpus
from jaxsp.system import cluster, distributed, hardware
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

REMOTE_PEER_BYTES = gpus.ASSUMED["all"]["remote_peer_gib"][0] * GIB
"""NCCL's additional buffers for all-to-alls with each peer on another node."""


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
    return MemoryLimit(*_min_over_processes(*_find_local_limits(_list_local(devices))))


def find_free_bytes(devices: Iterable[Any]) -> float:
    """Unused memory of a device; of a CPU, its part of the host's memory; 0 if it is unknown. The
    minimum over all devices and processes, which must call it together."""
    local = _list_local(devices)
    if all(device.platform == "cpu" for device in local):
        free = _find_host_bytes(max(1, len(local)))
    else:
        stats = [device.memory_stats() or {} for device in local]
        free = min(stat.get("bytes_limit", 0.0) - stat.get("bytes_in_use", 0.0) for stat in stats)
    return _min_over_processes(free)[0]


def _list_local(devices: Iterable[Any]) -> tuple[Any, ...]:
    index = jax.process_index()
    return tuple(device for device in devices if device.process_index == index)


def _min_over_processes(*sizes: float) -> list[float]:
    if jax.process_count() == 1:
        return list(sizes)  # exact, not rounded to float32
    return multihost_utils.process_allgather(np.array(sizes, np.float32)).min(0).tolist()


def _find_host_bytes(num_devices: int) -> float:
    """Memory of the host for each of this process's devices."""
    num_processes = cluster.count_local_processes(
        distributed.this_process, os.environ, devices_per_process=num_devices
    )
    return hardware.host_bytes_per_device(num_processes=num_processes, num_devices=num_devices)


@functools.cache
def _find_local_limits(devices: tuple[Any, ...]) -> MemoryLimit:
    stats = [device.memory_stats() or {} for device in devices]
    limits = [limit for device_stats in stats if (limit := device_stats.get("bytes_limit"))]
    if not limits:
        return MemoryLimit(math.inf, math.inf)
    host = _find_host_bytes(len(devices))
    return MemoryLimit(min(limits), host, hardware.pinned_pool_limit(os.environ))


def subtract_reserves(spec: StepSpec, limits: MemoryLimit) -> MemoryLimit:
    """Memory available to a step, after fragmentation, CUDA, NCCL and checkpoints.

    Args: limits: JAX's fraction of a device (`hardware.gpu_memory_fraction`), and a device's
        part of its node's memory.
    """
    device = limits.device
    if math.isfinite(device):
        fraction = hardware.gpu_memory_fraction(os.environ)
        # In a run, `raise_limits` has already reduced JAX's fraction; in a plan, nothing has
        reduced = hardware.choose_fraction(device / fraction, outside_bytes(spec))
        device *= min(1, reduced / fraction) * (1 - FRAGMENTATION_FRACTION)
    return MemoryLimit(device, limits.host - estimate.checkpoint_bytes(spec), limits.pool)


def outside_bytes(spec: StepSpec) -> float:
    """Estimate of a device's memory that a step needs outside of JAX's part, for CUDA and NCCL."""
    workloads = count_workloads(spec.config.rows, spec.model)
    return CUDA_BYTES + nccl_bytes(spec.mesh.shape, spec.attention.strategy, workloads)


def nccl_bytes(
    sizes: Mapping[str, int], strategy: Strategy, workloads: Iterable[LayerWorkload] = ()
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
