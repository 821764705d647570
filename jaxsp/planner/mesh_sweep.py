"""All meshes that so many devices can make, and what a config's step takes on each."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxsp import attention
from jaxsp.attention import HasHeads, StrategyOption
from jaxsp.config.schema import Config
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.model.config import ModelConfig
from jaxsp.planner import planning
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.planning import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """A mesh, and what came of it."""

    mesh: dict[str, int]
    strategy: str
    """Name of the strategy in tables, such as `hybrid 4`."""
    attention_fields: dict[str, Any]
    """Changed fields of the config's attention."""
    plan: Plan | None
    """None where it was not planned, or refused."""
    problem: str
    """Why not; empty otherwise."""


def list_meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Every replica x data x seq of so many devices, the most that share a row first."""
    for seq in range(num_devices, 0, -1):
        for data in range(num_devices // seq, 0, -1):
            if num_devices % (seq * data) == 0:
                yield {axes.REPLICA: num_devices // (seq * data), axes.DATA: data, axes.SEQ: seq}


def with_mesh(config: Config, mesh: dict[str, int], attention_fields: dict[str, Any]) -> Config:
    """The config with another mesh and other fields of attention."""
    changes: dict[str, Any] = dict(mesh)
    return config.model_copy(
        update={
            "mesh": config.mesh.model_copy(update=changes),
            "attention": config.attention.model_copy(update=attention_fields),
        }
    )


def plan_meshes(
    config: Config,
    *,
    model: ModelConfig,
    cluster: Cluster,
    document_tokens: int | None = None,
    on_result: Callable[[MeshPlan], None] = lambda _: None,
) -> list[MeshPlan]:
    """A config's step on every mesh of a site's devices, with every kind of attention that `auto` may mean there.

    Those that fit first, the fastest by estimate first; of those that are as fast, the one with the smallest `seq`.

    Args:   say: called with each as it is planned.
    """
    found = []
    for mesh, option in list_combinations(config, model, num_devices=cluster.num_devices):
        try:
            plan = planning.plan_step(
                with_mesh(config, mesh, option.config_fields),
                model=model,
                cluster=cluster,
                document_tokens=document_tokens,
            )
            problem = ""
        except UserError as error:
            plan = None
            problem = str(error).splitlines()[0]
        shape = MeshPlan(
            mesh=mesh,
            strategy=option.label,
            attention_fields=option.config_fields,
            plan=plan,
            problem=problem,
        )
        found.append(shape)
        on_result(shape)
    return sort_by_rank(found)


def list_combinations(
    config: Config, model: HasHeads, *, num_devices: int
) -> list[tuple[dict[str, int], StrategyOption]]:
    """Lists every mesh of so many devices with each of its strategies."""
    return [
        (mesh, option)
        for mesh in list_meshes(num_devices)
        for option in attention.list_options(config, model, seq=mesh[axes.SEQ])
    ]


SAME_TIME_FACTOR = 1.05
"""Steps whose estimates differ by less than this factor count as equally fast: estimates are not
more accurate."""


def sort_by_rank(found: Sequence[MeshPlan]) -> list[MeshPlan]:
    """Sorts shapes by their `ranks`, then by `seq`, then by the estimate. Refused ones are last."""
    number = compute_ranks(found)

    def key(shape: MeshPlan) -> tuple[float | int, int, float]:
        plan = shape.plan
        time = 0.0 if plan is None else plan.step_s_estimate or plan.device_gib
        return number.get(id(shape), math.inf), shape.mesh[axes.SEQ], time

    return sorted(
        found,
        key=lambda shape: (shape.plan is None, not (shape.plan and shape.plan.fits), key(shape)),
    )


def compute_ranks(found: Sequence[MeshPlan]) -> dict[int, int]:
    """Rank of each shape that fits, from 1, by its id; those within SAME_TIME of the fastest of a rank share it."""
    there = [
        (plan.step_s_estimate or plan.device_gib, shape)
        for shape in found
        if (plan := shape.plan) and plan.fits
    ]
    numbers: dict[int, int] = {}
    rank, fastest = 0, 0.0
    for time, shape in sorted(there, key=lambda pair: pair[0]):
        if not rank or time > SAME_TIME_FACTOR * fastest:
            rank, fastest = rank + 1, time
        numbers[id(shape)] = rank
    return numbers
