"""Memory that a traced program needs at once, without compiling it.

The arrays of a jaxpr are followed from the operation that makes them to their last use. XLA places
them in another order and fuses more, so this is an estimate: for the recipes in configs/, 0.86 to
1.05 times what jax 0.10.1 compiles; for losses of two models' logits, 0.7 to 1.5. It assumes that

- elementwise operations are fused into the operations that use their results, so that such a result
  is in memory only as an operand of another operation, such as a matrix product,
- views, transposed arrays, and arrays that are updated in place take no memory of their own,
- an elementwise operation writes into an operand of the same size that is not used later, and
- the state of a loop is updated in place.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

_STORED = (
    *("dot_general", "conv_general", "scan", "while", "cond", "all_", "psum", "reduce", "ppermute"),
    *("pmax", "pmin", "gather", "sort", "cum", "arg", "top_k", "triangular", "random", "threefry"),
    *("custom_call", "ffi", "pallas", "mosaic", "dot_product_attention"),
    *("dynamic_update_slice", "scatter", "get", "swap", "addupdate"),
)
"""Beginnings of the names of primitives that read operands from memory and write to it; all others
are elementwise."""

_REDUCTIONS = tuple("reduce_sum reduce_max reduce_min reduce_and reduce_or argmax reduce".split())
"""Those that XLA fuses with the operations that make their operands."""

_VIEWS = (
    *("reshape", "squeeze", "expand_dims", "transpose", "optimization_barrier", "copy", "name"),
    *("stop_gradient", "device_put", "reduce_precision", "reshard", "new_ref", "freeze"),
)
"""Names of primitives whose results are their operands in another form."""

_IN_PLACE = ("dynamic_update_slice", "scatter")

_LIBRARY_BACKWARD = "dot_product_attention_bwd"
"""Beginning of the name of the primitive of cuDNN's backward pass, which has a workspace."""


def find_peak(jaxpr: core.ClosedJaxpr, *, workspace_bytes: int = 0) -> int:
    """Maximum bytes of device memory of the arrays that a program makes, besides its inputs.

    Args: workspace_bytes: of a backward call of the attention library.
    """
    return _Program(jaxpr.jaxpr, (), workspace_bytes).peak


def sum_results(jaxpr: core.ClosedJaxpr) -> int:
    """Bytes of device memory of the results of a program that are not its inputs."""
    return _Program(jaxpr.jaxpr, (), 0).made_bytes


