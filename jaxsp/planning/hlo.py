"""Reader of compiled programs: trip counts, collectives, kernels, and places of arrays in memory.

Of collectives, only payload counts: the minimum that NCCL's algorithms send of an array, with n
devices in a group.

    all-gather, all-to-all    (n - 1) / n of the result
    reduce-scatter            (n - 1) / n of the input
    all-reduce                2 (n - 1) / n
    collective-permute        all of it

A kernel is an instruction that the device runs: a fusion, a copy, a matrix product. Attention
inside cuDNN's calls is not counted, nor is that inside loops over blocks of keys.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxsp.attention import nodes
from jaxsp.attention.attend import KINDS_SCOPE
from jaxsp.attention.kernels import blockwise
from jaxsp.attention.kernels.kernel import Kernel
from jaxsp.attention.nodes import Groups, Load
from jaxsp.attention.ring import HOPS_SCOPE as RING_HOPS_SCOPE
from jaxsp.planning import gpus

COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "collective-permute")

_UNSUPPORTED = ("ragged-all-to-all", "collective-broadcast", "send", "recv")
"""Operations that jaxsp does not use; parsing one raises an error."""

_HOST_LAYOUT = ":S(5)"
"""Part of the layout of an array in host memory."""

_HOST_COLOR = "5"
"""XLA's number for host memory that a GPU can access."""

_CUBLAS = "__cublas$"
_MOSAIC = 'target="mosaic_gpu'
_FLOAT8 = "matmul$f8"

_FREE_OPCODES = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
    *("while", "call", "conditional", "after-all", "partition-id", "replica-id"),
    *("copy-start", "fusion-start", "async-start", "async-update", "async-done"),
)
"""Instructions that move no data. An asynchronous copy or fusion is counted at its -done, and the
work of an async-start in the computation that it calls."""

