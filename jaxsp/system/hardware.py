"""Hardware of this node, and the memory of it that JAX may use."""

import contextlib
import ctypes
import math
import os
import pathlib
import re
from collections.abc import Mapping, MutableMapping

from jaxsp.core.units import GIB

PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "B200": 2250.0,
    "GB200": 2500.0,
}
"""Dense bfloat16 TFLOP/s from NVIDIA's data sheets, by words in the device's name; the first match
counts. Names without a form factor are SXM modules."""

GPU_MEMORY_FRACTION = 0.92
"""Greatest fraction of a GPU's memory that JAX allocates at start, unless XLA_CLIENT_MEM_FRACTION
is set. JAX's default is 0.75. The remaining 6 GiB of an H100's 79 are for CUDA and NCCL:
`choose_fraction`."""

WSL_DEVICE = pathlib.Path("/dev/dxg")  # exists in the Windows Subsystem for Linux with GPUs
DEVICES_PER_NODE = 8  # GPUs per node, unless the user gives another number

PROCESS_OVERHEAD_BYTES = 6 * GIB
"""Host memory of a process in addition to its arrays: Python, CUDA, NCCL, staging buffers of
copies, and autotuning."""

OS_RESERVED_BYTES = 8 * GIB  # host memory of a node for the operating system
MIN_FRACTION = 0.5  # least fraction, if CUDA and NCCL would need more of a small GPU
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def count_gpus(environ: Mapping[str, str]) -> int:
    """Number of NVIDIA GPUs that JAX would use, counted without starting JAX."""
    if environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    dev = pathlib.Path("/dev")
    num_installed = len([*dev.glob("nvidia[0-9]*")])
    has_wsl_gpus = num_installed == 0 and WSL_DEVICE.exists()
    if num_installed == 0 and not has_wsl_gpus:
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_installed or 1  # WSL does not show how many there are
    # Like CUDA, which ends the list at the first invalid name, such as -1
    num_visible = 0
    for name in map(str.strip, visible.split(",")):
        is_too_large = name.isdecimal() and not has_wsl_gpus and int(name) >= num_installed
        if not name or name.startswith("-") or is_too_large:
            break
        num_visible += 1
    return num_visible


def gpu_memory_bytes() -> int | None:
    """Bytes of memory of this node's smallest GPU, read without starting CUDA; None if unknown.
    A GPU with less than half of the largest one's memory drives a display. It does not count."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # comes with the driver
    except OSError:
        return None
    count = ctypes.c_uint()
    device = ctypes.c_void_p()
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    totals = []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for index in range(count.value):
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue
        if not nvml.nvmlDeviceGetMemoryInfo(device, memory):
            totals.append(memory[0])
    nvml.nvmlShutdown()
    return min((total for total in totals if 2 * total >= max(totals)), default=None)


def host_memory_bytes() -> int:
    """Bytes of memory of this node, or of the container or job that this process runs in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_cpu_memory_bytes()]
    with contextlib.suppress(FileNotFoundError):
        text = pathlib.Path("/proc/self/cgroup").read_text(encoding="utf-8")
        # For 0::/slurm/job_1/step_0, the step, the job or slurm may have a limit
        for cgroup in re.findall(r"^0::/(.*)", text, re.MULTILINE):
            folder = pathlib.Path("/sys/fs/cgroup", cgroup)
            for file in (path / "memory.max" for path in (folder, *folder.parents)):
                limit = file.read_text(encoding="ascii").strip() if file.is_file() else ""
                limits += [int(limit)] if limit.isdecimal() else []
    return min(limits)


def _cpu_memory_bytes(folder: pathlib.Path = pathlib.Path("/sys/devices/system/node")) -> list[int]:
    """Bytes of memory of the NUMA nodes that have CPUs; empty if they are unknown.

    On GH200 and GB200, the memory of each GPU is a NUMA node without CPUs, and counts as memory of
    the system.
    """
    totals = []
    for node in folder.glob("node[0-9]*"):
        try:
            if not (node / "cpulist").read_text(encoding="ascii").strip():
                continue
            text = (node / "meminfo").read_text(encoding="ascii")
        except OSError:
            return []
        totals += re.findall(r"MemTotal: +(\d+) kB", text)
    return [1024 * sum(map(int, totals))] if totals else []


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
        memory = gpu_memory_bytes()
        fraction = GPU_MEMORY_FRACTION if memory is None else choose_fraction(memory, outside_bytes)
        environ["XLA_CLIENT_MEM_FRACTION"] = str(fraction)
    if not environ.get(_PINNED_LIMIT_VARIABLE):
        num_gpus = count_gpus(environ)
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
    Before `raise_limits` and in a plan, the greatest."""
    values = [environ[name] for name in _FRACTION_VARIABLES if environ.get(name)]
    return float(values[0]) if values else GPU_MEMORY_FRACTION


def pinned_pool_limit(environ: Mapping[str, str]) -> float:
    """Bytes that XLA's pool of pinned host memory may hold per device; infinite without a limit."""
    return float(environ.get(_PINNED_LIMIT_VARIABLE) or math.inf) * GIB


def host_bytes_per_device(
    *, num_processes: int, num_devices: int, total_bytes: int | float | None = None
) -> float:
    """Bytes of host memory available for the arrays of one device of `num_devices` of each of the
    node's processes. Args: total_bytes: memory of the node; default: that of this one."""
    total = host_memory_bytes() if total_bytes is None else total_bytes
    usable = max(0.0, float(total) - OS_RESERVED_BYTES - num_processes * PROCESS_OVERHEAD_BYTES)
    return usable / (num_processes * num_devices)


def pinned_pool_size(needed: int | float, limit: int | float) -> float:
    """Bytes that XLA's pool of pinned host memory takes to hold `needed` bytes in one block.

    The pool's regions are powers of two and are never joined. So the first request must be for
    everything: `sharding.host_offload.reserve_pool`.
    Source: BFCAllocator::Extend, openxla/xla xla/tsl/framework/bfc_allocator.cc.
    """
    return float(min(2.0 ** math.ceil(math.log2(max(needed, 2**21))), limit))
