"""Bytes that each device sends in a compiled program, read from its text.

Counted is payload: what the algorithms of NCCL send of an array at least, with n devices in a group.

    all-gather, all-to-all    (n - 1) / n of the result
    reduce-scatter            (n - 1) / n of the input
    all-reduce                2 (n - 1) / n
    collective-permute        all of it
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxsp import attention
from jaxsp.core import axes
from jaxsp.core.batch import num_microbatches
from jaxsp.planner.compile import hlo
from jaxsp.planner.compile.hlo import Instruction
from jaxsp.runtime import device_mesh
from jaxsp.training import sharding
from jaxsp.training.train_step import Program

COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "collective-permute")

_UNSUPPORTED = ("ragged-all-to-all", "collective-broadcast", "send", "recv")
"""Ways to communicate that jaxsp does not use: an error where they appear."""

_BITS_BY_DTYPE = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """What one collective of a program sends from each device."""

    operation: str
    """From KINDS."""
    op_name: str
    """Where in jaxsp it comes from, as JAX calls it; several, where XLA made one of many. Older XLA forgets it there."""
    device_ids: tuple[int, ...]
    """Numbers of the devices that take part together, in the order of the mesh: the first such group."""
    bytes_by_dtype: Mapping[str, float]
    """Bytes that a device sends each time, by dtype."""
    num_runs: int
    """How often it runs in the program."""
    begin_line: int = 0
    """Number of the line of the program's text where it begins;"""
    end_line: int = 0
    """and where it has to be done. What stands between runs beside it."""

    @property
    def total_bytes(self) -> float:
        """That a device sends, all times together."""
        return sum(self.bytes_by_dtype.values()) * self.num_runs