_SLICING_OPCODES = ("dynamic-slice", "slice", "gather")
"""Instructions that read only a part of their first operand."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = ")
_KIND_SWITCH = re.compile(rf'op_name="[^"]*/{KINDS_SCOPE}_(\d+(?:_\d+)+)\)*/cond"')
_RING_HOPS = re.compile(rf'op_name="[^"]*/{RING_HOPS_SCOPE}\)*/cond"')
_KEY_LOOP = re.compile(
    rf'op_name="[^"]*/(?:{blockwise.FORWARD_SCOPE}|{blockwise.BACKWARD_SCOPE})\)*/while"'
)
_CALLED_COMPUTATIONS = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)|"
    r"\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


# Instructions


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Instruction:
    """An instruction of a compiled program."""

    line_number: int
    """Line number in the text; -1 for one that XLA abbreviates: see `_expand_tuple_elements`."""
    computation: str
    """Name of the computation that has it."""
    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @property
    def operation(self) -> str:
        """Opcode without `-start` or `-done`."""
        return self.opcode.removesuffix("-start").removesuffix("-done")

    @property
    def op_name(self) -> str:
        """Name that JAX gave the operation; several names if XLA combined operations."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtype and dims of the result, or of a tuple's arrays."""
        found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", self.shape)
        return [(dtype, tuple(int(dim) for dim in dims.split(",") if dim)) for dtype, dims in found]

    @property
    def num_bytes(self) -> float:
        return sum(_dtype_bits(dtype) * math.prod(dims) / 8 for dtype, dims in self.arrays)

    @functools.cached_property
    def called_computations(self) -> list[str]:
        """Names of the computations that it calls."""
        return [
            name.strip().lstrip("%")
            for single, several in _CALLED_COMPUTATIONS.findall(self.attributes)
            for name in (several.split(",") if several else [single])
        ]

    @functools.cached_property
    def operand_names(self) -> list[str]:
        return [
            word.split()[-1].lstrip("%")
            for word in re.sub(r"/\*.*?\*/", "", self.operands).split(",")
            if word.strip()
        ]

    @functools.cached_property
    def is_key_loop(self) -> bool:
        """True for a loop of the blockwise kernel, whose trip count depends on the documents."""
        return self.opcode == "while" and _KEY_LOOP.search(self.attributes) is not None

    @property
    def run_computations(self) -> list[str]:
        """Names of the computations whose instructions the device runs one by one, except those of
        a key loop."""
        if self.opcode == "while":
            return [] if self.is_key_loop else [self.find_computation("body")]
        # async-update and async-done name the computation that async-start runs
        is_call = self.opcode in ("call", "async-start", "conditional")
        return self.called_computations if is_call else []

    def calls(self, target: str) -> bool:
        """True for a custom call whose attributes contain this text."""
        return self.opcode == "custom-call" and target in self.attributes

    def find_computation(self, name: str) -> str:
        """Name of the computation of an attribute such as `body`."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        assert match is not None, f"{self.name} has no {name}"
        return match[1]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A compiled program."""

    computations: dict[str, dict[str, Instruction]]
    """Instructions of each computation in their order, by its name and theirs."""
    entry: str
    """Name of the computation that runs first."""
    num_devices: int

    def operands(self, line: Instruction) -> list[Instruction]:
        """Operands of an instruction that its computation has, each once."""
        lines = self.computations[line.computation]
        return [lines[name] for name in dict.fromkeys(line.operand_names) if name in lines]

    def last(self, computation: str) -> Instruction:
        """The instruction whose result is that of a computation."""
        return next(reversed(self.computations[computation].values()))

    @functools.cached_property
    def async_pairs(self) -> dict[str, tuple[int, int]]:
        """Lines of the start and the end of each asynchronous computation, by its name.

        jax 0.12 wraps collectives and host copies in such computations. If several pairs run one,
        the closest pair counts.
        """
        pairs: dict[str, tuple[int, int]] = {}
        for lines in self.computations.values():
            starts: dict[str, Instruction] = {}
            for line in lines.values():
                start = starts.get(line.operand_names[-1]) if line.operand_names else None
                if line.opcode == "async-start":
                    starts[line.name] = line
                elif line.opcode == "async-update" and start:
                    starts[line.name] = start
                elif line.opcode == "async-done" and start:
                    (name,) = start.called_computations
                    pair = start.line_number, line.line_number
                    pairs[name] = min(
                        pair, pairs.get(name, pair), key=lambda ends: ends[1] - ends[0]
                    )
        return pairs


@functools.lru_cache(maxsize=2)
def parse(text: str) -> Program:
    """Parses the text of a program, `as_text()` of a jax.stages.Compiled.

    Raises: ValueError if no computation is the entry.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry = computation = ""
    lines: dict[str, Instruction] = {}
    for number, line in enumerate(text.splitlines()):
        if (header := _COMPUTATION.match(line)) is not None:
            computation = header[2]
            lines = computations[computation] = {}
            entry = computation if header[1] else entry
        elif (named := _INSTRUCTION.match(line)) is not None:
            is_tuple = line[named.end()] == "("
            end = _find_closing_paren(line, named.end()) if is_tuple else named.end()
            shape_end = line.index(" ", end)
            opcode, _, _ = line[shape_end:].strip().partition("(")
            operands_begin = line.index("(", shape_end)
            operands_end = _find_closing_paren(line, operands_begin)
            operands = line[operands_begin + 1 : operands_end]
            _expand_tuple_elements(operands, lines)
            lines[named[1]] = Instruction(
                line_number=number,
                computation=computation,
                name=named[1],
                shape=line[named.end() : shape_end],
                opcode=opcode,
                operands=operands,
                attributes=line[operands_end + 1 :],
            )
    if not entry:
        raise ValueError("the text must be a compiled program: no computation in it is its ENTRY")
    head = text.partition("\n")[0]
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)
    return Program(computations=computations, entry=entry, num_devices=math.prod(map(int, sizes)))


def _expand_tuple_elements(operands: str, lines: dict[str, Instruction]) -> None:
    """Adds the get-tuple-elements that operands abbreviate as `%tuple#index`, as of jax 0.11."""
    for name, index in sorted(set(re.findall(r"%([^\s,()#]+)#(\d+)", operands))):
        shapes = [""]  # of the tuple's elements, which may be tuples
        depth = 0
        for letter in re.sub(r"/\*.*?\*/", "", lines[name].shape[1:-1]):
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 0:
                shapes.append("")
            else:
                shapes[-1] += letter
        element = dataclasses.replace(
            lines[name],
            line_number=-1,
            name=f"{name}#{index}",
            shape=shapes[int(index)].strip(),
            opcode="get-tuple-element",
            operands=f"%{name}",
            attributes=f", index={index}",
        )
        lines.setdefault(element.name, element)


def _find_closing_paren(line: str, begin: int) -> int:
    """Finds the parenthesis that closes the one at `begin`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, begin):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unclosed parenthesis: {line.strip()[:200]}")


