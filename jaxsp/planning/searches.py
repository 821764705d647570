"""Searches by several plans: the longest row that fits, and every mesh of some devices with every
attention strategy."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxsp.attention.selection import StrategyOption, choose_attention, list_options
from jaxsp.attention.workload import HasHeads
from jaxsp.blocks.config import ModelConfig
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.planning import absent, fit, planner
from jaxsp.planning.absent import Cluster
from jaxsp.planning.planner import Plan
from jaxsp.training.step_config import StepConfig

PRECISION = 0.01
"""Largest relative distance between the longest row that fits and the shortest that does not."""

HEADROOM = 0.03
"""Fraction of the device memory that the longest row leaves free. XLA places temporaries and
cuDNN's workspace in one block, whose gaps take 0 to 5 %, and the workspace is an estimate."""

LENGTH_UNIT = 1024
"""Row lengths are multiples of this number of tokens per device."""

_LENGTH_ERROR_PREFIXES = ("data.row_tokens", "data.max_segments_per_row", "attention.head_chunks")
"""Prefixes of problems that shorter rows may not have."""

_MAX_GROWTH = 16
"""Largest factor from a row that fits to the next one, while no longer row was tried."""


@dataclasses.dataclass(frozen=True)
class TriedLength:
    """A row length, and whether it fits."""

    row_tokens: int
    plan: Plan | None
    """None if it was refused before it was compiled."""
    problem: str
    """Reason that it does not fit; empty if it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongestRow:
    tried: Sequence[TriedLength]
    """Lengths from short to long."""

    @property
    def plan(self) -> Plan | None:
        """Plan of the longest row that fits; None if none does."""
        return next((length.plan for length in reversed(self.tried) if not length.problem), None)

    @property
    def shortest_failing(self) -> TriedLength:
        """The shortest tried row that does not fit and is longer than the longest that does."""
        best = self.plan.row_tokens if self.plan else 0
        return next(length for length in self.tried if length.problem and length.row_tokens > best)


def find_longest_row(
    config: StepConfig,
    *,
    model: ModelConfig,
    cluster: Cluster,
    on_result: Callable[[TriedLength], None] = lambda _: None,
) -> LongestRow:
    """Finds the longest row of one document that fits with a config's mesh and memory options.

    The result is accurate to PRECISION, and leaves HEADROOM free. Memory grows nearly in proportion
    to the row, so each plan predicts the length to try next.

    Args: on_result: called with each length.
    Raises: UserError if planning fails for another reason than the length.
    """
    config = config.with_one_row_for_auto()
    if config.memory.remat == config.memory.kept_mlp_layers == "auto":
        # They would fill the memory of shorter rows, which tells how much longer ones need
        config = config.change(memory={"kept_mlp_layers": 0})
    cluster = dataclasses.replace(cluster, headroom=HEADROOM)
    unit = LENGTH_UNIT * config.mesh.degree
    tried: dict[int, TriedLength] = {}
    row_tokens = max(unit, config.row_tokens // unit * unit)
    while True:
        first_plan = next((length.plan for length in tried.values() if length.plan), None)
        try:
            changed = config.change(row_tokens=row_tokens)
            plan = planner.plan_step(changed, model=model, cluster=cluster)
        except UserError as error:
            if not all(problem.startswith(_LENGTH_ERROR_PREFIXES) for problem in error.problems):
                raise
            length = TriedLength(row_tokens, None, str(error).splitlines()[0])
        else:
            problem = plan.shortage
            # too long if it falls back to another kernel although the first length did not
            if first_plan is not None and plan.fallback_reason and not first_plan.fallback_reason:
                problem = plan.fallback_reason
            length = TriedLength(row_tokens, plan, problem)
        tried[row_tokens] = length
        on_result(length)
        if length.plan is not None and length.plan.host_limit_gib < 0:  # for rows of any length
            return LongestRow(tried=[length])
        below = max((tokens for tokens, length in tried.items() if not length.problem), default=0)
        above = min(
            (tokens for tokens, length in tried.items() if length.problem and tokens > below),
            default=None,
        )
        if above is not None and (above - below <= unit or above <= below * (1 + PRECISION)):
            next_split = _find_next_split(config, model, cluster, beyond=above, unit=unit)
            if next_split is None or next_split in tried:
                return LongestRow(tried=[tried[tokens] for tokens in sorted(tried)])
            row_tokens = next_split
            continue
        guess = _estimate_limit(tried, below, above)
        if above is None:
            guess = min(guess, _MAX_GROWTH * below)
        # slightly above after a row that fits, slightly below otherwise, so that both ends close in
        guess *= 1 + 0.4 * PRECISION * (1 if row_tokens == below else -1)
        row_tokens = max(below + unit, round(guess / unit) * unit)
        if above is not None:
            row_tokens = min(row_tokens, above - unit)


def _find_next_split(
    config: StepConfig, model: ModelConfig, cluster: Cluster, *, beyond: int, unit: int
) -> int | None:
    """Finds the shortest row, up to twice `beyond`, for which cuDNN's work is split into more
    calls; None if there is none.

    More calls need less device memory, so this row may fit although a shorter one does not.
    """
    devices = absent.make_devices(cluster.device_type, cluster.num_devices)

    def divide_kernel(row_tokens: int) -> tuple[int, int] | None:
        try:
            changed = config.change(row_tokens=row_tokens)
            choice = choose_attention(changed.attention, changed.rows, model, devices=devices)
        except UserError:
            return None
        # more chunks, or slots with less room
        return choice.settings.head_chunks, -choice.settings.capacity_factor

    first = divide_kernel(beyond)
    if first is None:
        return None

    def needs_more_calls(row_tokens: int) -> bool:
        found = divide_kernel(row_tokens)
        return found is not None and found > first

    lengths = range(beyond // unit * unit + unit, 2 * beyond // unit * unit + 1, unit)
    if not needs_more_calls(lengths[-1]):
        return None
    return lengths[bisect.bisect_left(lengths, True, key=needs_more_calls)]


def _estimate_limit(tried: dict[int, TriedLength], below: int, above: int | None) -> float:
    """Estimates the row length at which device or host memory is full.

    Extrapolates on a line through two plans, or through one and the causes that do not grow with
    the row.

    Args: below, above: the longest length that fits or 0, and the shortest longer one that does not
        or None.
    """
    if above is not None:
        longer = tried[above].plan
        if longer is None or not longer.shortage:  # too long for another reason than memory
            return (below + above) / 2
    known = [plan for tokens in (below, above) if tokens and (plan := tried[tokens].plan)]
    if len(known) == 1 and above is None:
        shorter = [
            length.plan for tokens, length in tried.items() if tokens < below and length.plan
        ]
        known = [*shorter[-1:], *known]
    last = known[-1]
    crossings = []
    for total, limit, causes in (
        ("device_gib", last.device_limit_gib, last.memory),
        ("host_gib", last.host_limit_gib, last.host_memory),
    ):
        start_tokens = 0
        constant = (fit.WEIGHTS, fit.OPTIMIZER, fit.GRADIENTS)
        start_gib = sum(causes.get(name, 0.0) for name in constant)
        if len(known) == 2:
            start_tokens = known[0].row_tokens
            start_gib = getattr(known[0], total)
        last_gib = getattr(last, total)
        slope = (last_gib - start_gib) / (last.row_tokens - start_tokens)
        if slope > 0:
            crossings.append(last.row_tokens + (limit - last_gib) / slope)
    return max(min(crossings, default=2.0 * last.row_tokens), 1.0)


# Every mesh and strategy


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A mesh with a strategy, and its plan."""

    mesh: dict[str, int]
    strategy: str
    """Name of the strategy in tables, such as `ulysses 4 x ring`."""
    attention_fields: dict[str, Any]
    """Changed fields of the config's attention."""
    plan: Plan | None
    """None if the combination cannot be planned."""
    problem: str
    """Reason that there is no plan; empty otherwise."""
    rank: int | None = None
    """From 1; None if it does not fit."""


