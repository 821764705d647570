"""Plans of all meshes of some devices."""

import math
import types

import pytest

from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.selection import choose_strategy, list_options
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config
from jaxsp.planning import absent, planner, searches
from tests.planning import example_plans, programs

MESH = {"replica": 1, "data": 1, "seq": 8}


def test_a_mesh_replaces_an_automatic_number_of_devices():
    model = model_config.parse_model_config(programs.LLAMA)
    expected = searches.list_combinations(
        programs.settings("data.row_tokens=16384").step, model, num_devices=4
    )
    words = ["mesh.data=-1", "mesh.seq=auto", "batch.rows_per_microbatch=auto"]
    config = programs.settings("data.row_tokens=16384", *words).step
    assert searches.list_combinations(config, model, num_devices=4) == expected


def test_every_mesh_is_listed_once():
    listed = [tuple(mesh.values()) for mesh in searches.list_meshes(8)]
    expected = {
        (r, d, s)
        for r in (1, 2, 4, 8)
        for d in (1, 2, 4, 8)
        for s in (1, 2, 4, 8)
        if r * d * s == 8
    }
    assert len(listed) == len(expected) == 10
    assert set(listed) == expected
    assert all(math.prod(mesh.values()) == 12 for mesh in searches.list_meshes(12))


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
    mesh_plans = searches.plan_meshes(
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


def test_each_mesh_has_its_own_automatic_number_of_rows_per_microbatch(monkeypatch):
    planned = []

    def resolve_config(config, *, model, cluster):
        assert config.rows_per_microbatch == "auto"
        return config.change(rows_per_microbatch=10 * config.mesh.seq)

    def plan_step(config, *, model, cluster, document_tokens):
        planned.append((config.mesh.seq, config.rows_per_microbatch))
        return example_plans.make_plan()

    monkeypatch.setattr(planner, "plan_step", plan_step)
    monkeypatch.setattr(planner, "resolve_config", resolve_config)
    words = ["attention.strategy=ring", "batch.rows_per_microbatch=auto"]
    searches.plan_meshes(
        programs.settings(*words).step,
        model=model_config.parse_model_config(programs.LLAMA),
        cluster=absent.make_cluster("h100-80gb", 2),
    )
    assert planned == [(2, 20), (1, 10), (1, 10)]


def test_a_config_that_no_mesh_can_use_is_an_error(monkeypatch):
    def refuse(config, **_):
        raise UserError("optimizer.name = x: no")

    monkeypatch.setattr(planner, "plan_step", refuse)
    with pytest.raises(UserError) as caught:
        searches.plan_meshes(
            programs.settings().step,
            model=model_config.parse_model_config(programs.LLAMA),
            cluster=absent.make_cluster("h100-80gb", 8),
        )
    assert caught.value.problems == ["optimizer.name = x: no"]


def list_labels(config, *, seq, num_heads):
    model = types.SimpleNamespace(
        num_heads=num_heads, num_kv_heads=4, head_dim=64, layer_scores=[ScoreConfig()]
    )
    config = config.change(mesh={"seq": seq})
    return list_options(config.attention, config.rows, model)


def test_each_strategy_has_only_the_fields_of_auto_that_it_uses():
    """A mesh that training accepts is not refused because of a field of another strategy."""
    config = programs.settings(
        "attention.kv_heads_per_gather=2",
        "attention.chunks_per_device=4",
        "mesh.seq=8",
    ).step
    model = types.SimpleNamespace(
        num_heads=32, num_kv_heads=8, head_dim=64, layer_scores=[ScoreConfig()]
    )
    options = list_options(config.attention, config.rows, model)
    assert [option.label for option in options] == [
        "ulysses",
        "ulysses 4 x ring",
        "ulysses 2 x ring",
        "ring",
        "ulysses 4 x all_gather",
        "ulysses 2 x all_gather",
        "all_gather",
    ]
    changed = [config.change(mesh=MESH, attention=option.config_fields) for option in options]
    chosen = [choose_strategy(each.attention, each.rows, model) for each in changed]
    assert [strategy.description for strategy in chosen] == [
        "Ulysses of 8",
        "Ulysses of 4 x ring of 2 (4 chunks each)",
        "Ulysses of 2 x ring of 4 (4 chunks each)",
        "ring of 8 (4 chunks each)",
        "Ulysses of 4 x all_gather of 2 by 2 (4 chunks each)",
        "Ulysses of 2 x all_gather of 4 by 2 (4 chunks each)",
        "all_gather of 8 by 2 (4 chunks each)",
    ]
