"""What a compiled step's memory is taken by: every array it holds, where and when, told by cause.

A cause has arrays of its own dtype and size. What it takes is the most that these take together at some time of the step, and
its formula how many there have to be, times their size. Causes take their most at different times: their sum is more than the
step takes.
"""

import dataclasses
import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxsp.attention import Kernel
from jaxsp.core import axes
from jaxsp.planner.compile.compiled import CompilerDump, PlannedStep
from jaxsp.runtime import device_mesh
from jaxsp.training import sharding

HOST_MEMORY_SPACE = 5
"""XLA's number for host memory that a GPU reaches by itself."""

_ALLOCATION = re.compile(r"allocation \d+: size (\d+),(?: color (\d+),)?(.*)")
_BUFFER = re.compile(
    r" value: <\d+ (\S+?)(\{[\d, ]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\w+)\[([\d,]*)\]"
)
_LIVE_RANGE = re.compile(r"\s+(\S+?)(\{[\d, ]*\}):(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """An array that a program makes on its way."""

    op_name: str
    """Where it comes from, as JAX calls it; empty where XLA does not say."""
    dtype: str
    dims: tuple[int, ...]
    on_host: bool
    begin_byte: int
    """Its first byte in the program's memory: two arrays may lie in the same place, also at the same time."""
    end_byte: int
    first_use: int
    """The first of the program's operations during which it is there,"""
    last_use: int
    """and the last."""

    @property
    def num_elements(self) -> int:
        """Elements."""
        return math.prod(self.dims)


def read_buffers(program: CompilerDump) -> list[Buffer]:
    """Every array that a program holds beside its arguments."""
    lives = {
        found[1] + found[2]: (int(found[3]), int(found[4]))
        for found in map(_LIVE_RANGE.match, program.live_ranges.splitlines())
        if found
    }
    names = dict(
        re.findall(r'^\s+(?:ROOT )?%?(\S+) = .*?op_name="([^"]*)"', program.hlo_text, re.MULTILINE)
    )
    found: list[Buffer] = []
    space = None
    for line in program.buffer_assignment.splitlines():
        if (begins := _ALLOCATION.match(line)) is not None:
            space = int(begins[2] or 0) if "preallocated-temp" in begins[3] else None
        elif space is not None and (value := _BUFFER.match(line)) is not None:
            life = lives.get(value[1] + (value[2] or "{}"))
            if life is None:  # inside a fusion, where nothing is held
                continue
            begin = int(value[4])
            found.append(
                Buffer(
                    op_name=names.get(value[1], ""),
                    dtype=value[5],
                    dims=tuple(int(dim) for dim in value[6].split(",") if dim),
                    on_host=space == HOST_MEMORY_SPACE,
                    begin_byte=begin,
                    end_byte=begin + int(value[3]),
                    first_use=life[0],
                    last_use=life[1],
                )
            )
    return found


def compute_peak_bytes(arrays: Sequence[Buffer]) -> int:
    """Bytes that some of a program's arrays take together at the time when that is the most."""
    return _union_bytes(find_peak_buffers(arrays))


def find_peak_buffers(
    arrays: Sequence[Buffer], extra_bytes: Mapping[int, int] = types.MappingProxyType({})
) -> list[Buffer]:
    """Arrays that are live at the peak of memory, which includes `beside`.

    Args: beside: bytes of other memory, by the number of the operation that uses it.
    """
    best: list[Buffer] = []
    most_bytes = -1
    for time in sorted({array.first_use for array in arrays} | extra_bytes.keys()):
        there = [array for array in arrays if array.first_use <= time <= array.last_use]
        taken = _union_bytes(there) + extra_bytes.get(time, 0)
        if taken > most_bytes:
            best, most_bytes = there, taken
    return best


def find_backward_calls(program: CompilerDump, kernel: Kernel) -> list[int]:
    """Numbers of the program's operations that are backward calls of an attention kernel."""
    if not kernel.custom_call_prefix:
        return []
    names = re.findall(
        r"^\s+(?:ROOT )?%?(\S+) = .*custom_call_target="
        rf'"{re.escape(kernel.custom_call_prefix)}\w*Backward',
        program.hlo_text,
        re.MULTILINE,
    )
    numbers = {
        name: int(number)
        for number, name in re.findall(r"^\s+(\d+):(\S+)$", program.live_ranges, re.MULTILINE)
    }
    return [numbers[name] for name in names if name in numbers]


def _union_bytes(arrays: Iterable[Buffer]) -> int:
    """Bytes that arrays cover, each byte once."""
    total = covered = 0
    for begin, end in sorted((array.begin_byte, array.end_byte) for array in arrays):
        total += max(0, end - max(begin, covered))
        covered = max(covered, end)
    return total


def read_argument_bytes(program: CompilerDump) -> dict[tuple[str, bool], int]:
    """Bytes of a program's arguments that are called `state.master`, `state.opt_state` and so on, and whether on the host."""
    names = dict(re.findall(r'parameter\((\d+)\).*op_name="(state\.\w+|rows)\b', program.hlo_text))
    found: dict[tuple[str, bool], int] = {}
    for line in program.buffer_assignment.splitlines():
        begins = _ALLOCATION.match(line)
        number = begins and re.search(r"parameter (\d+),", begins[3])
        if begins and number and number[1] in names:
            key = (names[number[1]], int(begins[2] or 0) == HOST_MEMORY_SPACE)
            found[key] = found.get(key, 0) + int(begins[1])
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """Something that takes memory."""

    name: str
    formula: int | None
    """Bytes; None where it is up to XLA how many of these arrays it holds at a time."""
    device: int
    """Bytes that it takes of each device,"""
    host: int
    """and of the host, for each device."""
    repeats: int = 1
    """How many times each K/V head of the model is in it, since each device of a group needs whole ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    """The arrays of a cause."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    """Dtype and elements of each."""
    formula: int | None
    layers: int | None = None
    """Their first dim, where they are of all layers."""
    repeats: int = 1


def causes(step: PlannedStep) -> list[Cause]:
    """What takes a step's memory, and what it should take. Small arrays are in none.

    Where two causes have arrays of the same dtype and size, as Llama's residual stream and queries do, they are one, with
    both names.
    """
    program, arrays, given = step.program, read_buffers(step.dump), read_argument_bytes(step.dump)
    table = list(jax.tree.leaves(program.table))
    num_shards = device_mesh.num_shards(program.mesh)
    of_shards = sum((row.num_layers or 1) * _stored(row, num_shards) for row in table)
    averages = 8 * of_shards if program.config.optimizer.name == "adamw" else 0
    found = [
        Cause(
            name=name,
            formula=formula,
            device=given.get((argument, False), 0),
            host=given.get((argument, True), 0),
        )
        for name, argument, formula in (
            ("weights", "state.master", 4 * of_shards),
            ("averages", "state.opt_state", averages),
        )
    ]
    for kind in _together(_kinds(step)):
        own = [
            array
            for array in arrays
            if (array.dtype, array.num_elements) in kind.sizes and _layers(array, kind.layers)
        ]
        device, host = (
            compute_peak_bytes([array for array in own if array.on_host == there])
            for there in (False, True)
        )
        found.append(
            Cause(
                name=kind.name, formula=kind.formula, device=device, host=host, repeats=kind.repeats
            )
        )
    return found


def _kinds(step: PlannedStep) -> list[_Kind]:
    """Of what a step makes on its way. The numbers of arrays are those that XLA of jax 0.10.1 to 0.12.0 holds."""
    program, model, config = step.program, step.program.model, step.program.config
    seq, num_shards = program.mesh.shape[axes.SEQ], device_mesh.num_shards(program.mesh)
    N, D, H, K, F, V = (
        model.num_layers,
        model.hidden_size,
        model.num_heads,
        model.head_dim,
        model.intermediate_size,
        model.vocab_size,
    )
    kind = step.choice.strategy
    _, local_kv_heads = kind.local_heads(model.num_heads, model.num_kv_heads)
    held_heads = local_kv_heads * kind.all_to_all_size
    repeats = held_heads // model.num_kv_heads
    own = config.batch.rows_per_microbatch * config.data.max_row_tokens // seq  # tokens
    dtype, itemsize = (
        {"bfloat16": "bf16", "float32": "f32"}[str(program.dtype)],
        program.dtype.itemsize,
    )
    known = kind.has_known_buffers
    q, kv, travels = own * H * K, own * held_heads * K, own * (H + 2 * held_heads) * K
    tile = min(own, program.mlp_tile)
    logits = V * min(own, program.loss_tile)
    of_layer = [
        row
        for row in jax.tree.leaves(program.table)
        if row.num_layers and sharding.choose_placement(row, num_shards).dim is not None
    ]
    whole = [row.size for row in of_layer]
    shards = [N * _stored(row, num_shards) for row in of_layer]
    kept = [
        _Kind(
            name="layer inputs",
            sizes=((dtype, N * own * D),),
            formula=itemsize * N * own * D,
            layers=N,
        )
    ]
    if program.remat_policy.is_attention_saved:
        results = ((dtype, N * q), ("f32", N * own * H))
        kept.append(
            _Kind(
                name="attention's results",
                sizes=results,
                formula=itemsize * N * q + 4 * N * own * H,
                layers=N,
            )
        )
    if config.memory.offload_optimizer == "state":
        copies = tuple((dtype, size) for size in shards)
        kept.append(
            _Kind(
                name="layers' weights to compute with",
                sizes=copies,
                formula=itemsize * sum(shards),
                layers=N,
            )
        )
    if program.gather.gradients_on_host:
        # a microbatch's, and if there are several, their sums
        several = (
            config.batch.rows_per_step
            > config.batch.rows_per_microbatch * device_mesh.num_groups(program.mesh)
        )
        gradients = 4 * sum(shards) * (2 if several else 1)
    else:
        # the largest once more, while it is divided
        gradients = 4 * (sum(shards) + max(shards, default=0))
    sizes = tuple(("f32", size) for size in shards)
    return [
        *kept,
        _Kind(name="gradients", sizes=sizes, formula=gradients, layers=N),
        _Kind(
            name="a layer's whole weights",
            sizes=tuple((dtype, size) for size in whole),
            formula=None,
        ),
        _Kind(
            name="a layer's whole gradients",
            sizes=tuple(("f32", size) for size in whole),
            formula=None,
        ),
        _Kind(name="residual stream", sizes=((dtype, own * D),), formula=None),
        _Kind(name="queries", sizes=((dtype, q),), formula=4 * itemsize * q if known else None),
        _Kind(
            name="keys and values",
            sizes=((dtype, kv),),
            formula=4 * itemsize * kv if known else None,
            repeats=repeats,
        ),
        _Kind(
            name="all-to-all",
            sizes=((dtype, travels),),
            formula=2 * itemsize * travels if known else None,
            repeats=repeats,
        ),
        _Kind(
            name="MLP tile",
            sizes=((dtype, tile * F), (dtype, 2 * tile * F)),
            formula=4 * itemsize * tile * F,
        ),
        _Kind(name="logits tile", sizes=(("f32", logits),), formula=4 * logits),
        # the backward pass gathers it again, possibly while the copy of the forward pass is still
        # live
        _Kind(name="head", sizes=((dtype, V * D),), formula=None),
        _Kind(name="head's gradients", sizes=(("f32", V * D),), formula=None),
    ]


def _together(kinds: list[_Kind]) -> list[_Kind]:
    """The kinds, with those made one whose arrays cannot be told apart."""
    found: list[_Kind] = []
    for kind in kinds:
        same = next(
            (
                one
                for one in found
                if set(one.sizes) & set(kind.sizes) and one.layers == kind.layers
            ),
            None,
        )
        if same is None:
            found.append(kind)
            continue
        unknown = same.formula is None or kind.formula is None
        found[found.index(same)] = dataclasses.replace(
            same,
            name=f"{same.name}, {kind.name}",
            sizes=same.sizes + kind.sizes,
            formula=None if unknown else (same.formula or 0) + (kind.formula or 0),
            repeats=max(same.repeats, kind.repeats),
        )
    return found


def _layers(array: Buffer, layers: int | None) -> bool:
    return layers is None or (len(array.dims) > 1 and array.dims[0] == layers)


def _stored(row: Any, num_shards: int) -> int:
    """Elements of one layer of a weight that a device holds."""
    placed = sharding.choose_placement(row, num_shards)
    return math.prod(placed.stored_shape) // (1 if placed.dim is None else num_shards)