def parse_collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program, in the order of its text; those that send nothing too.

    Args:   text: a jax.stages.Compiled's `as_text()`.
    Raises: ValueError for a collective, or a loop around one, that cannot be understood.
    """
    program = hlo.parse_module(text)
    num_devices = _read_header_field(text, "num_partitions") * _read_header_field(
        text, "replica_count"
    )
    waited, once = hlo.find_async_pairs(program), dict[int, Collective]()
    for name, lines in program.computations.items():
        for number, one in _iterate_collectives(lines, num_devices):
            begin, end = waited.get(name, (one.begin_line, one.end_line))
            once[number] = dataclasses.replace(one, begin_line=begin, end_line=end)
    runs = hlo.count_runs(program, lambda line: line.line_number in once)
    return [dataclasses.replace(once[line.line_number], num_runs=times) for line, times in runs]


def sum_bytes(
    found: Sequence[Collective],
    *,
    operation: str | None = None,
    scope: str | None = None,
    dtype: str | None = None,
) -> float:
    """Bytes that a device sends in a program's collectives: all, or those of a kind, in a jax.named_scope, of a dtype."""
    # differentiated operations are jvp(scope)/..., and those that were combined (a/scope/x:b/scope/y)
    inside = re.compile(rf"(?<![\w.]){re.escape(scope)}(?![\w.])" if scope else "")
    chosen = [
        one for one in found if operation in (None, one.operation) and inside.search(one.op_name)
    ]
    return sum(
        (
            size * one.num_runs
            for one in chosen
            for name, size in one.bytes_by_dtype.items()
            if dtype in (None, name)
        ),
        start=0.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisTraffic:
    """What a kind of collective sends along some axes of the mesh in a step, from each device."""

    operation: str
    """From KINDS."""
    axes: tuple[str, ...]
    """More than one where the devices of several take part together; none where a group is one device, which sends nothing."""
    num_bytes: float
    num_devices: int
    """That take part together."""


def sum_by_axes(found: Sequence[Collective], sizes: Mapping[str, int]) -> list[AxisTraffic]:
    """A program's collectives, those of a kind and the same axes together; those that send nothing left out."""
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    groups = {}
    for one in found:
        key = (one.operation, find_axes(one.device_ids, sizes))
        sums[key] = sums.get(key, 0.0) + one.total_bytes
        groups[key] = len(one.device_ids)
    return [
        AxisTraffic(operation=kind, axes=names, num_bytes=size, num_devices=groups[kind, names])
        for (kind, names), size in sorted(sums.items())
        if size
    ]


def compute_formula_bytes(program: Program) -> dict[str, float]:
    """Bytes that a device has to send in a step, by kind of collective: what attention's and the weights' formulas say.

    A few bytes of counts and norms, which are summed over the mesh too, are in none.
    """
    config, model, sizes = program.config, program.model, program.mesh.shape
    slots = device_mesh.num_groups(program.mesh) * config.batch.rows_per_microbatch
    num_turns = num_microbatches(
        rows_per_step=config.batch.rows_per_step, global_microbatch_rows=slots
    )
    weights = sharding.weight_traffic(
        program.table,
        num_shards=device_mesh.num_shards(program.mesh),
        num_replicas=sizes[axes.REPLICA],
        compute_dtype=program.dtype,
        reduce_dtype=config.memory.grad_reduce_dtype,
        num_microbatches=num_turns,
    )
    layer = attention.LayerWorkload.from_config(config, model, remat=program.remat_policy.remat)
    of_layer = program.attend.strategy.sent_bytes(layer)
    found = collections.Counter(
        {
            "all-gather": weights.all_gathers,
            "reduce-scatter": weights.reduce_scatters,
            "all-reduce": weights.all_reduces,
        }
    )
    found.update({kind: num_turns * model.num_layers * size for kind, size in of_layer.items()})
    return dict(found)


def find_axes(group: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh of these sizes that a group of its devices lies along, all of each or evenly spaced devices of one.

    Raises: ValueError if it is not along axes.
    """
    places = np.unravel_index(list(group), tuple(sizes.values()))
    along = {axis: len(set(place.tolist())) for axis, place in zip(sizes, places, strict=True)}
    names = tuple(axis for axis, different in along.items() if different > 1)
    evenly = len(set(np.diff(sorted(group)).tolist())) == 1
    if math.prod(sizes[axis] for axis in names) != len(group) and not (len(names) == 1 and evenly):
        raise ValueError(f"devices {group} are no group along axes of the mesh {dict(sizes)}")
    return names


def parse_shape(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dims of the array, or of each array of the tuple, that an instruction's shape says."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return [(dtype, tuple(int(dim) for dim in dims.split(",") if dim)) for dtype, dims in found]


def compute_shape_bytes(shape: str) -> float:
    """Bytes of the arrays of an instruction's shape."""
    return sum(_dtype_bits(dtype) * math.prod(dims) / 8 for dtype, dims in parse_shape(shape))


def _read_header_field(text: str, field: str) -> int:
    found = re.search(rf"\b{field}=(\d+)", text.partition("\n")[0])
    return int(found[1]) if found else 1


def _iterate_collectives(
    lines: list[Instruction], num_devices: int
) -> Iterator[tuple[int, Collective]]:
    """Number and content of each collective of a computation; a -start counts with its -done, whose shape is the result's."""
    starts = {line.name: line for line in lines if line.opcode.endswith("-start")}
    ended = set()
    for line in lines:
        kind = line.opcode.removesuffix("-done")
        if line.opcode.removesuffix("-start").removesuffix("-done") in _UNSUPPORTED:
            raise ValueError(f"{line.opcode} is not counted: {line.name}")
        if kind not in COLLECTIVES:
            continue
        begun = line
        if kind != line.opcode:
            operand = line.operands.split()[-1].lstrip("%")
            if operand not in starts:
                raise ValueError(
                    f"{line.name} ends {operand}, which does not begin in the same computation"
                )
            begun = starts[operand]
            ended.add(operand)
        yield (
            line.line_number,
            dataclasses.replace(
                _parse_collective(kind, begun, line.shape, num_devices),
                begin_line=begun.line_number,
                end_line=line.line_number,
            ),
        )
    missing = [
        name
        for name, line in starts.items()
        if line.opcode.removesuffix("-start") in COLLECTIVES and name not in ended
    ]
    if missing:
        raise ValueError(f"{missing[0]} does not end in the same computation")


def _parse_collective(kind: str, begun: Instruction, shape: str, num_devices: int) -> Collective:
    """One collective, run once."""
    share: Callable[[int], float]
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", begun.attributes)
        if pairs is None:
            raise ValueError(f"{begun.name} has no source_target_pairs")
        group = _find_cycle(pairs[1])
        share = lambda size: size
    else:
        group = _parse_device_ids(begun, num_devices)
        n = len(group)
        share = {
            "all-gather": lambda size: size * (n - 1) / n,
            "all-to-all": lambda size: size * (n - 1) / n,
            "reduce-scatter": lambda size: size * (n - 1),  # the result is a part in n of the input
            "all-reduce": lambda size: 2 * size * (n - 1) / n,
        }[kind]
    op_name = re.search(r'op_name="([^"]*)"', begun.attributes)
    sizes: collections.Counter[str] = collections.Counter()
    for dtype, dims in parse_shape(shape):
        sizes[dtype] += _dtype_bits(dtype) * math.prod(dims) // 8
    if not sizes:
        raise ValueError(f"{begun.name} has no shape that is known: {shape}")
    bytes_of = {dtype: float(share(size)) for dtype, size in sizes.items()}
    return Collective(
        operation=kind,
        op_name=op_name[1] if op_name else "",
        device_ids=group,
        bytes_by_dtype=bytes_of,
        num_runs=1,
    )


def _find_cycle(pairs: str) -> tuple[int, ...]:
    """The devices round which an array goes that the first of them passes on: of `{0,2},{1,3},{2,0},{3,1}` 0 and 2."""
    after = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)}
    found = [min(after)]
    while (following := after.get(found[-1], found[0])) not in found:
        found.append(following)
    return tuple(found)


