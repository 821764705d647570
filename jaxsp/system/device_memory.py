"""Memory of this run's devices and of their hosts, and copies between them inside jit."""

import functools
import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array

from jaxsp.system import cluster, distributed, hardware

MEMORY_KIND = "pinned_host"  # memory kind of a sharding whose arrays are in host memory


def is_on_host(x: Array) -> bool:
    """True if an array is in host memory, which is part of its type."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """Copies arrays to the device, unless they are there."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree
    )


def to_host(tree: Any) -> Any:
    """Copies arrays to host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


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
    devices = [*devices]
    if devices[0].platform == "cpu":
        return MemoryLimit(math.inf, math.inf)
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
