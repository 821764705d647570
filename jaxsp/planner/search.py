"""The longest row that fits, by plans of a few lengths."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError
from jaxsp.model.config import ModelConfig
from jaxsp.planner import planning
from jaxsp.planner.compile import compiled, memory
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.planning import Plan

PRECISION = 0.01
"""How far apart, relative, the longest row that fits and the shortest that does not may be."""

LENGTH_UNIT = 1024
"""Rows are tried in multiples of so many tokens a device."""

_LENGTH_ERROR_PREFIXES = ("data.row_tokens", "data.max_segments_per_row", "attention.head_chunks")
"""How problems begin that shorter rows may not have."""

_MAX_GROWTH = 16
"""How much longer the next row may be than the one that fitted, on the first plan's word alone."""

USUAL_NUM_LENGTHS = 8
"""Number of lengths that are usually tried, for the time left."""

CONSTANT_CATEGORIES = (memory.WEIGHTS, memory.OPTIMIZER, memory.GRADIENTS, memory.GATHERED_WEIGHTS)
"""Causes that do not grow with the row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedLength:
    """A length, and what came of it."""

    row_tokens: int
    plan: Plan | None
    """None where it was refused before it was compiled."""
    problem: str
    """Why it does not fit; empty where it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongestRow:
    """What a search has found."""

    tried: Sequence[TriedLength]
    """From short to long."""

    @property
    def plan(self) -> Plan | None:
        """Of the longest row that fits; None where none does."""
        return next((one.plan for one in reversed(self.tried) if not one.problem), None)

    @property
    def shortest_failing(self) -> TriedLength:
        """The shortest row beyond it that does not fit; of others, between, shorter ones may not."""
        best = self.plan.row_tokens if self.plan else 0
        return next(one for one in self.tried if one.problem and one.row_tokens > best)


def find_longest_row(
    config: Config,
    *,
    model: ModelConfig,
    cluster: Cluster,
    on_result: Callable[[TriedLength], None] = lambda _: None,
) -> LongestRow:
    """The longest rows that a config's levers and mesh have room for, each of one document, to PRECISION.

    Memory grows nearly in proportion to the row, so that each plan says where to try next.

    Args:   say: is told of each length.
    Raises: UserError where nothing can be planned for another reason than the length.
    """
    unit = LENGTH_UNIT * config.mesh.seq
    tried: dict[int, TriedLength] = {}

    def attempt(row_tokens: int) -> TriedLength:
        rows = with_row_tokens(config, row_tokens)
        try:
            plan = planning.plan_step(rows, model=model, cluster=cluster)
        except UserError as error:
            if not str(error).startswith(_LENGTH_ERROR_PREFIXES):
                raise
            return TriedLength(row_tokens=row_tokens, plan=None, problem=str(error).splitlines()[0])
        first = next((one.plan for one in tried.values() if one.plan), None)
        if first is not None and plan.fallback_reason and not first.fallback_reason:
            return TriedLength(row_tokens=row_tokens, plan=plan, problem=plan.fallback_reason)
        return TriedLength(row_tokens=row_tokens, plan=plan, problem=plan.shortage)

    row_tokens = max(unit, config.data.max_row_tokens // unit * unit)
    while True:
        tried[row_tokens] = attempt(row_tokens)
        on_result(tried[row_tokens])
        plan = tried[row_tokens].plan
        if plan is not None and plan.host_limit_gib < 0:  # for rows of any length
            return LongestRow(tried=[tried[row_tokens]])
        below = max((length for length, one in tried.items() if not one.problem), default=0)
        above = min(
            (length for length, one in tried.items() if one.problem and length > below),
            default=None,
        )
        if above is not None and (above - below <= unit or above <= below * (1 + PRECISION)):
            further = _find_next_split(config, model, cluster, beyond=above, unit=unit)
            if further is None or further in tried:
                return LongestRow(tried=[tried[length] for length in sorted(tried)])
            row_tokens = further
            continue
        guess = _estimate_limit(tried, below, above)
        if above is None:
            guess = min(guess, _MAX_GROWTH * below)
        # from where it fits a little further, and the other way round, so that both ends close in
        guess *= 1 + 0.4 * PRECISION * (1 if row_tokens == below else -1)
        row_tokens = max(below + unit, round(guess / unit) * unit)
        if above is not None:
            row_tokens = min(row_tokens, above - unit)


def _find_next_split(
    config: Config, model: ModelConfig, site: Cluster, *, beyond: int, unit: int
) -> int | None:
    """Finds the shortest row, up to twice `beyond`, for which cuDNN's work is split into more
    calls; None if there is none.

    More calls need less device memory, so this row may fit although a shorter one does not.
    """
    devices = compiled.make_devices(site.device_type, site.num_devices)

    def split(row_tokens: int) -> tuple[int, int] | None:
        try:
            choice = compiled.build_program(
                with_row_tokens(config, row_tokens), model=model, devices=devices
            )[1]
        except UserError:
            return None
        # more chunks, or slots with less room
        return choice.settings.head_chunks, -choice.settings.capacity_factor

    low = beyond // unit
    high = 2 * beyond // unit
    first = split(beyond)
    last = split(high * unit)
    if first is None or last is None or last <= first:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        middle_split = split(middle * unit)
        if middle_split is None or middle_split <= first:
            low = middle
        else:
            high = middle
    return high * unit


def with_row_tokens(config: Config, row_tokens: int) -> Config:
    """The config with rows of another length."""
    return config.model_copy(
        update={"data": config.data.model_copy(update={"row_tokens": row_tokens})}
    )


def _estimate_limit(tried: dict[int, TriedLength], below: int, above: int | None) -> float:
    """The row at which the first of device and host is full, on a line through two plans, or through one and what is fixed."""
    ends = [tried[length].plan for length in (below, above) if length]
    known = [plan for plan in ends if plan is not None]
    if above is not None and not ((longer := tried[above].plan) and longer.shortage):
        return (below + above) / 2  # it is too long for something else than memory
    if len(known) == 1 and above is None:
        shorter = [one.plan for length, one in tried.items() if length < below and one.plan]
        known = [*shorter[-1:], *known]
    last = known[-1]
    crossings = []
    for here, room, taken in (
        (lambda plan: plan.device_gib, last.device_limit_gib, lambda plan: plan.memory),
        (lambda plan: plan.host_gib, last.host_limit_gib, lambda plan: plan.host_memory),
    ):
        if len(known) == 2:
            x, y = known[0].row_tokens, here(known[0])
        else:
            x, y = 0, sum(taken(last).get(name, 0.0) for name in CONSTANT_CATEGORIES)
        slope = (here(last) - y) / (last.row_tokens - x)
        if slope > 0:
            crossings.append(last.row_tokens + (room - here(last)) / slope)
    return max(min(crossings, default=2.0 * last.row_tokens), 1.0)
