"""Arithmetic and memory traffic of the kernels of a compiled program, read from its text.

A kernel is an instruction that the device runs: a fusion, a copy, a matrix product. Not counted
here: collectives (see `comms`), and attention inside cuDNN's calls (see `roofline`).
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxsp.planner.compile import hlo
from jaxsp.planner.compile.hlo import HloModule, Instruction
from jaxsp.planner.cost import comms

_HOST_LAYOUT = ":S(5)"
"""Part of the layout of an array in host memory."""

_CUBLAS_PREFIX = "__cublas$"

_MOSAIC_PREFIX = "mosaic_gpu"

_MOSAIC_EFFICIENCY = 0.7
"""Assumed rate of products in Mosaic kernels, relative to large products of cuBLAS. Not measured.
"""

_FLOAT8_TARGET = "matmul$f8"
"""Part of the target of cuBLAS' products of 8-bit floats."""

_FLOAT8_EFFICIENCY = 1.65
"""Assumed rate of products of 8-bit floats, relative to those of bfloat16. Not measured."""

_FREE_OPCODES = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "copy-start",
    "fusion-start",
    "async-start",
    "async-update",
    "async-done",
)
"""Instructions that move no data. An asynchronous copy or fusion is counted at its -done, and the
work of an async-start in the computation that it calls."""

