"""The longest row that fits, by plans of a few lengths."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxsp.config import schema
from jaxsp.core import errors
from jaxsp.model.config import ModelConfig
from jaxsp.planner import planning
from jaxsp.planner.compile import budget, compiled

PRECISION = 0.01
"""How far apart, relative, the longest row that fits and the shortest that does not may be."""

UNIT = 1024
"""Rows are tried in multiples of so many tokens a device."""

_OF_LENGTH = ("data.row_tokens", "data.max_documents_per_row", "attention.head_chunks")
"""How problems begin that shorter rows may not have."""

_MOST_TIMES = 16
"""How much longer the next row may be than the one that fitted, on the first plan's word alone."""

USUAL = 8
"""Number of lengths that are usually tried, for the time left."""

FIXED = (budget.WEIGHTS, budget.OPTIMIZER, budget.GRADIENTS, budget.GATHERS)
"""Causes that do not grow with the row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """A length, and what came of it."""

    row_tokens: int
    plan: planning.Plan | None
    """None where it was refused before it was compiled."""
    why: str
    """Why it does not fit; empty where it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Longest:
    """What a search has found."""

    tried: Sequence[Tried]
    """From short to long."""

    @property
    def plan(self) -> planning.Plan | None:
        """Of the longest row that fits; None where none does."""
        return next((one.plan for one in reversed(self.tried) if not one.why), None)

    @property
    def beyond(self) -> Tried:
        """The shortest row beyond it that does not fit; of others, between, shorter ones may not."""
        best = self.plan.row_tokens if self.plan else 0
        return next(one for one in self.tried if one.why and one.row_tokens > best)


def longest(
    settings: schema.Config, *, model: ModelConfig, site: compiled.Site, say: Callable[[Tried], None] = lambda _: None
) -> Longest:
    """The longest rows that a config's levers and mesh have room for, each of one document, to PRECISION.

    Memory grows nearly in proportion to the row, so that each plan says where to try next.

    Args:   say: is told of each length.
    Raises: UserError where nothing can be planned for another reason than the length.
    """
    unit = UNIT * settings.mesh.seq
    tried: dict[int, Tried] = {}

    def attempt(row_tokens: int) -> Tried:
        rows = with_rows_of(settings, row_tokens)
        try:
            plan = planning.of(rows, model=model, site=site)
        except errors.UserError as error:
            if not str(error).startswith(_OF_LENGTH):
                raise
            return Tried(row_tokens=row_tokens, plan=None, why=str(error).splitlines()[0])
        first = next((one.plan for one in tried.values() if one.plan), None)
        if first is not None and first.kernel == "cudnn" != plan.kernel:
            return Tried(row_tokens=row_tokens, plan=plan, why=plan.why_not_cudnn)
        return Tried(row_tokens=row_tokens, plan=plan, why=plan.short)

    row_tokens = max(unit, settings.data.longest_row // unit * unit)
    while True:
        tried[row_tokens] = attempt(row_tokens)
        say(tried[row_tokens])
        plan = tried[row_tokens].plan
        if plan is not None and plan.host_room_gib < 0:  # for rows of any length
            return Longest(tried=[tried[row_tokens]])
        below = max((length for length, one in tried.items() if not one.why), default=0)
        above = min((length for length, one in tried.items() if one.why and length > below), default=None)
        if above is not None and (above - below <= unit or above <= below * (1 + PRECISION)):
            further = _next_split(settings, model, site, beyond=above, unit=unit)
            if further is None or further in tried:
                return Longest(tried=[tried[length] for length in sorted(tried)])
            row_tokens = further
            continue
        guess = _crossing(tried, below, above)
        if above is None:
            guess = min(guess, _MOST_TIMES * below)
        # from where it fits a little further, and the other way round, so that both ends close in
        guess *= 1 + 0.4 * PRECISION * (1 if row_tokens == below else -1)
        row_tokens = max(below + unit, round(guess / unit) * unit)
        if above is not None:
            row_tokens = min(row_tokens, above - unit)


def _next_split(settings: schema.Config, model: ModelConfig, site: compiled.Site, *, beyond: int, unit: int) -> int | None:
    """Finds the shortest row, up to twice `beyond`, for which cuDNN's work is split into more
    calls; None if there is none.

    More calls need less device memory, so this row may fit although a shorter one does not.
    """
    devices = compiled.devices(site.kind, site.num_devices)

    def split(row_tokens: int) -> tuple[int, int]:
        try:
            choice = compiled.program(with_rows_of(settings, row_tokens), model=model, devices=devices)[1]
        except errors.UserError:
            return 0, 0
        # more chunks, or slots with less room
        return (choice.head_chunks, -choice.slot_room) if choice.kernel == "cudnn" else (0, 0)

    now, low, high = split(beyond), beyond // unit, 2 * beyond // unit
    if not (0, 0) < now < split(high * unit):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if split(middle * unit) <= now else (low, middle)
    return high * unit


def with_rows_of(settings: schema.Config, row_tokens: int) -> schema.Config:
    """The config with rows of another length."""
    return settings.model_copy(update={"data": settings.data.model_copy(update={"row_tokens": row_tokens})})


def _crossing(tried: dict[int, Tried], below: int, above: int | None) -> float:
    """The row at which the first of device and host is full, on a line through two plans, or through one and what is fixed."""
    ends = [tried[length].plan for length in (below, above) if length]
    known = [plan for plan in ends if plan is not None]
    if above is not None and not ((longer := tried[above].plan) and longer.short):
        return (below + above) / 2  # it is too long for something else than memory
    if len(known) == 1 and above is None:
        shorter = [one.plan for length, one in tried.items() if length < below and one.plan]
        known = [*shorter[-1:], *known]
    last = known[-1]
    crossings = []
    for here, room, taken in (
        (lambda plan: plan.device_gib, last.room_gib, lambda plan: plan.memory),
        (lambda plan: plan.host_gib, last.host_room_gib, lambda plan: plan.host_memory),
    ):
        if len(known) == 2:
            x, y = known[0].row_tokens, here(known[0])
        else:
            x, y = 0, sum(taken(last).get(name, 0.0) for name in FIXED)
        slope = (here(last) - y) / (last.row_tokens - x)
        if slope > 0:
            crossings.append(last.row_tokens + (room - here(last)) / slope)
    return max(min(crossings, default=2.0 * last.row_tokens), 1.0)