def list_meshes(num_devices: int) -> list[dict[str, int]]:
    """Lists every replica x data x seq of `num_devices` devices, the largest seq first."""
    sizes = range(num_devices, 0, -1)
    return [
        {axes.REPLICA: num_devices // (seq * data), axes.DATA: data, axes.SEQ: seq}
        for seq, data in itertools.product(sizes, sizes)
        if num_devices % (seq * data) == 0
    ]


def plan_meshes(
    config: StepConfig,
    *,
    model: ModelConfig,
    cluster: Cluster,
    document_tokens: int | None = None,
    on_result: Callable[[MeshPlan], None] = lambda _: None,
) -> list[MeshPlan]:
    """Plans a config's step on every mesh of a cluster, with every strategy that `auto` may choose.

    Meshes that fit come first, the fastest by estimate first; of those that are equally fast, the
    one with the smallest `seq`.

    Args: on_result: called with each result.
    Raises: UserError if no mesh can be planned.
    """
    mesh_plans = []
    for mesh, option in list_combinations(config, model, num_devices=cluster.num_devices):
        plan = None
        problem = ""
        try:
            changed = config.change(mesh=mesh, attention=option.config_fields)
            changed = planner.resolve_config(changed, model=model, cluster=cluster)
            plan = planner.plan_step(
                changed, model=model, cluster=cluster, document_tokens=document_tokens
            )
        except UserError as error:
            problem = str(error).splitlines()[0]
        mesh_plans.append(MeshPlan(mesh, option.label, option.config_fields, plan, problem))
        on_result(mesh_plans[-1])
    if all(mesh_plan.plan is None for mesh_plan in mesh_plans):
        raise UserError(list(dict.fromkeys(mesh_plan.problem for mesh_plan in mesh_plans)))
    return sort_by_rank(mesh_plans)


def list_combinations(
    config: StepConfig, model: HasHeads, *, num_devices: int
) -> list[tuple[dict[str, int], StrategyOption]]:
    """Lists every mesh of `num_devices` devices with each of its strategies.

    Each mesh replaces the config's mesh.seq.
    """
    config = config.with_one_row_for_auto()
    return [
        (mesh, option)
        for mesh in list_meshes(num_devices)
        for option in list_options(config.attention, config.change(mesh=mesh).rows, model)
    ]


SAME_TIME_FACTOR = 1.05
"""Steps whose estimates differ by less than this factor count as equally fast: estimates are not
more accurate."""


def sort_by_rank(mesh_plans: Sequence[MeshPlan]) -> list[MeshPlan]:
    """Ranks the results that fit by their estimated seconds, or else by memory, and sorts all by
    rank, then by `seq`; those without a plan are last.

    Results within SAME_TIME_FACTOR of the fastest of a rank share it.
    """

    def find_cost(mesh_plan: MeshPlan) -> float:
        plan = mesh_plan.plan
        return 0.0 if plan is None else plan.step_s_estimate or plan.device_gib

    ranked = []
    rank = 0
    fastest = 0.0
    for mesh_plan in sorted(mesh_plans, key=find_cost):
        if mesh_plan.plan is not None and mesh_plan.plan.fits:
            if not rank or find_cost(mesh_plan) > SAME_TIME_FACTOR * fastest:
                rank += 1
                fastest = find_cost(mesh_plan)
            mesh_plan = dataclasses.replace(mesh_plan, rank=rank)
        ranked.append(mesh_plan)
    key = lambda x: (x.plan is None, x.rank or math.inf, x.mesh[axes.SEQ], find_cost(x))
    return sorted(ranked, key=key)