def _dtype_bits(dtype: str) -> int:
    match = re.fullmatch(r"pred|(?:bf|[sufc])(8|16|32|64|128)(?:e\w+)?", dtype)
    if match is None:
        raise ValueError(f"an array of the program has the unknown dtype {dtype}")
    return int(match[1] or 8)


# Runs


def find_kind_fractions(line: Instruction) -> dict[str, float]:
    """Finds the fraction of the runs of an instruction in which each of its computations runs.

    It is empty unless the instruction is one of two conditionals: the one that selects the
    attention of a layer's kind, whose scope has the number of layers of each kind; or the one that
    selects the hops of a ring, which counts as if it made all hops, as for one document per row.
    """
    if line.opcode != "conditional":
        return {}
    if _RING_HOPS.search(line.attributes):
        *others, all_hops = line.called_computations
        return dict.fromkeys(others, 0.0) | {all_hops: 1.0}
    match = _KIND_SWITCH.search(line.attributes)
    if match is None:
        return {}
    num_layers = [int(number) for number in match[1].split("_")]
    fractions: dict[str, float] = collections.defaultdict(float)
    for name, number in zip(line.called_computations, num_layers, strict=True):
        fractions[name] += number / sum(num_layers)
    return fractions


def count_runs(
    program: Program,
    is_counted: Callable[[Instruction], bool],
    *,
    include_branches: bool = False,
) -> list[tuple[Instruction, int]]:
    """Counts the runs of some instructions, which are returned in the order of the text.

    A layer's attention of a kind counts for the layers of this kind: see `find_kind_fractions`.

    Args: include_branches: counts instructions of other branches as if each branch were taken.
    Raises: ValueError for a loop around an instruction whose trip count is unknown; and, unless
        `include_branches`, for an instruction in another branch.
    """
    runs: collections.Counter[Instruction] = collections.Counter()

    @functools.cache
    def is_idle(name: str) -> bool:
        """True if no counted instruction is in a computation or in what it calls."""
        return not any(
            is_counted(line) or not all(map(is_idle, line.run_computations))
            for line in program.computations[name].values()
        )

    def walk(name: str, times: int) -> None:
        for line in program.computations[name].values():
            if is_counted(line):
                runs[line] += times
            busy = [called for called in line.run_computations if not is_idle(called)]
            if not busy:
                continue
            fractions = find_kind_fractions(line)
            if line.opcode == "conditional" and not (fractions or include_branches):
                raise ValueError(f"{line.name} is a conditional: its computations may not run")
            trip_count = find_trip_count(line, program) if line.opcode == "while" else 1
            for called in busy:
                if num_runs := round(times * trip_count * fractions.get(called, 1)):
                    walk(called, num_runs)

    walk(program.entry, 1)
    return sorted(runs.items(), key=lambda pair: pair[0].line_number)


