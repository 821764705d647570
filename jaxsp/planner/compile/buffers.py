"""Arrays of a compiled program, read from the compiler's dump: sizes, places and live ranges."""

import dataclasses
import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence

from jaxsp.attention import Kernel
from jaxsp.planner.compile.compiled import CompilerDump

HOST_MEMORY_SPACE = 5
"""XLA's number for host memory that a GPU can access."""

_ALLOCATION = re.compile(r"allocation \d+: size (\d+),(?: color (\d+),)?(.*)")
_BUFFER = re.compile(
    r" value: <\d+ (\S+?)(\{[\d, ]*\})?(?: \(phi\))? @\d+> "
    r"\(size=(\d+),offset=(\d+)\): (\w+)\[([\d,]*)\]"
)
_LIVE_RANGE = re.compile(r"\s+(\S+?)(\{[\d, ]*\}):(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """An intermediate array of a program."""

    op_name: str
    """Name that JAX gave the operation; empty if XLA has none."""
    dtype: str
    dims: tuple[int, ...]
    on_host: bool
    begin_byte: int
    """First byte in the program's memory. Two arrays may share bytes, even while both are live."""
    end_byte: int
    first_use: int
    """Number of the first operation during which the array is live."""
    last_use: int
    """Number of the last operation during which the array is live."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    def is_live(self, operation: int) -> bool:
        """True if the array is live during the operation with this number."""
        return self.first_use <= operation <= self.last_use


def read_buffers(dump: CompilerDump) -> list[Buffer]:
    """Reads all arrays of a program except its arguments."""
    live_ranges = {
        match[1] + match[2]: (int(match[3]), int(match[4]))
        for match in map(_LIVE_RANGE.match, dump.live_ranges.splitlines())
        if match
    }
    op_names = dict(
        re.findall(r'^\s+(?:ROOT )?%?(\S+) = .*?op_name="([^"]*)"', dump.hlo_text, re.MULTILINE)
    )
    buffers: list[Buffer] = []
    space = None
    for line in dump.buffer_assignment.splitlines():
        if (allocation := _ALLOCATION.match(line)) is not None:
            is_temporary = "preallocated-temp" in allocation[3]
            space = int(allocation[2] or 0) if is_temporary else None
        elif space is not None and (value := _BUFFER.match(line)) is not None:
            live_range = live_ranges.get(value[1] + (value[2] or "{}"))
            if live_range is None:  # inside a fusion, which holds no arrays
                continue
            begin = int(value[4])
            buffers.append(
                Buffer(
                    op_name=op_names.get(value[1], ""),
                    dtype=value[5],
                    dims=tuple(int(dim) for dim in value[6].split(",") if dim),
                    on_host=space == HOST_MEMORY_SPACE,
                    begin_byte=begin,
                    end_byte=begin + int(value[3]),
                    first_use=live_range[0],
                    last_use=live_range[1],
                )
            )
    return buffers


def read_argument_bytes(dump: CompilerDump) -> dict[tuple[str, bool], int]:
    """Reads the bytes of a program's arguments by name and by whether they are in host memory.

    Names are `state.master`, `state.opt_state` and so on.
    """
    # the arguments of training.train_step's function `step`
    names = dict(re.findall(r'parameter\((\d+)\).*op_name="(state\.\w+|batch)\b', dump.hlo_text))
    sizes: dict[tuple[str, bool], int] = {}
    for line in dump.buffer_assignment.splitlines():
        allocation = _ALLOCATION.match(line)
        parameter = allocation and re.search(r"parameter (\d+),", allocation[3])
        if allocation and parameter and parameter[1] in names:
            key = (names[parameter[1]], int(allocation[2] or 0) == HOST_MEMORY_SPACE)
            sizes[key] = sizes.get(key, 0) + int(allocation[1])
    return sizes


def compute_peak_bytes(buffers: Sequence[Buffer]) -> int:
    """Computes the largest number of bytes that some arrays take at one time."""
    return _union_bytes(find_peak_buffers(buffers))


def find_peak_buffers(
    buffers: Sequence[Buffer], extra_bytes: Mapping[int, int] = types.MappingProxyType({})
) -> list[Buffer]:
    """Finds the arrays that are live at the peak of memory.

    Args: extra_bytes: other memory, by the number of the operation that uses it.
    """
    peak_buffers: list[Buffer] = []
    peak_bytes = -1
    for operation in sorted({buffer.first_use for buffer in buffers} | extra_bytes.keys()):
        live = [buffer for buffer in buffers if buffer.is_live(operation)]
        num_bytes = _union_bytes(live) + extra_bytes.get(operation, 0)
        if num_bytes > peak_bytes:
            peak_buffers = live
            peak_bytes = num_bytes
    return peak_buffers


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


def _union_bytes(buffers: Iterable[Buffer]) -> int:
    """Computes the bytes that arrays cover, each byte once."""
    total = covered = 0
    for begin, end in sorted((buffer.begin_byte, buffer.end_byte) for buffer in buffers):
        total += max(0, end - max(begin, covered))
        covered = max(covered, end)
    return total
