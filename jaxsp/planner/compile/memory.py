"""Memory of a step compiled for absent GPUs, with cuDNN's workspace, which XLA does not count."""

import dataclasses
import re
from collections.abc import Sequence

from jaxsp.attention.kernels.kernel import Kernel
from jaxsp.memory import memory_fit
from jaxsp.memory.memory_fit import MemoryUse
from jaxsp.planner.compile.compiled import CompilerDump, PlannedStep

HOST_MEMORY_SPACE = 5
"""XLA's number for host memory that a GPU can access."""

_ALLOCATION = re.compile(r"allocation \d+: size \d+,(?: color (\d+),)?(.*)")
_BUFFER = re.compile(
    r" value: <\d+ (\S+?)(\{[\d, ]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
_LIVE_RANGE = re.compile(r"\s+(\S+?)(\{[\d, ]*\}):(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """An intermediate array of a program."""

    on_host: bool
    begin_byte: int
    """First byte in the program's memory. Two arrays may share bytes, even while both are live."""
    end_byte: int
    first_use: int
    """Number of the first operation during which the array is live."""
    last_use: int
    """Number of the last operation during which the array is live."""


def measure_step(step: PlannedStep) -> MemoryUse:
    """Measures the memory of a compiled step.

    Adds the part of the estimate of cuDNN's workspace that does not fit into memory that is free
    during the backward calls.

    Raises: RuntimeError if the program has no such calls.
    """
    kernel = step.spec.attention.kernel
    counted = memory_fit.read_memory_use(step.executable, step.spec.attention)
    if not counted.uncounted_workspace:
        return counted
    buffers = [buffer for buffer in read_buffers(step.dump) if not buffer.on_host]
    calls = find_backward_calls(step.dump, kernel)
    if not calls:
        raise RuntimeError(
            f"the compiled step has no backward call of {kernel.title} attention "
            f"({kernel.custom_call_prefix}*Backward), so its memory cannot be planned"
        )
    live_bytes = max(compute_live_bytes(buffers, call) for call in calls)
    analysis = step.executable.memory_analysis()
    assert analysis is not None, "read_memory_use has read it"
    free = counted.device - analysis.argument_size_in_bytes - live_bytes
    return counted._replace(uncounted_workspace=max(0, counted.uncounted_workspace - free))


def read_buffers(dump: CompilerDump) -> list[Buffer]:
    """Reads the places and live ranges of all arrays of a program except its arguments."""
    live_ranges = {
        match[1] + match[2]: (int(match[3]), int(match[4]))
        for match in map(_LIVE_RANGE.match, dump.live_ranges.splitlines())
        if match
    }
    buffers: list[Buffer] = []
    space = None
    for line in dump.buffer_assignment.splitlines():
        if (allocation := _ALLOCATION.match(line)) is not None:
            is_temporary = "preallocated-temp" in allocation[2]
            space = int(allocation[1] or 0) if is_temporary else None
        elif space is not None and (value := _BUFFER.match(line)) is not None:
            live_range = live_ranges.get(value[1] + (value[2] or "{}"))
            if live_range is None:  # inside a fusion, which holds no arrays
                continue
            begin = int(value[4])
            buffers.append(
                Buffer(
                    on_host=space == HOST_MEMORY_SPACE,
                    begin_byte=begin,
                    end_byte=begin + int(value[3]),
                    first_use=live_range[0],
                    last_use=live_range[1],
                )
            )
    return buffers


def compute_live_bytes(buffers: Sequence[Buffer], operation: int) -> int:
    """Computes the bytes that arrays cover during an operation, each byte once."""
    total = covered = 0
    for begin, end in sorted(
        (buffer.begin_byte, buffer.end_byte)
        for buffer in buffers
        if buffer.first_use <= operation <= buffer.last_use
    ):
        total += max(0, end - max(begin, covered))
        covered = max(covered, end)
    return total


def find_backward_calls(dump: CompilerDump, kernel: Kernel) -> list[int]:
    """Finds the numbers of the operations that are backward calls of an attention kernel."""
    if not kernel.custom_call_prefix:
        return []
    names = re.findall(
        r"^\s+(?:ROOT )?%?(\S+) = .*custom_call_target="
        rf'"{re.escape(kernel.custom_call_prefix)}\w*Backward',
        dump.hlo_text,
        re.MULTILINE,
    )
    numbers = {
        name: int(number)
        for number, name in re.findall(r"^\s+(\d+):(\S+)$", dump.live_ranges, re.MULTILINE)
    }
    return [numbers[name] for name in names if name in numbers]