def find_trip_count(loop: Instruction, program: Program) -> int:
    """Finds the trip count of a loop: XLA's own, or from begin and end of a counter that adds one.

    Raises: ValueError if the text has neither.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known is not None:
        return int(known[1])
    # XLA drops the count of a loop whose first or last iteration it peels, and keeps the counter
    counter = re.search(r'"known_induction_variable":\{"tuple_index":"(\d+)"\}', loop.attributes)
    begin = end = step = None
    if counter is not None:
        index = int(counter[1])
        around = program.computations[loop.computation]
        begin = _find_constant(around[loop.operand_names[0]].operand_names[index], around)
        condition, body = (program.last(loop.find_computation(x)) for x in ("condition", "body"))
        end = _find_operand_constant(condition, "compare", program)
        result = program.computations[body.computation][body.operand_names[index]]
        step = _find_operand_constant(result, "add", program)
    if begin is None or end is None or step != 1:
        raise ValueError(f"{loop.name} is a loop with an unknown trip count")
    return end - begin


def _find_operand_constant(line: Instruction, opcode: str, program: Program) -> int | None:
    """Finds the constant that a value is compared with (as less than it) or that is added to it.

    The instruction may be in a fusion.
    """
    while line.opcode == "fusion":
        line = program.last(line.find_computation("calls"))
    if line.opcode != opcode or (opcode == "compare" and "direction=LT" not in line.attributes):
        return None
    lines = program.computations[line.computation]
    constants = [_find_constant(name, lines) for name in line.operand_names]
    if opcode == "compare":  # less than: the constant is on the right
        return constants[1] if constants[0] is None else None
    known = [value for value in constants if value is not None]
    return known[0] if len(known) == 1 else None


def _find_constant(name: str, lines: Mapping[str, Instruction]) -> int | None:
    """Finds the integer that a value is, or a copy of one; None if it is not a constant."""
    line = lines[name]
    while line.opcode in ("copy", "bitcast"):
        line = lines[line.operand_names[0]]
    is_integer = line.opcode == "constant" and re.fullmatch(r"-?\d+", line.operands)
    return int(line.operands) if is_integer else None


# Collectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a compiled program."""

    operation: str
    """One of COLLECTIVES."""
    op_name: str
    """See `Instruction.op_name`. Older XLA drops the name of combined operations."""
    groups: Groups
    """Devices that communicate with each other, in the order of the mesh; of a collective-permute,
    each sends to the next one."""
    is_ring: bool
    """False if a collective-permute has groups whose last device does not send to the first."""
    bytes_by_dtype: Mapping[str, float]
    """Bytes that a device sends in each run, by dtype."""
    num_runs: int
    begin_line: int
    """Line number of the instruction that starts it."""
    end_line: int
    """Line number of the instruction that waits for it. Instructions in between overlap it."""

    def find_load(self, node_devices: int) -> Load:
        """Finds its load on the links and network cards of nodes of this size."""
        return nodes.find_load(
            self.operation, self.groups, node_devices=node_devices, is_ring=self.is_ring
        )

    @property
    def total_bytes(self) -> float:
        """Bytes that a device sends in all runs."""
        return sum(self.bytes_by_dtype.values()) * self.num_runs


@functools.lru_cache(maxsize=2)
def parse_collectives(text: str) -> list[Collective]:
    """Parses all collectives of a program, in the order of its text, also those that send nothing.

    Raises: ValueError for a collective, or a loop around one, in an unknown form.
    """
    program = parse(text)
    starts: dict[Instruction, Instruction] = {}
    """Instruction that starts each collective, by the one that waits for it."""
    for lines in program.computations.values():
        waiting: dict[str, Instruction] = {}
        for line in lines.values():
            if line.operation in _UNSUPPORTED:
                raise ValueError(f"{line.name}: {line.opcode} is not supported")
            if line.operation not in COLLECTIVES:
                continue
            if line.opcode.endswith("-start"):
                waiting[line.name] = line
                continue
            starts[line] = line
            if line.opcode.endswith("-done"):
                name = line.operand_names[-1]
                if name not in waiting:
                    raise ValueError(
                        f"{line.name} ends {name}, which does not begin in the same computation"
                    )
                starts[line] = waiting.pop(name)
        for name in waiting:
            raise ValueError(f"{name} does not end in the same computation")
    return [
        _read_collective(program, starts[line], line, num_runs)
        for line, num_runs in count_runs(program, starts.__contains__)
    ]


