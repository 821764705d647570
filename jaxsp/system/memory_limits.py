"""Memory that JAX may use: fraction of a GPU, pinned host memory per device."""

import math
from collections.abc import Mapping, MutableMapping

from jaxsp.core.units import GIB
from jaxsp.system import hardware

GPU_MEMORY_FRACTION = 0.92
"""Greatest fraction of a GPU's memory that JAX allocates at start, unless XLA_CLIENT_MEM_FRACTION
is set.

JAX's default is 0.75. The remaining 6 GiB of an H100's 79 are for CUDA and NCCL: `choose_fraction`.
"""

DEVICES_PER_NODE = 8
"""GPUs per node, unless the user gives another number."""

PROCESS_OVERHEAD_BYTES = 6 * GIB
"""Host memory of a process in addition to its arrays: Python, CUDA, NCCL, staging buffers of
copies, and autotuning."""

OS_RESERVED_BYTES = 8 * GIB
"""Host memory of a node for the operating system."""

MIN_FRACTION = 0.5
"""Least fraction, if CUDA and NCCL would need more of a small GPU."""

_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def raise_limits(
    environ: MutableMapping[str, str],
    *,
    num_local_processes: int,
    max_pool_bytes: int | None,
    outside_bytes: int | float = 0,
) -> None:
    """Raises JAX's memory limits that the user has not set to the available memory.

    JAX's default limit for pinned host memory is 64 GiB per device.

    Args: outside_bytes: memory of each GPU that CUDA and NCCL need.
    """
    if not any(environ.get(name) for name in _FRACTION_VARIABLES):
        memory = hardware.gpu_memory_bytes()
        fraction = GPU_MEMORY_FRACTION if memory is None else choose_fraction(memory, outside_bytes)
        environ["XLA_CLIENT_MEM_FRACTION"] = str(fraction)
    if not environ.get(_PINNED_LIMIT_VARIABLE):
        num_gpus = hardware.count_gpus(environ)
        available = host_bytes_per_device(
            num_processes=num_local_processes, num_devices=max(1, num_gpus // num_local_processes)
        )
        limit = int(available / GIB)
        if max_pool_bytes is not None:
            limit = min(limit, math.ceil(max_pool_bytes / GIB))
        environ[_PINNED_LIMIT_VARIABLE] = str(max(1, limit))
    # Otherwise JAX preallocates its staging buffers for copies, which need as much memory again
    environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", "false")


def choose_fraction(memory_bytes: int | float, outside_bytes: int | float) -> float:
    """Fraction of a GPU's memory for JAX, which leaves `outside_bytes` for CUDA and NCCL."""
    return max(MIN_FRACTION, min(GPU_MEMORY_FRACTION, 1 - outside_bytes / memory_bytes))


def gpu_memory_fraction(environ: Mapping[str, str]) -> float:
    """Fraction of a GPU's memory that JAX allocates: the user's, or that of `raise_limits`.

    Before `raise_limits` and in a plan, the greatest.
    """
    values = [environ[name] for name in _FRACTION_VARIABLES if environ.get(name)]
    return float(values[0]) if values else GPU_MEMORY_FRACTION


def pinned_pool_limit(environ: Mapping[str, str]) -> float:
    """Bytes that XLA's pool of pinned host memory may hold per device; infinite without a limit."""
    return float(environ.get(_PINNED_LIMIT_VARIABLE) or math.inf) * GIB


def host_bytes_per_device(
    *, num_processes: int, num_devices: int, total_bytes: int | float | None = None
) -> float:
    """Bytes of host memory available for the arrays of one device.

    Args:
        num_processes: processes on the node.
        num_devices: devices of each process.
        total_bytes: memory of the node; default: that of this one.
    """
    total = hardware.host_memory_bytes() if total_bytes is None else total_bytes
    usable = max(0.0, float(total) - OS_RESERVED_BYTES - num_processes * PROCESS_OVERHEAD_BYTES)
    return usable / (num_processes * num_devices)


def pinned_pool_size(needed: int | float, limit: int | float) -> float:
    """Bytes that XLA's pool of pinned host memory takes to hold `needed` bytes in one block.

    The pool's regions are powers of two and are never joined. So the first request must be for
    everything: `training.host_offload.reserve_pool`.
    Source: BFCAllocator::Extend, openxla/xla xla/tsl/framework/bfc_allocator.cc.
    """
    return float(min(2.0 ** math.ceil(math.log2(max(needed, 2**21))), limit))
