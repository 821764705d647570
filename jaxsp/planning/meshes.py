"""Plans of a config's step on every mesh of some devices, with every attention strategy."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxsp.attention.selection import StrategyOption, list_options
from jaxsp.attention.workload import HasHeads
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
