"""Properties of devices, which may be absent ones that a program is only compiled for."""

import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxsp.attention.kernels.workload import Device


def find_local_devices(devices: Sequence[Device]) -> list[Any]:
    """Returns the devices that this process has; none if the program is only compiled for them."""
    return [device for device in jax.local_devices() if device in devices]


def min_device_bytes(devices: Sequence[Device]) -> int | None:
    """Memory that JAX may use on each of this process's devices: the minimum; None if unknown."""
    stats = [device.memory_stats() or {} for device in find_local_devices(devices)]
    limits = [stat["bytes_limit"] for stat in stats if "bytes_limit" in stat]
    return min(limits, default=None)


def lowest_capability(devices: Sequence[Device]) -> tuple[int, int]:
    """The lowest compute capability of the devices; (0, 0) if one of them has none."""
    capabilities = []
    for device in devices:
        match = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
        capabilities.append((int(match[1]), int(match[2])) if match else (0, 0))
    return min(capabilities)
