"""Kernels of a GPU in a trace of JAX's profiler: idle time, and slowdown beside collectives."""

import collections
import gzip
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

_MATMUL_WORDS = ("gemm", "nvjet", "cutlass", "xmma")
"""Parts of the names of kernels that multiply matrices: cuBLAS's, XLA's and CUTLASS's."""


class Kernel(NamedTuple):
    """A kernel that ran, in microseconds."""

    name: str
    begin: float
    end: float


def read_kernels(folder: pathlib.Path, *, device: str = "/device:GPU:0") -> list[Kernel]:
    """Reads the kernels of a device from the trace in a folder of jax.profiler.trace, in order."""
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(file, "rt", encoding="utf-8") as text:
        events = json.load(text)["traceEvents"]
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"].get("name", "")
        for event in events
        if event.get("ph") == "M"
    }
    kernels = []
    for event in events:
        if event.get("ph") != "X":
            continue
        process = names.get(("process_name", event["pid"], None), "")
        thread = names.get(("thread_name", event["pid"], event["tid"]), "")
        # other threads of the device repeat the same time by operation and by module
        if process.startswith(device) and thread.startswith("Stream"):
            kernels.append(Kernel(event["name"], event["ts"], event["ts"] + event["dur"]))
    return sorted(kernels, key=lambda kernel: kernel.begin)


def last_kernels(kernels: Sequence[Kernel], seconds: float) -> list[Kernel]:
    """The kernels that begin in the last `seconds`."""
    begin = max(kernel.end for kernel in kernels) - 1e6 * seconds
    return [kernel for kernel in kernels if kernel.begin >= begin]


def idle_fraction(kernels: Sequence[Kernel]) -> float:
    """Fraction of the time from the first kernel to the last in which none runs."""
    ordered = sorted(kernels, key=lambda kernel: kernel.begin)
    busy = 0.0
    reached = ordered[0].begin
    for kernel in ordered:
        busy += max(0.0, kernel.end - max(kernel.begin, reached))
        reached = max(reached, kernel.end)
    return 1 - busy / (reached - ordered[0].begin)


def collective_slowdown(kernels: Sequence[Kernel]) -> float | None:
    """Time of matrix products beside a collective over that of the same kernels without one.

    None if no kernel ran both ways. Kernels of equal names are assumed to do equal work.
    """
    collectives = [kernel for kernel in kernels if "nccl" in kernel.name.lower()]
    seconds: dict[str, dict[bool, list[float]]] = collections.defaultdict(
        lambda: {False: [], True: []}
    )
    for kernel in kernels:
        if any(word in kernel.name.lower() for word in _MATMUL_WORDS):
            is_beside = any(
                other.begin < kernel.end and kernel.begin < other.end for other in collectives
            )
            seconds[kernel.name][is_beside].append(kernel.end - kernel.begin)
    both = [times for times in seconds.values() if times[False] and times[True]]
    if not both:
        return None
    beside = sum(sum(times[True]) for times in both)
    without = sum(len(times[True]) * sum(times[False]) / len(times[False]) for times in both)
    return beside / without