_SLICING_OPCODES = ("dynamic-slice", "slice", "gather")
"""Instructions that read only a part of their first operand."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCost:
    """Cost of a kernel. Operations and bytes are those of one run."""

    line_number: int
    op_name: str
    """Name that JAX gave the operation."""
    flops: float
    """Operations of its matrix products: 2 for a multiplication and an addition."""
    device_bytes: float
    """Bytes read from and written to device memory; an operand that is read twice counts once."""
    bytes_from_host: float
    bytes_to_host: float
    efficiency: float = 1.0
    """Rate of its matrix products relative to that of large ones."""
    num_runs: int
    begin_line: int
    """Line number of the instruction that starts it."""
    end_line: int
    """Line number of the instruction that waits for it; begin_line if it is not asynchronous."""


def read_kernel_costs(text: str) -> list[KernelCost]:
    """Reads the cost of every kernel, in the order of the text, as if each branch were taken.

    Args: text: `as_text()` of a jax.stages.Compiled.
    Raises: ValueError for a loop around a kernel with an unknown trip count.
    """
    program = hlo.parse_module(text)
    computations = {
        line.line_number: name
        for name in _find_kernel_computations(program)
        for line in program.computations[name]
        if line.opcode not in _FREE_OPCODES
        and line.opcode.removesuffix("-start").removesuffix("-done") not in comms.COLLECTIVES
    }
    runs = hlo.count_runs(
        program, lambda line: line.line_number in computations, include_branches=True
    )
    reader = _CostReader(program)
    return [
        reader.read_cost(computations[line.line_number], line, num_runs=num_runs)
        for line, num_runs in runs
        if line.opcode != "custom-call" or _CUBLAS_PREFIX in line.attributes or _is_mosaic(line)
    ]


def _is_mosaic(line: Instruction) -> bool:
    return line.opcode == "custom-call" and f'target="{_MOSAIC_PREFIX}' in line.attributes


def _find_kernel_computations(program: HloModule) -> list[str]:
    """Finds the computations whose instructions are kernels: the entry, bodies of loops, and the
    computations that these call."""
    names = [program.entry]
    for name in names:  # grows in the loop
        for line in program.computations[name]:
            if line.opcode == "while":
                called = [line.find_computation("body")]
            elif line.opcode in ("call", "async-start", "conditional"):
                called = line.called_computations
            else:
                continue
            names += [computation for computation in called if computation not in names]
    return names


class _CostReader:
    """Reads instructions together with their operands, which are looked up by name."""

    def __init__(self, program: HloModule):
        self._program = program
        self._instructions = {
            name: {line.name: line for line in lines}
            for name, lines in program.computations.items()
        }
        self._async_pairs = hlo.find_async_pairs(program)

    def read_cost(self, computation: str, line: Instruction, *, num_runs: int) -> KernelCost:
        """Reads the cost of an instruction of a computation."""
        lines = self._instructions[computation]
        start = lines[line.operand_names[-1]] if line.opcode.endswith("-done") else line
        names = start.operand_names
        reads = [
            (lines[name].shape, self._read_bytes(start, names.index(name), lines[name]))
            for name in dict.fromkeys(names)
            if name in lines
        ]
        writes = list(self._written_bytes(start, line, lines))

        def sum_bytes(arrays: list[tuple[str, float]], *, on_host: bool) -> float:
            return sum(
                (size for shape, size in arrays if (_HOST_LAYOUT in shape) == on_host), start=0.0
            )

        efficiency = _MOSAIC_EFFICIENCY if _is_mosaic(start) else 1.0
        if start.opcode == "custom-call" and _FLOAT8_TARGET in start.attributes:
            efficiency = _FLOAT8_EFFICIENCY
        op_name = re.search(r'op_name="([^"]*)"', start.attributes)
        begin, end = self._async_pairs.get(computation, (start.line_number, line.line_number))
        return KernelCost(
            line_number=line.line_number,
            op_name=op_name[1] if op_name else "",
            flops=self._matmul_flops(start, lines),
            efficiency=efficiency,
            device_bytes=sum_bytes([*reads, *writes], on_host=False),
            bytes_from_host=sum_bytes(reads, on_host=True),
            bytes_to_host=sum_bytes(writes, on_host=True),
            num_runs=num_runs,
            begin_line=begin,
            end_line=end,
        )

    def _read_bytes(self, line: Instruction, number: int, operand: Instruction) -> float:
        """Bytes that an instruction reads of its operand with this number."""
        size = comms.compute_shape_bytes(operand.shape)
        if line.opcode in _SLICING_OPCODES and number == 0:
            return min(size, comms.compute_shape_bytes(line.shape))
        if line.opcode == "dynamic-update-slice" and number == 0:
            return 0.0
        if not line.opcode.startswith("fusion"):
            return size
        fused = self._program.computations[line.find_computation("calls")]
        (parameter,) = [
            inner
            for inner in fused
            if inner.opcode == "parameter" and inner.operands.strip() == str(number)
        ]
        return min(size, self._used_bytes(fused, parameter))

    def _used_bytes(self, fused: list[Instruction], value: Instruction) -> float:
        """Bytes of a value that the instructions of a fusion read; infinite for all of it."""
        size = 0.0
        for user in fused:
            if value.name not in user.operand_names:
                continue
            is_first = user.operand_names[0] == value.name
            if user.opcode == "bitcast":
                size += self._used_bytes(fused, user)
            elif user.opcode in _SLICING_OPCODES and is_first:
                size += comms.compute_shape_bytes(user.shape)
            elif not (user.opcode == "dynamic-update-slice" and is_first):
                return math.inf
        return size

    def _written_bytes(
        self, start: Instruction, line: Instruction, lines: dict[str, Instruction]
    ) -> Iterator[tuple[str, float]]:
        """Yields the shape of each result, and the bytes that are written of it.

        Args: start, line: instructions that start a kernel and wait for it; equal if it is not
            asynchronous. The shape of a copy's -start contains the source, that of its -done only
            the result.
        """
        results = [line]
        if start.opcode.startswith("fusion"):
            computation = start.find_computation("calls")
            lines = self._instructions[computation]
            root = self._program.computations[computation][-1]
            is_tuple = root.opcode == "tuple"
            results = [lines[name] for name in root.operand_names] if is_tuple else [root]
        for result in results:
            source = result
            while source.opcode in ("bitcast", "copy") and source is not line:
                source = lines[source.operand_names[0]]
            written = result
            if source.opcode == "dynamic-update-slice":
                written = lines[source.operand_names[1]]
            yield result.shape, comms.compute_shape_bytes(written.shape)

    def _matmul_flops(self, line: Instruction, lines: dict[str, Instruction]) -> float:
        if line.opcode.startswith("fusion"):
            fused = self._instructions[line.find_computation("calls")]
            return sum((self._matmul_flops(inner, fused) for inner in fused.values()), start=0.0)
        if _is_mosaic(line):
            # Products of places with matrices of experts, or of places with places: experts.mosaic
            *_, first, second = (lines[name].shape for name in line.operand_names)
            ((_, places),) = comms.parse_shape(first)
            ((_, others),) = comms.parse_shape(second)
            size = math.prod(others[1:]) if len(others) == 3 else places[1] * others[1]
            return 2.0 * places[0] * size
        is_cublas = line.opcode == "custom-call" and _CUBLAS_PREFIX in line.attributes
        if line.opcode != "dot" and not is_cublas:
            return 0.0
        # lhs_contracting_dims={1} of a dot, "lhs_contracting_dimensions":["1"] of cuBLAS
        (dims,) = re.findall(r"lhs_contracting_dim\w+\W+([\d,\"]*)", line.attributes)
        ((_, left),) = comms.parse_shape(lines[line.operand_names[0]].shape)
        (_, result), *_ = comms.parse_shape(line.shape)
        contracted = math.prod(left[int(dim)] for dim in re.findall(r"\d+", dims))
        return 2.0 * math.prod(result) * contracted
