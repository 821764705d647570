"""Parser of the text of a compiled program: computations, instructions, trip counts of loops."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

from jaxsp.attention.attend import KINDS_SCOPE
from jaxsp.attention.chunks.ring_hops import SCOPE as RING_HOPS_SCOPE

_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = ")
_KIND_SWITCH = re.compile(rf'op_name="[^"]*/{KINDS_SCOPE}_(\d+(?:_\d+)+)\)*/cond"')
_RING_HOPS = re.compile(rf'op_name="[^"]*/{RING_HOPS_SCOPE}\)*/cond"')
_CALLED_COMPUTATIONS = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)|"
    r"\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """An instruction of a compiled program."""

    line_number: int
    """Line number in the text; -1 for one that XLA abbreviates: see `_expand_tuple_elements`."""
    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @property
    def called_computations(self) -> list[str]:
        """Names of the computations that it calls."""
        return [
            name.strip().lstrip("%")
            for single, several in _CALLED_COMPUTATIONS.findall(self.attributes)
            for name in (several.split(",") if several else [single])
        ]

    @property
    def operand_names(self) -> list[str]:
        return [
            word.split()[-1].lstrip("%")
            for word in re.sub(r"/\*.*?\*/", "", self.operands).split(",")
            if word.strip()
        ]

    def find_computation(self, name: str) -> str:
        """Returns the computation of an attribute such as `body`."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        assert match is not None, f"{self.name} has no {name}"
        return match[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloModule:
    """A compiled program."""

    computations: dict[str, list[Instruction]]
    """Instructions of each computation, by name."""
    entry: str
    """Name of the computation that runs first."""


def parse_module(text: str) -> HloModule:
    """Parses the text of a program.

    Raises: ValueError if no computation is the entry.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    lines: list[Instruction] = []
    shapes: dict[str, str] = {}
    for number, line in enumerate(text.splitlines()):
        if (header := _COMPUTATION.match(line)) is not None:
            lines = computations[header[2]] = []
            shapes = {}
            entry = header[2] if header[1] else entry
        elif (named := _INSTRUCTION.match(line)) is not None:
            is_tuple = line[named.end()] == "("
            end = _find_closing_paren(line, named.end()) if is_tuple else named.end()
            shape_end = line.index(" ", end)
            opcode, _, _ = line[shape_end:].strip().partition("(")
            operands_begin = line.index("(", shape_end)
            operands_end = _find_closing_paren(line, operands_begin)
            operands = line[operands_begin + 1 : operands_end]
            for element in _expand_tuple_elements(operands, shapes):
                lines.append(element)
                shapes[element.name] = element.shape
            shape = shapes[named[1]] = line[named.end() : shape_end]
            lines.append(
                Instruction(
                    line_number=number,
                    name=named[1],
                    shape=shape,
                    opcode=opcode,
                    operands=operands,
                    attributes=line[operands_end + 1 :],
                )
            )
    if not entry:
        raise ValueError("the text must be a compiled program: no computation in it is its ENTRY")
    return HloModule(computations=computations, entry=entry)


def _expand_tuple_elements(operands: str, shapes: Mapping[str, str]) -> Iterator[Instruction]:
    """Yields the get-tuple-elements that operands abbreviate as `%tuple#index`, as of jax 0.11.

    Args: shapes: shapes of the computation's earlier instructions and abbreviations, by name.
    """
    for name, index in sorted(set(re.findall(r"%([^\s,()#]+)#(\d+)", operands))):
        if f"{name}#{index}" not in shapes:
            yield Instruction(
                line_number=-1,
                name=f"{name}#{index}",
                shape=_split_tuple_shape(shapes[name])[int(index)],
                opcode="get-tuple-element",
                operands=f"%{name}",
                attributes=f", index={index}",
            )


def _split_tuple_shape(shape: str) -> list[str]:
    """Shapes of a tuple's elements.

    Example: `(s32[], (f32[8]{0}, u32[]))` has `s32[]` and `(f32[8]{0}, u32[])`.
    """
    elements = [""]
    depth = 0
    for letter in re.sub(r"/\*.*?\*/", "", shape[1:-1]):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += letter
    return [element.strip() for element in elements]


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
    fractions: dict[str, float] = {}
    for name, number in zip(line.called_computations, num_layers, strict=True):
        fractions[name] = fractions.get(name, 0.0) + number / sum(num_layers)
    return fractions


def count_runs(
    program: HloModule,
    is_counted: Callable[[Instruction], bool],
    *,
    include_branches: bool = False,
) -> list[tuple[Instruction, int]]:
    """Counts the runs of some instructions, which are returned in the order of the text.

    A layer's attention of a kind counts for the layers of this kind: see `find_kind_fractions`.

    Args:
        is_counted: selects the instructions.
        include_branches: counts instructions of other branches as if each branch were taken.
    Raises: ValueError for a loop around an instruction whose trip count is unknown; and, unless
        `include_branches`, for an instruction in another branch.
    """
    callers = ["while", "call", "fusion", "async-start"]
    if include_branches:
        callers.append("conditional")
    runs: collections.Counter[Instruction] = collections.Counter()
    idle: dict[str, bool] = {}

    def is_idle(name: str) -> bool:
        """True if no counted instruction is in a computation or in what it calls."""
        if name not in idle:
            idle[name] = not any(
                is_counted(line) or not all(map(is_idle, line.called_computations))
                for line in program.computations[name]
            )
        return idle[name]

    def walk(name: str, times: int) -> None:
        """Counts the instructions of a computation that runs `times` times."""
        for line in program.computations[name]:
            runs[line] += times if is_counted(line) else 0
            busy = [called for called in line.called_computations if not is_idle(called)]
            # async-update and async-done name the computation that async-start runs
            if not busy or line.opcode in ("async-update", "async-done"):
                continue
            fractions = find_kind_fractions(line)
            if line.opcode not in callers and not fractions:
                raise ValueError(f"{line.name} is a {line.opcode}: its computations may not run")
            trip_count = find_trip_count(line, program) if line.opcode == "while" else 1
            for called in busy:
                if num_runs := round(times * trip_count * fractions.get(called, 1)):
                    walk(called, num_runs)

    walk(program.entry, 1)
    return sorted(
        ((line, count) for line, count in runs.items() if count),
        key=lambda pair: pair[0].line_number,
    )


def find_async_pairs(program: HloModule) -> dict[str, tuple[int, int]]:
    """Finds the lines of the start and the end of each asynchronous computation, by its name.

    jax 0.12 wraps collectives and host copies in such computations. If several pairs run one, the
    closest pair counts.
    """
    pairs: dict[str, tuple[int, int]] = {}
    for lines in program.computations.values():
        starts: dict[str, Instruction] = {}
        for line in lines:
            operands = line.operands.split()
            start = starts.get(operands[-1].lstrip("%")) if operands else None
            if line.opcode == "async-start":
                starts[line.name] = line
            elif line.opcode == "async-update" and start:
                starts[line.name] = start
            elif line.opcode == "async-done" and start:
                (name,) = start.called_computations
                pair = start.line_number, line.line_number
                pairs[name] = min(
                    pair, pairs.get(name, pair), key=lambda lines: lines[1] - lines[0]
                )
    return pairs


def find_trip_count(loop: Instruction, program: HloModule) -> int:
    """Finds the trip count of a loop: XLA's own, or from begin and end of a counter that adds one.

    Raises: ValueError if the text has neither.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known is not None:
        return int(known[1])
    # XLA drops the count of a loop whose first or last iteration it peels, and keeps the counter
    counter = re.search(r'"known_induction_variable":\{"tuple_index":"(\d+)"\}', loop.attributes)
    around = next(lines for lines in program.computations.values() if loop in lines)
    begin = end = step = None
    if counter is not None:
        named = {line.name: line for line in around}
        begin = _find_constant(named[loop.operand_names[0]].operand_names[int(counter[1])], around)
        condition, body = (loop.find_computation(name) for name in ("condition", "body"))
        end = _find_operand_constant(program.computations[condition][-1], "compare", program)
        of_body = {line.name: line for line in program.computations[body]}
        step = _find_operand_constant(
            of_body[program.computations[body][-1].operand_names[int(counter[1])]], "add", program
        )
    if begin is None or end is None or step != 1:
        raise ValueError(f"{loop.name} is a loop with an unknown trip count")
    return end - begin


def _find_operand_constant(line: Instruction, opcode: str, program: HloModule) -> int | None:
    """Finds the constant that a value is compared with (as less than it) or that is added to it.

    The instruction may be in a fusion.
    """
    lines = next(lines for lines in program.computations.values() if line in lines)
    while line.opcode == "fusion":
        lines = program.computations[line.find_computation("calls")]
        line = lines[-1]
    if line.opcode != opcode or (opcode == "compare" and "direction=LT" not in line.attributes):
        return None
    constants = [_find_constant(name, lines) for name in line.operand_names]
    known = [value for value in constants if value is not None]
    # less than: the constant is on the right
    return known[0] if len(known) == 1 and (opcode == "add" or constants[1] is not None) else None


def _find_constant(name: str, lines: list[Instruction]) -> int | None:
    """Finds the integer that a value is, or a copy of one; None if it is not a constant."""
    line = next(line for line in lines if line.name == name)
    while line.opcode in ("copy", "bitcast"):
        name = line.operand_names[0]
        line = next(line for line in lines if line.name == name)
    if line.opcode == "constant" and re.fullmatch(r"-?\d+", line.operands):
        return int(line.operands)
    return None


def _find_closing_paren(line: str, begin: int) -> int:
    """Finds the parenthesis that closes the one at `begin`."""
    depth = 0
    for place in range(begin, len(line)):
        depth += (line[place] == "(") - (line[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"unclosed parenthesis: {line.strip()[:200]}")
