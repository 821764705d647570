"""All meshes that so many devices can make, and what a config's step takes on each."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxsp.core import axes, config, errors
from jaxsp.model.config import ModelConfig
from jaxsp.planner import compiled, plans


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A mesh, and what came of it."""

    mesh: dict[str, int]
    plan: plans.Plan | None
    """None where it was not planned, or refused."""
    why: str
    """Why not; empty otherwise."""


def meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Every replica x data x seq of so many devices, the most that share a row first."""
    for seq in range(num_devices, 0, -1):
        for data in range(num_devices // seq, 0, -1):
            if num_devices % (seq * data) == 0:
                yield {axes.REPLICA: num_devices // (seq * data), axes.DATA: data, axes.SEQ: seq}


def on(settings: config.Config, mesh: dict[str, int]) -> config.Config:
    """The config with another mesh."""
    changes: dict[str, Any] = dict(mesh)
    return settings.model_copy(update={"mesh": settings.mesh.model_copy(update=changes)})


def planned(
    settings: config.Config,
    *,
    model: ModelConfig,
    site: compiled.Site,
    document_tokens: int | None = None,
    say: Callable[[Shape], None] = lambda _: None,
) -> list[Shape]:
    """A config's step on every mesh of a site's devices, those that fit first, the fastest by estimate first.

    Args:   say: is told of each as it is planned.
    """
    found = []
    for mesh in meshes(site.num_devices):
        try:
            plan = plans.of(on(settings, mesh), model=model, site=site, document_tokens=document_tokens)
            shape = Shape(mesh=mesh, plan=plan, why="")
        except errors.UserError as error:
            shape = Shape(mesh=mesh, plan=None, why=str(error).splitlines()[0])
        found.append(shape)
        say(shape)
    return sorted(found, key=_rank)


def _rank(shape: Shape) -> tuple[bool, bool, float]:
    plan = shape.plan
    if plan is None:
        return True, True, 0.0
    return False, not plan.fits, plan.step_s_estimate or plan.device_gib
