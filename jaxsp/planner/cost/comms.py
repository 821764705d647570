"""Bytes that each device sends in a compiled program, read from its text.

Only payload counts: the minimum that NCCL's algorithms send of an array, with n devices in a group.

    all-gather, all-to-all    (n - 1) / n of the result
    reduce-scatter            (n - 1) / n of the input
    all-reduce                2 (n - 1) / n
    collective-permute        all of it
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxsp.attention.strategies import nodes
from jaxsp.attention.strategies.nodes import Groups, Load
from jaxsp.planner.compile import hlo
from jaxsp.planner.compile.hlo import Instruction

COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "collective-permute")

_UNSUPPORTED = ("ragged-all-to-all", "collective-broadcast", "send", "recv")
"""Operations that jaxsp does not use; parsing one raises an error."""

_BITS_BY_DTYPE = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a compiled program."""

    operation: str
    """One of COLLECTIVES."""
    op_name: str
    """Name that JAX gave the operation; several names if XLA combined operations. Older XLA drops
    the name of combined operations."""
    groups: Groups
    """Devices that communicate with each other, in the order of the mesh; of a collective-permute,
    each sends to the next one."""
    bytes_by_dtype: Mapping[str, float]
    """Bytes that a device sends in each run, by dtype."""
    num_runs: int
    """Number of runs in the program."""
    begin_line: int = 0
    """Line number of the instruction that starts it."""
    end_line: int = 0
    """Line number of the instruction that waits for it. Instructions in between overlap it."""
    is_ring: bool = True
    """False if a collective-permute has groups whose last device does not send to the first."""

    @property
    def device_ids(self) -> tuple[int, ...]:
        """Devices of the first group."""
        return self.groups[0]

    def find_load(self, node_devices: int) -> Load:
        """Finds its load on the links and network cards of nodes of this size."""
        return nodes.find_load(
            self.operation, self.groups, node_devices=node_devices, is_ring=self.is_ring
        )

    @property
    def total_bytes(self) -> float:
        """Bytes that a device sends in all runs."""
        return sum(self.bytes_by_dtype.values()) * self.num_runs


def parse_collectives(text: str) -> list[Collective]:
    """Parses all collectives of a program, in the order of its text, also those that send nothing.

    Args: text: `as_text()` of a jax.stages.Compiled.
    Raises: ValueError for a collective, or a loop around one, in an unknown form.
    """
    program = hlo.parse_module(text)
    num_devices = _read_header_field(text, "num_partitions") * _read_header_field(
        text, "replica_count"
    )
    async_pairs = hlo.find_async_pairs(program)
    by_line: dict[int, Collective] = {}
    for name, lines in program.computations.items():
        for collective in _iterate_collectives(lines, num_devices):
            begin, end = async_pairs.get(name, (collective.begin_line, collective.end_line))
            by_line[collective.end_line] = dataclasses.replace(
                collective, begin_line=begin, end_line=end
            )
    runs = hlo.count_runs(program, lambda line: line.line_number in by_line)
    return [dataclasses.replace(by_line[line.line_number], num_runs=times) for line, times in runs]


def sum_bytes(
    collectives: Sequence[Collective],
    *,
    operation: str | None = None,
    scope: str | None = None,
    dtype: str | None = None,
) -> float:
    """Sums the bytes that a device sends.

    Args: operation, scope, dtype: select collectives of one operation, in a jax.named_scope, or
        arrays of one dtype.
    """
    # differentiated operations are named jvp(scope)/..., and combined ones (a/scope/x:b/scope/y)
    scope_pattern = re.compile(rf"(?<![\w.]){re.escape(scope)}(?![\w.])" if scope else "")
    return sum(
        (
            num_bytes * collective.num_runs
            for collective in collectives
            for name, num_bytes in collective.bytes_by_dtype.items()
            if operation in (None, collective.operation)
            and scope_pattern.search(collective.op_name)
            and dtype in (None, name)
        ),
        start=0.0,
    )


def sum_node_bytes(collectives: Sequence[Collective], *, node_devices: int) -> float:
    """Sums the bytes that leave the busiest node, with nodes of `node_devices` devices."""
    return sum(
        (sent.find_load(node_devices).node * sent.total_bytes for sent in collectives), start=0.0
    )


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


