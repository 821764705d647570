"""Hardware of this node: its GPUs and its memory."""

import contextlib
import ctypes
import os
import pathlib
import re
from collections.abc import Mapping

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


def count_gpus(environ: Mapping[str, str]) -> int:
    """Number of NVIDIA GPUs that JAX would use, counted without starting JAX."""
    if environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    dev = pathlib.Path("/dev")
    num_installed = len([*dev.glob("nvidia[0-9]*")])
    has_wsl_gpus = num_installed == 0 and is_wsl()
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


def is_wsl() -> bool:
    """True in the Windows Subsystem for Linux, if it has GPUs."""
    return pathlib.Path("/dev/dxg").exists()


def gpu_memory_bytes() -> int | None:
    """Bytes of memory of this node's smallest GPU, read without starting CUDA; None if unknown.

    A GPU with less than half of the largest one's memory drives a display. It does not count.
    """
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
