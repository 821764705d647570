"""Plans of a config's step on every mesh of some devices, with every attention strategy."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxsp.attention.selection import StrategyOption, list_options
from jaxsp.attention.strategies.workload import HasHeads
from jaxsp.blocks.config import ModelConfig
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.planning import planner
from jaxsp.planning.absent import Cluster
from jaxsp.planning.planner import Plan
from jaxsp.training.step_config import StepConfig


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
    """Sorts results by rank, then by `seq`, then by the estimate; those without a plan are last."""
    ranks = compute_ranks(mesh_plans)

    def key(mesh_plan: MeshPlan) -> tuple[bool, bool, float, int, float]:
        plan = mesh_plan.plan
        seq = mesh_plan.mesh[axes.SEQ]
        if plan is None:
            return True, True, math.inf, seq, 0.0
        rank = ranks.get(id(mesh_plan), math.inf)
        return False, not plan.fits, rank, seq, plan.step_s_estimate or plan.device_gib

    return sorted(mesh_plans, key=key)


def compute_ranks(mesh_plans: Sequence[MeshPlan]) -> dict[int, int]:
    """Computes the rank of each result that fits, from 1, by its id.

    Results within SAME_TIME_FACTOR of the fastest of a rank share it. Without estimated seconds,
    the memory counts.
    """
    fitting = [
        (mesh_plan.plan.step_s_estimate or mesh_plan.plan.device_gib, id(mesh_plan))
        for mesh_plan in mesh_plans
        if mesh_plan.plan and mesh_plan.plan.fits
    ]
    ranks: dict[int, int] = {}
    rank = 0
    fastest = 0.0
    for time, number in sorted(fitting, key=lambda pair: pair[0]):
        if not rank or time > SAME_TIME_FACTOR * fastest:
            rank += 1
            fastest = time
        ranks[number] = rank
    return ranks
