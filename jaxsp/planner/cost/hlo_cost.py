"""What a compiled program computes, and what it moves through the memory of its device and of the host, read from its text.

A kernel is an instruction that the device runs by itself: a fusion, a copy, a product. Collectives are in `comms`, and cuDNN's
attention, which hides in a call, has a formula (`roofline`).
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxsp.planner.compile import hlo
from jaxsp.planner.compile.hlo import HloModule, Instruction
from jaxsp.planner.cost import comms

_HOST_LAYOUT = ":S(5)"
"""In the layout of an array in host memory."""

_FREE_OPCODES = (
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "call",
        "conditional",
        "after-all",
    ),
    *(
        "partition-id",
        "replica-id",
        "opt-barrier",
        "copy-start",
        "fusion-start",
        "async-start",
        "async-update",
        "async-done",
    ),
)
"""Instructions that move nothing themselves. A copy or fusion that begins with -start is counted where it is done, and what an
async-start runs, in the computation that it calls."""

_SLICING_OPCODES = ("dynamic-slice", "slice", "gather")
"""Instructions that read but a part of their first operand."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCost:
    """An instruction that a device runs."""

    line_number: int
    """Of its line in the program's text."""
    name: str
    op_name: str
    """Where it comes from, as JAX calls it."""
    flops: float
    """Of the matrix products in it, each time: 2 for a multiplication and an addition."""
    device_bytes: float
    """Read from and written to the device's memory, each time; what is read twice counts once."""
    bytes_from_host: float
    """Bytes that come from the host's memory, each time,"""
    bytes_to_host: float
    """and that go there."""
    num_runs: int
    begin_line: int
    """Line number where it starts."""
    end_line: int
    """Line number where it is waited for: `begin` unless it runs asynchronously."""


def read_kernel_costs(text: str) -> list[KernelCost]:
    """Every kernel of a compiled program, in the order of its text; those of branches too, as if each were taken.

    Args:   text: a jax.stages.Compiled's `as_text()`.
    Raises: ValueError for a loop around one that runs who knows how often.
    """
    program = hlo.parse_module(text)
    top = find_unfused(program)
    counted = {
        line.line_number: (name, line)
        for name in top
        for line in program.computations[name]
        if line.opcode not in _FREE_OPCODES
        and line.opcode.removesuffix("-start").removesuffix("-done") not in comms.COLLECTIVES
    }
    reader = _CostReader(program)
    return [
        reader.read_cost(*counted[line.line_number], times=times)
        for line, times in hlo.count_runs(
            program, lambda line: line.line_number in counted, include_branches=True
        )
        if line.opcode != "custom-call" or "__cublas$" in line.attributes
    ]


def find_unfused(program: HloModule) -> list[str]:
    """Computations whose instructions run one by one: the entry, bodies of loops, and what they call."""
    found, waiting = [], [program.entry]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.append(name)
        for line in program.computations[name]:
            if line.opcode == "while":
                waiting.append(line.find_computation("body"))
            elif line.opcode in ("call", "async-start", "conditional"):
                waiting += line.called_computations
    return found