def find_axes(group: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Finds the axes of a mesh that a group of its devices spans.

    A group has all devices along its axes, or evenly spaced ones of a single axis.

    Raises: ValueError for another group.
    """
    coordinates = np.unravel_index(list(group), tuple(sizes.values()))
    names = tuple(
        axis
        for axis, positions in zip(sizes, coordinates, strict=True)
        if len(set(positions.tolist())) > 1
    )
    is_whole = math.prod(sizes[axis] for axis in names) == len(group)
    is_evenly_spaced = len(set(np.diff(sorted(group)).tolist())) == 1
    if not is_whole and not (len(names) == 1 and is_evenly_spaced):
        raise ValueError(f"devices {group} must span whole axes of the mesh {dict(sizes)}")
    return names


def _read_collective(
    program: Program, start: Instruction, done: Instruction, num_runs: int
) -> Collective:
    is_ring = True
    operation = done.operation
    if operation == nodes.PERMUTE:
        pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", start.attributes)
        if pairs is None:
            raise ValueError(f"{start.name} has no source_target_pairs")
        groups, is_ring = _find_chains(pairs[1])
    else:
        _, _, written = start.attributes.partition("replica_groups=")
        found = _parse_groups(written, program.num_devices)
        if found is None:
            raise ValueError(f"{start.name} has replica groups in an unknown form: {written[:80]}")
        groups = found
    n = len(groups[0])
    # The result of a reduce-scatter is one of n parts of the input
    sent = {nodes.PERMUTE: 1.0, "reduce-scatter": n - 1, nodes.ALL_REDUCE: 2 * (n - 1) / n}
    sizes: collections.Counter[str] = collections.Counter()
    for dtype, dims in done.arrays:
        sizes[dtype] += _dtype_bits(dtype) * math.prod(dims) // 8
    if not sizes:
        raise ValueError(f"{start.name} has an unknown shape: {done.shape}")
    begin, end = program.async_pairs.get(start.computation, (start.line_number, done.line_number))
    return Collective(
        operation=operation,
        op_name=start.op_name,
        groups=groups,
        is_ring=is_ring,
        bytes_by_dtype={
            dtype: size * sent.get(operation, (n - 1) / n) for dtype, size in sizes.items()
        },
        num_runs=num_runs,
        begin_line=begin,
        end_line=end,
    )


@functools.lru_cache(maxsize=256)
def _find_chains(pairs: str) -> tuple[Groups, bool]:
    """Finds the chains of senders and receivers, and whether all of them close to a ring.

    Example: `{0,2},{1,3},{2,0},{3,1}` gives the rings of 0 and 2 and of 1 and 3, and `{1,0},{2,1}`
    the chain of 2, 1 and 0.
    """
    targets = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)}
    chains = []
    is_ring = True
    while targets:
        chain = [min(targets.keys() - targets.values(), default=min(targets))]
        while (target := targets.pop(chain[-1], None)) not in (None, chain[0]):
            chain.append(target)
        is_ring = is_ring and target is not None
        chains.append(tuple(chain))
    return tuple(chains), is_ring


_NAMED_AXES = re.compile(
    r"mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(([^{]*)\))? \{((?:'\w+',?)+)\}"
)
"""Groups along named axes of a mesh; device_ids is the order of devices if not 0, 1, 2, ..."""


@functools.lru_cache(maxsize=256)
def _parse_groups(written: str, num_devices: int) -> Groups | None:
    """Parses groups of devices in any of XLA's notations, all devices if none are given; None if
    they are in an unknown form."""
    if not written or written.startswith("{}"):
        return (tuple(range(num_devices)),)
    if (lists := re.match(r"\{(?:\{[\d,]+\},?)+", written)) is not None:
        listed = re.findall(r"\{([\d,]+)\}", lists[0])
        return tuple(tuple(map(int, group.split(","))) for group in listed)
    if (iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", written)) is not None:
        dims = [int(dim) for dim in iota[1].split(",")]
        return tuple(map(tuple, _parse_iota(iota[2]).reshape(dims).tolist()))
    if (named := _NAMED_AXES.match(written)) is not None:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        device_ids = np.arange(math.prod(sizes.values()))
        if named[2] is not None:
            device_ids = _parse_iota(named[2])
        group_axes = re.findall(r"'(\w+)'", named[3])
        others = [name for name in sizes if name not in group_axes]
        order = [list(sizes).index(axis) for axis in (*others, *group_axes)]
        groups = device_ids.reshape(tuple(sizes.values())).transpose(order)
        num_members = math.prod(sizes[axis] for axis in group_axes)
        return tuple(map(tuple, groups.reshape(-1, num_members).tolist()))
    return None


def _parse_iota(written: str) -> np.ndarray:
    """Parses `[2,4]T(1,0)`: the numbers 0 to 7 in this shape, transposed."""
    match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", written)
    if match is None:
        raise ValueError(f"the order of devices has an unknown form: {written}")
    dims = tuple(map(int, match[1].split(",")))
    order = tuple(map(int, match[2].split(","))) if match[2] else None
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)


# Kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCost:
    """Cost of a kernel. Operations and bytes are those of one run."""

    line_number: int
    op_name: str
    flops: float
    """Operations of its matrix products: 2 for a multiplication and an addition."""
    device_bytes: float
    """Bytes read from and written to device memory; an operand that is read twice counts once."""
    bytes_from_host: float
    bytes_to_host: float
    efficiency: float
    """Rate of its matrix products relative to that of large ones."""
    min_s: float
    """Minimum seconds of a kernel whose steps follow one another; 0 for others."""
    num_runs: int
    begin_line: int
    """Line number of the instruction that starts it."""
    end_line: int
    """Line number of the instruction that waits for it; begin_line if it is not asynchronous."""


@functools.lru_cache(maxsize=2)
def read_kernel_costs(text: str) -> list[KernelCost]:
    """Reads the cost of every kernel, in the order of the text, as if each branch were taken.

    Raises: ValueError for a loop around a kernel with an unknown trip count.
    """
    return _read_kernel_costs(parse(text))


def read_iteration(program: Program, key_loop: Instruction) -> list[KernelCost]:
    """Reads the cost of every kernel in one iteration of a key loop."""
    body = key_loop.find_computation("body")
    return _read_kernel_costs(dataclasses.replace(program, entry=body))


def _read_kernel_costs(program: Program) -> list[KernelCost]:
    """Costs of the kernels that run from the program's entry on."""

    def is_kernel(line: Instruction) -> bool:
        if line.opcode == "custom-call":
            return line.calls(_CUBLAS) or line.calls(_MOSAIC)
        return line.opcode not in _FREE_OPCODES and line.operation not in COLLECTIVES

    def sum_bytes(arrays: Sequence[tuple[Instruction, float]], *, on_host: bool) -> float:
        return sum(
            (size for array, size in arrays if (_HOST_LAYOUT in array.shape) == on_host), start=0.0
        )

    costs = []
    for line, num_runs in count_runs(program, is_kernel, include_branches=True):
        lines = program.computations[line.computation]
        start = lines[line.operand_names[-1]] if line.opcode.endswith("-done") else line
        reads = [
            (array, _read_bytes(program, start, start.operand_names.index(array.name), array))
            for array in program.operands(start)
        ]
        writes = _list_writes(program, start, line)
        efficiency = 1.0
        if start.calls(_MOSAIC):
            efficiency, _ = gpus.ASSUMED["all"]["mosaic_efficiency"]
        elif start.calls(_FLOAT8):
            efficiency, _ = gpus.ASSUMED["all"]["float8_efficiency"]
        ends = (start.line_number, line.line_number)
        begin, end = program.async_pairs.get(line.computation, ends)
        cost = KernelCost(
            line_number=line.line_number,
            op_name=start.op_name,
            flops=_matmul_flops(program, start),
            efficiency=efficiency,
            device_bytes=sum_bytes([*reads, *writes], on_host=False),
            bytes_from_host=sum_bytes(reads, on_host=True),
            bytes_to_host=sum_bytes(writes, on_host=True),
            min_s=_find_min_s(program, start),
            num_runs=num_runs,
            begin_line=begin,
            end_line=end,
        )
        costs.append(cost)
    return costs


def _read_bytes(program: Program, line: Instruction, number: int, operand: Instruction) -> float:
    """Bytes that an instruction reads of its operand with this number."""
    size = operand.num_bytes
    if line.opcode in _SLICING_OPCODES and number == 0:
        return min(size, line.num_bytes)
    if line.opcode == "dynamic-update-slice" and number == 0:
        return 0.0
    if not line.opcode.startswith("fusion"):
        return size
    fused = program.computations[line.find_computation("calls")].values()
    (parameter,) = (
        inner
        for inner in fused
        if inner.opcode == "parameter" and inner.operands.strip() == str(number)
    )

    def used_bytes(value: Instruction) -> float:
        """Bytes of a value that the instructions of the fusion read; infinite for all of it."""
        used = 0.0
        for user in fused:
            if value.name not in user.operand_names:
                continue
            is_first = user.operand_names[0] == value.name
            if user.opcode == "bitcast":
                used += used_bytes(user)
            elif user.opcode in _SLICING_OPCODES and is_first:
                used += user.num_bytes
            elif not (user.opcode == "dynamic-update-slice" and is_first):
                return math.inf
        return used

    return min(size, used_bytes(parameter))


def _list_writes(
    program: Program, start: Instruction, line: Instruction
) -> list[tuple[Instruction, float]]:
    """Lists each result, and the bytes that are written of it.

    Args: start, line: instructions that start a kernel and wait for it. The shape of a copy's
        -start contains the source, that of its -done only the result.
    """
    results = [line]
    if start.opcode.startswith("fusion"):
        root = program.last(start.find_computation("calls"))
        lines = program.computations[root.computation]
        results = [lines[name] for name in root.operand_names] if root.opcode == "tuple" else [root]
    writes = []
    for result in results:
        source = result
        while source.opcode in ("bitcast", "copy") and source is not line:
            source = program.operands(source)[0]
        written = result
        if source.opcode == "dynamic-update-slice":
            written = program.computations[source.computation][source.operand_names[1]]
        writes.append((result, written.num_bytes))
    return writes


def _matmul_flops(program: Program, line: Instruction) -> float:
    if line.opcode.startswith("fusion"):
        fused = program.computations[line.find_computation("calls")].values()
        return sum((_matmul_flops(program, inner) for inner in fused), start=0.0)
    is_mosaic = line.calls(_MOSAIC)
    if line.opcode != "dot" and not (is_mosaic or line.calls(_CUBLAS)):
        return 0.0
    lines = program.computations[line.computation]
    arrays = [lines[name].arrays for name in line.operand_names]
    if is_mosaic and (name := _DELTA_RULE.search(line.op_name)):
        return _delta_rule_flops(name[1], arrays)
    if is_mosaic:
        # Products of places with matrices of experts, or of places with places: experts.mosaic
        ((_, places),), ((_, others),) = arrays[-2:]
        size = math.prod(others[1:]) if len(others) == 3 else places[1] * others[1]
        return 2.0 * places[0] * size
    # lhs_contracting_dims={1} of a dot, "lhs_contracting_dimensions":["1"] of cuBLAS
    (dims,) = re.findall(r"lhs_contracting_dim\w+\W+([\d,\"]*)", line.attributes)
    ((_, left),) = arrays[0]
    (_, result), *_ = line.arrays
    contracted = math.prod(left[int(dim)] for dim in re.findall(r"\d+", dims))
    return 2.0 * math.prod(result) * contracted


_DELTA_RULE = re.compile(r"gdr_(kkt_fwd|state_fwd|fused_fwd|state_bwd|chunk_grads)")
"""Names of the kernels of `delta_rule.hopper`."""

_SERIAL_PASSES = ("state_fwd", "fused_fwd", "state_bwd")
"""Passes of these kernels that take the chunks of a row one after the other."""


def _delta_rule_flops(name: str, arrays: Sequence[Sequence[tuple[str, Sequence[int]]]]) -> float:
    """Operations of a kernel of the delta rule: its products of chunks of 64 tokens with states and
    with each other. Args: arrays: operands; the first is q or k, [P, t, G, K]."""
    C = 64
    (_, (P, t, _, K)), *_ = arrays[0]
    (_, (_, H, _)), *_ = next(x for x in arrays if len(x[0][1]) == 3)  # beta
    if name == "kkt_fwd":
        per_token = 2 * C * (K + C)
    else:
        with_states = {"state_fwd": 2, "fused_fwd": 3, "state_bwd": 3, "chunk_grads": 7}[name]
        with_chunk = {"state_fwd": 1, "fused_fwd": 3, "state_bwd": 3, "chunk_grads": 9}[name]
        per_token = 2 * K * (with_states * K + with_chunk * C)
    return float(P * t * H * per_token)


def _find_min_s(program: Program, line: Instruction) -> float:
    """Minimum seconds of a kernel whose steps follow one another; 0 for others."""
    name = _DELTA_RULE.search(line.op_name) if line.calls(_MOSAIC) else None
    if name is None or name[1] not in _SERIAL_PASSES:
        return 0.0
    (_, (_, t, _, _)), *_ = program.computations[line.computation][line.operand_names[0]].arrays
    step_us, _ = gpus.ASSUMED["all"]["delta_rule_step_us"]
    return t / 64 * step_us * 1e-6


# Memory


class CompilerDump(NamedTuple):
    """Files that XLA dumps for a compiled program."""

    hlo_text: str
    """Operations of the program."""
    buffer_assignment: str
    """Place of each array in memory."""
    live_ranges: str
    """First and last operation during which each array is live."""


_ALLOCATION = re.compile(r"allocation \d+: size \d+,(?: color (\d+),)?(.*)")
_BUFFER = re.compile(
    r" value: <\d+ (\S+?)(\{[\d, ]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
_LIVE_RANGE = re.compile(r"\s+(\S+?)(\{[\d, ]*\}):(\d+)-(\d+)$")


class Buffer(NamedTuple):
    """An intermediate array of a program in device memory. Two may share bytes, even while both are
    live."""

    begin_byte: int
    end_byte: int
    first_use: int
    """Number of the first operation during which the array is live."""
    last_use: int


def read_buffers(dump: CompilerDump) -> list[Buffer]:
    """Reads the places and live ranges of a program's arrays on the device, except arguments."""
    live_ranges = {
        match[1] + match[2]: (int(match[3]), int(match[4]))
        for match in map(_LIVE_RANGE.match, dump.live_ranges.splitlines())
        if match
    }
    buffers: list[Buffer] = []
    is_read = False
    for line in dump.buffer_assignment.splitlines():
        if (allocation := _ALLOCATION.match(line)) is not None:
            is_read = "preallocated-temp" in allocation[2] and allocation[1] != _HOST_COLOR
        elif is_read and (value := _BUFFER.match(line)) is not None:
            live_range = live_ranges.get(value[1] + (value[2] or "{}"))
            if live_range is not None:  # otherwise in a fusion, which holds no arrays
                begin = int(value[4])
                buffers.append(Buffer(begin, begin + int(value[3]), *live_range))
    return buffers


def compute_live_bytes(buffers: Sequence[Buffer], operation: int) -> int:
    """Computes the bytes that arrays cover during an operation, each byte once."""
    total = covered = 0
    for buffer in sorted(buffers):
        if buffer.first_use <= operation <= buffer.last_use:
            total += max(0, buffer.end_byte - max(buffer.begin_byte, covered))
            covered = max(covered, buffer.end_byte)
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