def parse_shape(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Parses the shape of an instruction: dtype and dims of the array, or of a tuple's arrays."""
    arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return [(dtype, tuple(int(dim) for dim in dims.split(",") if dim)) for dtype, dims in arrays]


def compute_shape_bytes(shape: str) -> float:
    """Computes the bytes of the arrays of an instruction's shape."""
    return sum(_dtype_bits(dtype) * math.prod(dims) / 8 for dtype, dims in parse_shape(shape))


def _read_header_field(text: str, field: str) -> int:
    match = re.search(rf"\b{field}=(\d+)", text.partition("\n")[0])
    return int(match[1]) if match else 1


def _iterate_collectives(lines: list[Instruction], num_devices: int) -> Iterator[Collective]:
    """Yields the collectives of a computation.

    A -start counts at its -done, whose shape is the result's.
    """
    starts = {line.name: line for line in lines if line.opcode.endswith("-start")}
    ended = set()
    for line in lines:
        operation = line.opcode.removesuffix("-done")
        if line.opcode.removesuffix("-start").removesuffix("-done") in _UNSUPPORTED:
            raise ValueError(f"{line.name}: {line.opcode} is not supported")
        if operation not in COLLECTIVES:
            continue
        start = line
        if operation != line.opcode:
            operand = line.operands.split()[-1].lstrip("%")
            if operand not in starts:
                raise ValueError(
                    f"{line.name} ends {operand}, which does not begin in the same computation"
                )
            start = starts[operand]
            ended.add(operand)
        yield _parse_collective(operation, start, line, num_devices)
    for name, line in starts.items():
        if line.opcode.removesuffix("-start") in COLLECTIVES and name not in ended:
            raise ValueError(f"{name} does not end in the same computation")


def _parse_collective(
    operation: str, start: Instruction, done: Instruction, num_devices: int
) -> Collective:
    """Parses one run of a collective, from the instructions that start it and wait for it."""
    is_ring = True
    if operation == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", start.attributes)
        if pairs is None:
            raise ValueError(f"{start.name} has no source_target_pairs")
        groups, is_ring = _find_chains(pairs[1])
    else:
        groups = _parse_groups(start, num_devices)
    sizes: collections.Counter[str] = collections.Counter()
    for dtype, dims in parse_shape(done.shape):
        sizes[dtype] += _dtype_bits(dtype) * math.prod(dims) // 8
    if not sizes:
        raise ValueError(f"{start.name} has an unknown shape: {done.shape}")
    op_name = re.search(r'op_name="([^"]*)"', start.attributes)
    return Collective(
        operation=operation,
        op_name=op_name[1] if op_name else "",
        groups=groups,
        bytes_by_dtype={
            dtype: _sent_bytes(operation, size, len(groups[0])) for dtype, size in sizes.items()
        },
        num_runs=1,
        begin_line=start.line_number,
        end_line=done.line_number,
        is_ring=is_ring,
    )


def _sent_bytes(operation: str, size: int, num_devices: int) -> float:
    """Bytes that a device sends for a result of this size."""
    if operation == "collective-permute":
        return float(size)
    if operation == "reduce-scatter":  # the result is one of num_devices parts of the input
        return float(size * (num_devices - 1))
    if operation == "all-reduce":
        return 2 * size * (num_devices - 1) / num_devices
    return size * (num_devices - 1) / num_devices


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


def _dtype_bits(dtype: str) -> int:
    if dtype in _BITS_BY_DTYPE:
        return _BITS_BY_DTYPE[dtype]
    match = re.fullmatch(r"[suf](8|16|32|64)|f8e\w+()", dtype)
    if match is None:
        raise ValueError(f"a collective sends an array of unknown dtype {dtype}")
    return int(match[1] or 8)


_GROUPS_END = re.compile(r", (?!device_ids=)(?=\w+=)")
"""Separator of the groups of devices from the next attribute."""


def _parse_groups(line: Instruction, num_devices: int) -> Groups:
    """Parses the groups of devices of a collective, in any of XLA's notations."""
    begin = line.attributes.find("replica_groups=")
    written = line.attributes[begin + len("replica_groups=") :]
    if begin < 0 or written.startswith("{}"):
        return (tuple(range(num_devices)),)
    groups = _parse_group_list(_GROUPS_END.split(written, maxsplit=1)[0])
    if groups is None:
        raise ValueError(f"{line.name} has replica groups in an unknown form: {written[:80]}")
    return groups


@functools.lru_cache(maxsize=256)
def _parse_group_list(written: str) -> Groups | None:
    """Parses groups of devices; None if they are in an unknown form."""
    if re.match(r"\{\{[\d,]+\}", written):
        listed = re.findall(r"\{([\d,]+)\}", written)
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
        names = list(sizes)
        others = [name for name in names if name not in group_axes]
        order = [names.index(axis) for axis in (*others, *group_axes)]
        groups = device_ids.reshape(tuple(sizes.values())).transpose(order)
        num_members = math.prod(sizes[axis] for axis in group_axes)
        return tuple(map(tuple, groups.reshape(-1, num_members).tolist()))
    return None


_NAMED_AXES = re.compile(
    r"mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(([^{]*)\))? \{((?:'\w+',?)+)\}"
)
"""Groups along named axes of a mesh; device_ids is the order of devices if not 0, 1, 2, ..."""


def _parse_iota(written: str) -> np.ndarray:
    """Parses `[2,4]T(1,0)`: the numbers 0 to 7 in this shape, transposed."""
    match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", written)
    if match is None:
        raise ValueError(f"the order of devices has an unknown form: {written}")
    dims = tuple(map(int, match[1].split(",")))
    order = tuple(map(int, match[2].split(","))) if match[2] else tuple(range(len(dims)))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)
