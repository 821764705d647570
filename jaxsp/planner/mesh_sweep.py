"""All meshes that so many devices can make, and what a config's step takes on each."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxsp.attention import strategies
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
    attention_fields: dict[str, Any]
    """Fields of the config's attention by which its groups share it."""
    plan: Plan | None
    """None where it was not planned, or refused."""
    problem: str
    """Why not; empty otherwise."""


def describe_strategy(kind: dict[str, Any]) -> str:
    """A kind in a word or two, such as `hybrid 4`, or `hybrid 4 gather`."""
    words = [
        kind.get("strategy"),
        kind.get("ulysses_degree"),
        "all_gather"
        * (kind.get("outer_strategy") == "all_gather" and kind["strategy"] == "hybrid"),
    ]
    return " ".join(str(word) for word in words if word) or "none shared"


def list_meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Every replica x data x seq of so many devices, the most that share a row first."""
    for seq in range(num_devices, 0, -1):
        for data in range(num_devices // seq, 0, -1):
            if num_devices % (seq * data) == 0:
                yield {axes.REPLICA: num_devices // (seq * data), axes.DATA: data, axes.SEQ: seq}


def list_strategies(config: Config, *, seq: int, num_heads: int) -> list[dict[str, Any]]:
    """The ways for groups of so many devices to share attention: where the config leaves it to us, all there are.

    Of what it says of `auto`, each has that which is of this kind.
    """
    asked = config.attention
    if seq == 1:
        return [{}]
    if asked.strategy != "auto":
        return [{"strategy": asked.strategy}]
    inner = [
        n for n in strategies.legal_ulysses_degrees(seq=seq, num_heads=num_heads) if 1 < n < seq
    ]
    none = {"ulysses_degree": None, "outer_strategy": "ring", "kv_heads_per_gather": None}
    gathered = {"outer_strategy": "all_gather", "kv_heads_per_gather": asked.kv_heads_per_gather}
    between = gathered if asked.outer_strategy == "all_gather" else {}
    return [
        *[{"strategy": "ulysses"} | none] * (num_heads % seq == 0),
        *({"strategy": "hybrid"} | none | {"ulysses_degree": n} | between for n in inner),
        {"strategy": "ring"} | none,
        {"strategy": "all_gather"} | none | gathered,
    ]


def with_mesh(config: Config, mesh: dict[str, int], kind: dict[str, Any]) -> Config:
    """The config with another mesh and kind of attention."""
    changes: dict[str, Any] = dict(mesh)
    return config.model_copy(
        update={
            "mesh": config.mesh.model_copy(update=changes),
            "attention": config.attention.model_copy(update=kind),
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
    for mesh, kind in list_combinations(
        config, num_devices=cluster.num_devices, num_heads=model.num_heads
    ):
        try:
            plan = planning.plan_step(
                with_mesh(config, mesh, kind),
                model=model,
                cluster=cluster,
                document_tokens=document_tokens,
            )
            shape = MeshPlan(mesh=mesh, attention_fields=kind, plan=plan, problem="")
        except UserError as error:
            shape = MeshPlan(
                mesh=mesh, attention_fields=kind, plan=None, problem=str(error).splitlines()[0]
            )
        found.append(shape)
        on_result(shape)
    return sort_by_rank(found)


def list_combinations(
    config: Config, *, num_devices: int, num_heads: int
) -> list[tuple[dict[str, int], dict[str, Any]]]:
    """Every mesh of so many devices with each of its kinds."""
    return [
        (mesh, kind)
        for mesh in list_meshes(num_devices)
        for kind in list_strategies(config, seq=mesh[axes.SEQ], num_heads=num_heads)
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