def find_bytes(aval: Any) -> int:
    """Bytes of an array in device memory; 0 for one in host memory, and for random keys."""
    aval = getattr(aval, "inner_aval", aval)  # of a reference
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return 0
    return math.prod(getattr(aval, "shape", ())) * getattr(aval.dtype, "itemsize", 0)


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An operation of a program, with the numbers of its arrays; None for a constant."""

    equation: core.JaxprEqn
    operands: list[int | None]
    results: list[int]
    inner: "list[_Program]"
    """Body of a loop, or branches of a conditional."""

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def is_elementwise(self) -> bool:
        return not self.name.startswith(_STORED)


class _Program:
    """A jaxpr with all that it calls in place of the calls; loops and conditionals stay."""

    def __init__(self, jaxpr: core.Jaxpr, state: tuple[int, ...], workspace_bytes: int):
        """Args: state: numbers of the inputs that the program may overwrite."""
        self._workspace_bytes = workspace_bytes
        self._avals: list[Any] = []
        self._operations: list[_Operation] = []
        given = {var: self._add(var) for var in (*jaxpr.invars, *jaxpr.constvars)}
        self._inputs = set(given.values())
        results = self._read(jaxpr, given)
        self._sources = list(range(len(self._avals)))
        """Number of the array that each one is a view of."""
        self._find_views()
        self.result_sources = [None if x is None else self._source(x) for x in results]
        self._results = {number for number in self.result_sources if number is not None}
        self.made_bytes = self._bytes(self._results - self._inputs)
        self._stored = self._find_stored()
        self._last_uses = self._find_last_uses()
        self.peak = self._measure({given[jaxpr.invars[index]] for index in state})

    def _add(self, var: core.Var) -> int:
        self._avals.append(var.aval)
        return len(self._avals) - 1

    def _read(self, jaxpr: core.Jaxpr, numbers: dict[core.Var, int]) -> list[int | None]:
        """Adds the operations of a jaxpr, and returns the numbers of its results."""

        def find(var: Any) -> int | None:
            return None if isinstance(var, core.Literal) else numbers[var]

        numbers |= {var: self._add(var) for var in jaxpr.constvars if var not in numbers}
        for equation in jaxpr.eqns:
            operands = [find(var) for var in equation.invars]
            called = _find_called(equation)
            if called is None:
                results = [self._add(var) for var in equation.outvars]
                inner = self._read_inner(equation)
                self._operations.append(_Operation(equation, operands, results, inner))
            else:
                own = dict(zip(called.invars, operands, strict=True))
                results = self._read(called, own)  # type: ignore[assignment, arg-type]
            numbers |= zip(equation.outvars, results, strict=True)
        return [find(var) for var in jaxpr.outvars]

    def _read_inner(self, equation: core.JaxprEqn) -> "list[_Program]":
        if equation.primitive.name == "cond":
            branches = map(_open, equation.params["branches"])
            return [_Program(branch, (), self._workspace_bytes) for branch in branches]
        if (body := _find_body(equation)) is None:
            return []
        state = range(len(body.invars))[_find_state(equation, len(body.invars))]
        return [_Program(body, tuple(state), self._workspace_bytes)]

    def _source(self, number: int) -> int:
        while self._sources[number] != number:
            number = self._sources[number]
        return number

    def _bytes(self, numbers: set[int]) -> int:
        return sum(find_bytes(self._avals[number]) for number in numbers)

    def _find_views(self) -> None:
        converted: dict[int, int] = {}
        for operation in self._operations:
            operand = operation.operands[0] if operation.operands else None
            if operation.name == "scan":
                # Views of one array that every iteration returns
                (body,) = operation.inner
                first_results: dict[int | None, int] = {}
                results = list(zip(operation.results, body.result_sources, strict=True))
                for result, source in results[_count_states(operation.equation) :]:
                    if source is not None:
                        self._sources[result] = first_results.setdefault(source, result)
            elif operation.name.startswith(_IN_PLACE) and operand is not None:
                self._sources[operation.results[0]] = self._source(operand)
            elif operation.name.startswith(_VIEWS):
                for operand, result in zip(operation.operands, operation.results, strict=False):
                    sizes = [find_bytes(self._avals[x]) for x in (operand, result) if x is not None]
                    if operand is not None and sizes[0] == sizes[1]:
                        self._sources[result] = self._source(operand)
            elif operation.name == "convert_element_type" and operand is not None:
                # Back to the dtype that it was converted from: see `Gather.__call__`
                (result,) = operation.results
                first = converted.get(self._source(operand), self._source(operand))
                converted[result] = first
                if self._avals[first].dtype == self._avals[result].dtype:
                    self._sources[result] = first

    def _run(self) -> Iterator[tuple[int, _Operation, set[int], set[int]]]:
        """Operations except views, with their numbers, operands and results."""
        for number, operation in enumerate(self._operations):
            if not operation.name.startswith(_VIEWS):
                operands = {self._source(x) for x in operation.operands if x is not None}
                yield number, operation, operands, {*map(self._source, operation.results)}

    def _find_stored(self) -> set[int]:
        """Arrays that are in memory, except the inputs."""
        stored = set(self._results)
        for _, operation, operands, results in self._run():
            if not operation.is_elementwise:
                stored |= results
                if operation.name not in _REDUCTIONS:
                    stored |= operands
        return stored - self._inputs

    def _find_last_uses(self) -> dict[int, int]:
        """Number of the last operation that needs each array that is used."""
        last = dict.fromkeys(self._results, len(self._operations))
        for number, operation, operands, results in reversed(list(self._run())):
            if operation.equation.effects or not results.isdisjoint(last):
                fused = results - self._stored - self._inputs
                end = max([number, *(last.get(result, number) for result in fused)])
                for operand in operands:
                    last[operand] = max(end, last.get(operand, end))
        return last

    def _measure(self, live: set[int]) -> int:
        """Maximum bytes at once. Args: live: inputs whose memory may be used again."""
        dying = collections.defaultdict(set)
        for number, last_use in self._last_uses.items():
            dying[last_use].add(number)
        total = -self._bytes({number for number in live if number not in self._last_uses})
        peak = 0
        for number, operation, _, results in self._run():
            if not operation.equation.effects and results.isdisjoint(self._last_uses):
                continue
            new = (results & self._stored) - live
            ended = (live | new) & dying[number]
            added = self._bytes(new)
            working = self._find_working_bytes(operation, added)
            reused = 0
            if operation.is_elementwise:
                of_ended, of_new = (
                    collections.Counter(find_bytes(self._avals[x]) for x in numbers)
                    for numbers in (ended - new, new)
                )
                reused = sum((of_ended & of_new).elements())
            elif operation.name in ("scan", "while"):
                state = operation.operands[_find_state(operation.equation, len(operation.operands))]
                reused = self._bytes({self._source(x) for x in state if x is not None} & ended)
            peak = max(peak, total + added - reused + working)
            total += added - self._bytes(ended)
            live = (live | new) - ended
        return peak

    def _find_working_bytes(self, operation: _Operation, added: int) -> int:
        """Bytes inside a loop, conditional or library call."""
        if operation.name.startswith(_LIBRARY_BACKWARD):
            return self._workspace_bytes
        peak = max((inner.peak for inner in operation.inner), default=0)
        return max(0, peak - added) if operation.name == "cond" else peak


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _open(jaxpr: Any) -> core.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _find_body(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """Body of a loop; None for other operations."""
    name = {"scan": "jaxpr", "while": "body_jaxpr"}.get(equation.primitive.name)
    return None if name is None else _open(equation.params[name])


def _count_states(equation: core.JaxprEqn) -> int:
    """Number of results of a loop that are its state; the others stack what iterations return."""
    body = _find_body(equation)
    assert body is not None
    pairs = zip(equation.outvars, body.outvars, strict=True)
    return sum(_shape(whole) == _shape(inner) for whole, inner in pairs)


def _find_state(equation: core.JaxprEqn, num_operands: int) -> slice:
    """Operands of a loop, or of its body, that are the first values of its state."""
    body = _find_body(equation)
    assert body is not None
    num_stacked = 0
    if equation.primitive.name == "scan":
        pairs = zip(equation.invars, body.invars, strict=True)
        num_stacked = sum(_shape(whole) != _shape(inner) for whole, inner in pairs)
    end = num_operands - num_stacked
    return slice(end - _count_states(equation), end)


def _find_called(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """Program that an operation runs once, such as that of a nested jit."""
    if equation.primitive.name in ("scan", "while", "cond"):
        return None
    called = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    jaxpr = next((jaxpr for jaxpr in called if jaxpr is not None), None)
    return None if jaxpr is None else _open(jaxpr)
