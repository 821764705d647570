"""Plans of all meshes of some devices."""

import math

from jaxsp.core.errors import UserError
from jaxsp.hf import model_config
from jaxsp.planning import absent, meshes, planner
from tests.planning import example_plans, programs

MESH = {"replica": 1, "data": 1, "seq": 8}


def test_a_mesh_replaces_an_automatic_number_of_devices():
    model = model_config.parse_model_config(programs.LLAMA)
    expected = meshes.list_combinations(
        programs.settings("data.row_tokens=16384").step, model, num_devices=4
    )
    words = ["mesh.data=-1", "mesh.seq=auto", "batch.rows_per_microbatch=auto"]
    config = programs.settings("data.row_tokens=16384", *words).step
    assert meshes.list_combinations(config, model, num_devices=4) == expected


def test_every_mesh_is_listed_once():
    listed = [tuple(mesh.values()) for mesh in meshes.list_meshes(8)]
    expected = {
        (r, d, s)
        for r in (1, 2, 4, 8)
        for d in (1, 2, 4, 8)
        for s in (1, 2, 4, 8)
        if r * d * s == 8
    }
    assert len(listed) == len(expected) == 10
    assert set(listed) == expected
    assert all(math.prod(mesh.values()) == 12 for mesh in meshes.list_meshes(12))


def test_meshes_that_fit_come_first_the_fastest_first(monkeypatch):
    """A seq of 8 is refused, 4 does not fit, 2 is slow."""
    reported = []
    tried = []

    def plan_step(config, *, model, cluster, document_tokens):
        seq = config.mesh.seq
        tried.append((seq, config.attention.strategy, config.attention.ulysses_degree))
        if seq == 8:
            raise UserError(["too many", "and more"])
        return example_plans.make_plan(
            mesh={"replica": 1, "data": config.mesh.data, "seq": seq},
            fits=seq != 4,
            step_s_estimate={1: 1.0, 2: 3.0, 4: 0.5}[seq],
        )

    monkeypatch.setattr(planner, "plan_step", plan_step)
    mesh_plans = meshes.plan_meshes(
        programs.settings().step,
        model=model_config.parse_model_config(programs.LLAMA),
        cluster=absent.make_cluster("h100-80gb", 8),
        on_result=reported.append,
    )
    num_strategies = {1: 1, 2: 3, 4: 5, 8: 7}
    num_meshes = {1: 4, 2: 3, 4: 2, 8: 1}
    assert (
        len(reported)
        == len(mesh_plans)
        == sum(num_meshes[seq] * num_strategies[seq] for seq in num_meshes)
    )
    seqs = [mesh_plan.mesh["seq"] for mesh_plan in mesh_plans]
    assert seqs == [1] * 4 + [2] * 9 + [4] * 10 + [8] * 7
    assert [attention for seq, *attention in tried if seq == 8] == [
        ["ulysses", None],
        ["ring", 4],
        ["ring", 2],
        ["ring", 1],
        ["all_gather", 4],
        ["all_gather", 2],
        ["all_gather", 1],
    ]
    assert mesh_plans[-1].plan is None
    assert mesh_plans[-1].problem == "too many"