class _CostReader:
    """Reads a program's instructions with their operands."""

    def __init__(self, program: HloModule):
        self._program = program
        self._instructions = {
            name: {line.name: line for line in lines}
            for name, lines in program.computations.items()
        }
        self._pairs = hlo.find_async_pairs(program)

    def read_cost(self, computation: str, line: Instruction, *, times: int) -> KernelCost:
        here, begun = self._instructions[computation], line
        if line.opcode.endswith("-done"):
            begun = here[line.operand_names[-1]]
        # each operand once: an instruction may name one twice
        read = [
            (one, self._read_bytes(begun, number, one))
            for number, one in self._iterate_operands(begun, here)
        ]
        written = self._written_bytes(begun, line, here)
        total = dict.fromkeys((False, True), 0.0)
        for operand, size in read:
            total[_HOST_LAYOUT in operand.shape] += size
        to_host = sum((size for is_host, size in written if is_host), start=0.0)
        op_name = re.search(r'op_name="([^"]*)"', begun.attributes)
        begin, end = self._pairs.get(computation, (begun.line_number, line.line_number))
        return KernelCost(
            line_number=line.line_number,
            name=line.name,
            op_name=op_name[1] if op_name else "",
            flops=sum(self._iterate_matmul_flops(begun, here), start=0.0),
            device_bytes=total[False] + sum(size for is_host, size in written if not is_host),
            bytes_from_host=total[True],
            bytes_to_host=to_host,
            num_runs=times,
            begin_line=begin,
            end_line=end,
        )

    def _iterate_operands(
        self, line: Instruction, here: dict[str, Instruction]
    ) -> Iterator[tuple[int, Instruction]]:
        seen = set()
        for number, name in enumerate(line.operand_names):
            if name in here and name not in seen:
                seen.add(name)
                yield number, here[name]

    def _read_bytes(self, line: Instruction, number: int, operand: Instruction) -> float:
        """Bytes that an instruction reads of one of its operands."""
        whole = comms.compute_shape_bytes(operand.shape)
        if line.opcode in _SLICING_OPCODES and number == 0:
            return min(whole, comms.compute_shape_bytes(line.shape))
        if line.opcode == "dynamic-update-slice" and number == 0:
            return 0.0
        if not line.opcode.startswith("fusion"):
            return whole
        inside = self._program.computations[line.find_computation("calls")]
        (parameter,) = [
            one
            for one in inside
            if one.opcode == "parameter" and one.operands.strip() == str(number)
        ]
        return min(whole, self._used_bytes(inside, parameter))

    def _used_bytes(self, inside: list[Instruction], value: Instruction) -> float:
        """Bytes of a value that the instructions of a fusion read."""
        size = 0.0
        for user in inside:
            if value.name not in user.operand_names:
                continue
            first = user.operand_names[0] == value.name
            if user.opcode == "bitcast":
                size += self._used_bytes(inside, user)
            elif user.opcode in _SLICING_OPCODES and first:
                size += comms.compute_shape_bytes(user.shape)
            elif not (user.opcode == "dynamic-update-slice" and first):
                return math.inf
        return size

    def _written_bytes(
        self, begun: Instruction, line: Instruction, here: dict[str, Instruction]
    ) -> list[tuple[bool, float]]:
        """Whether on the host, and bytes, of what an instruction writes."""
        if begun.opcode == "dynamic-update-slice":
            return [
                (
                    _HOST_LAYOUT in line.shape,
                    comms.compute_shape_bytes(here[line.operand_names[1]].shape),
                )
            ]
        if not begun.opcode.startswith("fusion"):
            # a copy's -start says where from and where to; its -done only where to
            return [(_HOST_LAYOUT in line.shape, comms.compute_shape_bytes(line.shape))]
        inside = self._program.computations[begun.find_computation("calls")]
        named = {one.name: one for one in inside}
        root = inside[-1]
        parts = [named[name] for name in root.operand_names] if root.opcode == "tuple" else [root]
        found = []
        for part in parts:
            made = part
            while made.opcode in ("bitcast", "copy"):
                made = named[made.operand_names[0]]
            written = (
                named[made.operand_names[1]].shape
                if made.opcode == "dynamic-update-slice"
                else part.shape
            )
            found.append((_HOST_LAYOUT in part.shape, comms.compute_shape_bytes(written)))
        return found

    def _iterate_matmul_flops(
        self, line: Instruction, here: dict[str, Instruction]
    ) -> Iterator[float]:
        """Operations of each matrix product in an instruction."""
        if line.opcode == "dot":
            (dims,) = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", line.attributes)
            yield self._matmul_flops(line, here, [int(dim) for dim in dims.split(",") if dim])
        elif line.opcode == "custom-call" and "__cublas$" in line.attributes:
            (dims,) = re.findall(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.attributes)
            yield self._matmul_flops(line, here, [int(dim) for dim in re.findall(r"\d+", dims)])
        elif line.opcode.startswith("fusion"):
            inner = self._instructions[line.find_computation("calls")]
            for one in inner.values():
                yield from self._iterate_matmul_flops(one, inner)

    def _matmul_flops(
        self, line: Instruction, here: dict[str, Instruction], contracted: list[int]
    ) -> float:
        ((_, left),) = comms.parse_shape(here[line.operand_names[0]].shape)
        (_, result), *_ = comms.parse_shape(line.shape)
        return 2.0 * math.prod(result) * math.prod(left[dim] for dim in contracted)
