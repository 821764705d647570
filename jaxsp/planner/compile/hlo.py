"""A compiled program's text as XLA writes it: computations, their instructions, and how often loops run."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = ")
_CALLED_COMPUTATIONS = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)|"
    r"\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """An instruction."""

    line_number: int
    """Line number in the text; -1 for an instruction that XLA abbreviates: see `_elements`."""
    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @property
    def called_computations(self) -> list[str]:
        """Computations that it names."""
        found = _CALLED_COMPUTATIONS.findall(self.attributes)
        return [
            name.strip().lstrip("%")
            for one, several in found
            for name in (several.split(",") if several else [one])
        ]

    @property
    def operand_names(self) -> list[str]:
        return [
            word.split()[-1].lstrip("%")
            for word in re.sub(r"/\*.*?\*/", "", self.operands).split(",")
            if word.strip()
        ]

    def find_computation(self, name: str) -> str:
        """The computation that it names as this."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        assert found is not None, f"{self.name} has no {name}"
        return found[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloModule:
    """A program's computations by name, and which of them runs."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse_module(text: str) -> HloModule:
    """The program of a text. Raises: ValueError where there is none."""
    computations: dict[str, list[Instruction]] = {}
    entry, lines = "", []
    shapes: dict[str, str] = {}
    for number, line in enumerate(text.splitlines()):
        if (begins := _COMPUTATION.match(line)) is not None:
            lines = computations[begins[2]] = []
            shapes = {}
            entry = begins[2] if begins[1] else entry
        elif (named := _INSTRUCTION.match(line)) is not None:
            shape_end = _find_shape_end(line, named.end())
            opcode, _, _ = line[shape_end:].strip().partition("(")
            operands_begin = line.index("(", shape_end)
            operands_end = _find_closing_paren(line, operands_begin)
            operands = line[operands_begin + 1 : operands_end]
            for element in _expand_tuple_elements(operands, shapes):
                lines.append(element)
                shapes[element.name] = element.shape
            shape = shapes[named[1]] = line[named.end() : shape_end]
            attributes = line[operands_end + 1 :]
            lines.append(
                Instruction(
                    line_number=number,
                    name=named[1],
                    shape=shape,
                    opcode=opcode,
                    operands=operands,
                    attributes=attributes,
                )
            )
    if not entry:
        raise ValueError("this is no program's text: no computation in it is its ENTRY")
    return HloModule(computations=computations, entry=entry)


def _expand_tuple_elements(operands: str, shapes: Mapping[str, str]) -> Iterator[Instruction]:
    """Yields the get-tuple-elements that operands abbreviate as `%tuple#index`, as of jax 0.11.

    Args:   shapes: shapes of the earlier instructions and abbreviations of the computation, by name.
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
    found = [""]
    depth = 0
    for letter in re.sub(r"/\*.*?\*/", "", shape[1:-1]):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [element.strip() for element in found]


def count_runs(
    program: HloModule, is_counted: Callable[[Instruction], bool], *, include_branches: bool = False
) -> list[tuple[Instruction, int]]:
    """The instructions that are wanted, in the order of the text, and how often each runs.

    Args:   may: what need not run, being in a branch, is thought to run.
    Raises: ValueError for a loop around one that runs who knows how often, and unless it `may`, for one that need not run.
    """
    known = (
        "while",
        "call",
        "fusion",
        "async-start",
        *(["conditional"] if include_branches else []),
    )
    times: collections.Counter[Instruction] = collections.Counter()
    idle: dict[str, bool] = {}

    def is_idle(name: str) -> bool:
        """No wanted instruction is in a computation, or in what it calls."""
        if name not in idle:
            lines = program.computations[name]
            idle[name] = not any(
                is_counted(line) or not all(map(is_idle, line.called_computations))
                for line in lines
            )
        return idle[name]

    def walk(name: str, often: int) -> None:
        """Counts the instructions of a computation that runs so often."""
        for line in program.computations[name]:
            times[line] += often if is_counted(line) else 0
            busy = [called for called in line.called_computations if not is_idle(called)]
            if not busy or line.opcode in (
                "async-update",
                "async-done",
            ):  # these name what async-start runs
                continue
            if line.opcode not in known:
                raise ValueError(f"{line.name} is a {line.opcode}: what is in it need not run")
            rounds = find_trip_count(line, program) if line.opcode == "while" else 1
            for called in busy:
                walk(called, often * rounds)

    walk(program.entry, 1)
    return sorted(
        ((line, count) for line, count in times.items() if count),
        key=lambda pair: pair[0].line_number,
    )


def find_async_pairs(program: HloModule) -> dict[str, tuple[int, int]]:
    """Line numbers of the instructions that start an asynchronous computation and wait for it, by
    its name.

    jax 0.12 wraps collectives and host copies in such computations. If several pairs run one, the closest pair counts.
    """
    found: dict[str, tuple[int, int]] = {}
    for lines in program.computations.values():
        begun: dict[str, Instruction] = {}
        for line in lines:
            before = (
                begun.get(line.operands.split()[-1].lstrip("%")) if line.operands.split() else None
            )
            if line.opcode == "async-start":
                begun[line.name] = line
            elif line.opcode == "async-update" and before:
                begun[line.name] = before
            elif line.opcode == "async-done" and before:
                (name,) = before.called_computations
                pair = before.line_number, line.line_number
                found[name] = min(
                    pair, found.get(name, pair), key=lambda lines: lines[1] - lines[0]
                )
    return found


def find_trip_count(loop: Instruction, program: HloModule) -> int:
    """How often a loop runs: as XLA says, or from where its counter begins and ends; it goes up by one.

    Raises: ValueError where neither is to be seen.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known is not None:
        return int(known[1])
    # XLA forgets the count of a loop whose first or last round it takes out, and keeps which value counts
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
        raise ValueError(f"{loop.name} is a loop, and how often it runs is not known")
    return end - begin


def _find_operand_constant(line: Instruction, opcode: str, program: HloModule) -> int | None:
    """The constant that a value is compared with (as less than it), or that is added to it, here or in a fusion."""
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
    """The whole number that a value is, perhaps a copy of one; None if it is none."""
    line = next(line for line in lines if line.name == name)
    while line.opcode in ("copy", "bitcast"):
        name = line.operand_names[0]
        line = next(line for line in lines if line.name == name)
    return (
        int(line.operands)
        if line.opcode == "constant" and re.fullmatch(r"-?\d+", line.operands)
        else None
    )


def _find_shape_end(line: str, begin: int) -> int:
    """Where the shape that begins here ends: a tuple in parentheses, or up to a space."""
    return _find_closing_paren(line, begin) + 1 if line[begin] == "(" else line.index(" ", begin)


def _find_closing_paren(line: str, begin: int) -> int:
    """The parenthesis that closes the one here."""
    depth = 0
    for place in range(begin, len(line)):
        depth += (line[place] == "(") - (line[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"a parenthesis is not closed: {line.strip()[:200]}")
