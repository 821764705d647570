"""All meshes of so many devices."""

import math

from jaxsp import attention
from jaxsp.core.errors import UserError
from jaxsp.hf import families
from jaxsp.planner import mesh_sweep, planning
from jaxsp.planner.compile import compiled
from jaxsp.planner.mesh_sweep import MeshPlan
from tests.planner import made, programs

MESH = {"replica": 1, "data": 1, "seq": 8}


def test_every_mesh_is_there_once():
    found = [tuple(mesh.values()) for mesh in mesh_sweep.list_meshes(8)]
    expected = {
        (r, d, s)
        for r in (1, 2, 4, 8)
        for d in (1, 2, 4, 8)
        for s in (1, 2, 4, 8)
        if r * d * s == 8
    }
    assert len(found) == len(expected) == 10
    assert set(found) == expected
    assert all(math.prod(mesh.values()) == 12 for mesh in mesh_sweep.list_meshes(12))


def test_those_that_fit_come_first_and_the_fastest_of_them_first(monkeypatch):
    """By their seq: 8 is refused, 4 does not fit, 2 is slow."""

    def of(config, *, model, cluster, document_tokens):
        seq, data = config.mesh.seq, config.mesh.data
        tried.append((seq, config.attention.strategy, config.attention.ulysses_degree))
        if seq == 8:
            raise UserError("too many\nand more")
        return made.plan(
            mesh={"replica": 1, "data": data, "seq": seq},
            fits=seq != 4,
            step_s_estimate={1: 1.0, 2: 3.0, 4: 0.5}[seq],
        )

    monkeypatch.setattr(planning, "plan_step", of)
    told, tried = [], []
    site = compiled.make_cluster("h100-80gb", 8)
    found = mesh_sweep.plan_meshes(
        programs.settings(),
        model=families.parse_model_config(programs.LLAMA, field="model.config"),
        cluster=site,
        on_result=told.append,
    )
    kinds = {1: 1, 2: 3, 4: 4, 8: 5}
    assert (
        len(told)
        == len(found)
        == sum(of_mesh * kinds[seq] for seq, of_mesh in {1: 4, 2: 3, 4: 2, 8: 1}.items())
    )
    seqs = [one.mesh["seq"] for one in found]
    assert seqs == [1] * 4 + [2] * 9 + [4] * 8 + [8] * 5
    assert [one[1:] for one in tried if one[0] == 8] == [
        ("ulysses", None),
        ("hybrid", 4),
        ("hybrid", 2),
        ("ring", None),
        ("all_gather", None),
    ]
    assert found[-1].plan is None
    assert found[-1].problem == "too many"


def test_times_within_5_percent_share_a_rank_and_the_smallest_seq_is_first():
    def shape(seq, seconds, **changes):
        mesh = {"replica": 1, "data": 8 // seq, "seq": seq}
        plan = None if seconds is None else made.plan(mesh=mesh, step_s_estimate=seconds, **changes)
        return MeshPlan(mesh=mesh, attention_fields={}, plan=plan, problem="" if plan else "no")

    fitting = [
        shape(2, 1.04),
        shape(4, 1.049),
        shape(8, 1.0),
        shape(2, 1.06),
        shape(8, 1.07),
        shape(1, 1.12),
    ]
    others = [shape(1, 0.5, fits=False), shape(1, None)]
    found = mesh_sweep.sort_by_rank([*others, *reversed(fitting)])
    assert found == fitting + others
    ranks = mesh_sweep.compute_ranks(found)
    # the second rank is from 1.06 to 1.113
    assert [ranks.get(id(one)) for one in found] == [1, 1, 1, 2, 2, 3, None, None]


def test_a_kind_that_is_asked_for_is_the_only_one_and_heads_that_do_not_divide_leave_ulysses_out():
    asked = programs.settings("attention.strategy=ring")
    assert mesh_sweep.list_strategies(asked, seq=8, num_heads=32) == [{"strategy": "ring"}]
    assert [
        mesh_sweep.describe_strategy(kind)
        for kind in mesh_sweep.list_strategies(asked, seq=1, num_heads=32)
    ] == ["none shared"]
    kinds = mesh_sweep.list_strategies(programs.settings(), seq=8, num_heads=28)
    assert [mesh_sweep.describe_strategy(kind) for kind in kinds] == [
        "hybrid 4",
        "hybrid 2",
        "ring",
        "all_gather",
    ]


def test_of_what_is_asked_of_auto_each_kind_has_what_it_can():
    """A mesh that training would take is not refused for a field of another kind."""
    asked = programs.settings(
        "attention.outer_strategy=all_gather", "attention.kv_heads_per_gather=2"
    )
    found = mesh_sweep.list_strategies(asked, seq=8, num_heads=32)
    assert [mesh_sweep.describe_strategy(kind) for kind in found] == [
        "ulysses",
        "hybrid 4 all_gather",
        "hybrid 2 all_gather",
        "ring",
        "all_gather",
    ]
    chosen = [
        attention.choose_strategy(
            mesh_sweep.with_mesh(asked, MESH, kind),
            window=None,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
        )
        for kind in found
    ]
    assert [
        (one.ulysses_degree, one.outer_strategy, one.kv_heads_per_gather) for one in chosen
    ] == [
        (8, "ring", 1),
        (4, "all_gather", 2),
        (2, "all_gather", 2),
        (1, "ring", 1),
        (1, "all_gather", 2),
    ]