def _dtype_bits(dtype: str) -> int:
    if dtype in _BITS_BY_DTYPE:
        return _BITS_BY_DTYPE[dtype]
    found = re.fullmatch(r"[suf](8|16|32|64)|f8e\w+()", dtype)
    if found is None:
        raise ValueError(f"an array of {dtype} travels, whose size is not known")
    return int(found[1] or 8)


def _parse_device_ids(line: Instruction, num_devices: int) -> tuple[int, ...]:
    """The first group of devices of a collective, in one of the ways that XLA writes groups."""
    begin = line.attributes.find("replica_groups=")
    written = line.attributes[begin + len("replica_groups=") :]
    if begin < 0 or written.startswith("{}"):
        return tuple(range(num_devices))
    if (listed := re.match(r"\{\{([\d,]+)\}", written)) is not None:
        return tuple(map(int, listed[1].split(",")))
    if (iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", written)) is not None:
        return tuple(
            _parse_iota(iota[2]).reshape([int(dim) for dim in iota[1].split(",")])[0].tolist()
        )
    if (
        named := re.match(
            r"mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(([^{]*)\))? \{((?:'\w+',?)+)\}", written
        )
    ) is not None:
        # the devices of a mesh along axes by name; device_ids is their order where it is not 0, 1, 2, ...
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        along = re.findall(r"'(\w+)'", named[3])
        names = list(sizes)
        order = tuple(
            names.index(axis) for axis in (*(name for name in names if name not in along), *along)
        )
        size = math.prod(sizes[axis] for axis in along)
        devices = (
            np.arange(math.prod(sizes.values())) if named[2] is None else _parse_iota(named[2])
        )
        return tuple(
            devices.reshape(tuple(sizes.values())).transpose(order).reshape(-1, size)[0].tolist()
        )
    raise ValueError(f"{line.name} has groups in a form that is not known: {written[:80]}")


def _parse_iota(written: str) -> np.ndarray:
    """The numbers that `[2,4]T(1,0)` stands for: 0 to 7 as an array of this shape, transposed."""
    found = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", written)
    if found is None:
        raise ValueError(f"the order of devices is in a form that is not known: {written}")
    dims = tuple(map(int, found[1].split(",")))
    order = tuple(map(int, found[2].split(","))) if found[2] else tuple(range(len(dims)))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)
