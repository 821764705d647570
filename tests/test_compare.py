"""Meshes of the devices that are here, run and compared."""

import json
import re

import pytest

from jaxsp import compare, plan
from jaxsp.config import config_file
from jaxsp.core.errors import UserError
from jaxsp.measure import BenchmarkResult
from tests import messages

MESHES = [
    {"replica": 1, "data": 1, "seq": 2},
    {"replica": 1, "data": 2, "seq": 1},
    {"replica": 2, "data": 1, "seq": 1},
]

WORDS = (
    "model.config.num_hidden_layers=1",
    "model.config.intermediate_size=64",
    'data.train.0.source="{stdlib}/a*.py"',
    "data.row_tokens=256",
    "mesh.virtual_cpu_devices=2",
)


def measured(**changes):
    fields = {
        "device_kind": "cpu",
        "num_devices": 2,
        "mesh": MESHES[0],
        "num_steps": 2,
        "losses": [5.0, 4.0, 3.0],
        "num_loss_tokens": [10, 11, 12],
        "step_s": 0.5,
        "tokens_per_s": 100.0,
        "peak_gib": None,
        "device_gib": 0.1,
        "host_gib": 0.0,
        "remat": "save_attention",
        "kernel": "blockwise",
        "step_s_estimate": None,
        "compile_s": 1.0,
    }
    return BenchmarkResult(**fields | changes)


def compared(monkeypatch, *outcomes):
    """What comes of meshes that are measured so, or not for such a reason."""
    waiting = iter(outcomes)

    def apart(path, words, *, num_steps):
        outcome = next(waiting)
        return (None, outcome) if isinstance(outcome, str) else (outcome, "")

    monkeypatch.setattr(compare, "_run_process", apart)
    monkeypatch.setattr(compare, "_count_devices", lambda config: 2)
    words = ["attention.strategy=ulysses"]
    return compare.benchmark_meshes(
        "configs/quickstart.yaml", words, num_steps=2, num_heads=4, print_line=lambda words: None
    )


def test_every_kind_is_asked_for_in_words_that_a_config_understands(monkeypatch):
    asked = []

    def apart(path, words, *, num_steps):
        asked.append(config_file.load(path, list(words)).attention)
        return measured(), ""

    monkeypatch.setattr(compare, "_run_process", apart)
    monkeypatch.setattr(compare, "_count_devices", lambda config: 4)
    words = ["attention.outer_strategy=all_gather", "attention.kv_heads_per_gather=1"]
    compare.benchmark_meshes(
        "configs/quickstart.yaml", words, num_steps=2, num_heads=4, print_line=lambda words: None
    )
    found = {
        (one.strategy, one.ulysses_degree, one.outer_strategy, one.kv_heads_per_gather)
        for one in asked
    }
    assert found == {
        ("auto", None, "all_gather", 1),
        ("ulysses", None, "ring", None),
        ("hybrid", 2, "all_gather", 1),
        ("ring", None, "ring", None),
        ("all_gather", None, "all_gather", 1),
    }


def test_the_fastest_comes_first_and_what_cannot_run_last_with_its_reason(monkeypatch):
    found = compared(monkeypatch, "cannot be", measured(step_s=2.0), measured(step_s=1.0))
    assert [one.mesh for one in found] == [MESHES[2], MESHES[1], MESHES[0]]
    compare.check_losses(found)
    lines = compare.format_table(found).splitlines()
    assert re.search(messages.holding("2 x cpu", 2), lines[0])
    assert lines[-2].split() == ["1", "1", "2", "ulysses", "cannot", "be"]
    assert re.search(messages.holding(2, "0.0e+00"), lines[-1])


def test_a_loss_that_differs_is_named_with_its_mesh_and_is_our_error(monkeypatch):
    found = compared(
        monkeypatch, measured(), measured(losses=[5.0, 4.0004, 3.0], mesh=MESHES[1]), measured()
    )
    assert re.search(messages.holding(1, 3), compare.format_table(found).splitlines()[-1])
    differs = ("replica 1 x data 2 x seq 1", "4.0004", "step 2", 4, "replica 1 x data 1 x seq 2")
    with pytest.raises(RuntimeError, match=messages.holding(*differs)):
        compare.check_losses(found)


def test_rounding_is_no_difference_and_a_count_always_is(monkeypatch):
    compare.check_losses(
        compared(monkeypatch, measured(), measured(losses=[5.0, 4.00003, 3.0]), "no")
    )
    found = compared(monkeypatch, measured(), measured(num_loss_tokens=[10, 11, 13]), "no")
    differs = ("num_loss_tokens", "[10, 11, 13]", "[10, 11, 12]")
    with pytest.raises(RuntimeError, match=messages.holding(*differs)):
        compare.check_losses(found)


def test_where_no_mesh_can_run_that_is_the_user_s_to_mend(monkeypatch):
    says = messages.holding(3, "replica 1 x data 1 x seq 2", "because")
    with pytest.raises(UserError, match=says):
        compared(monkeypatch, "because", "no", "no")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ("ulysses", ["ulysses"]),
        pytest.param("auto", ["all_gather", "ring", "ulysses"], marks=pytest.mark.slow),
    ],
)
def test_meshes_are_run_and_lose_nothing(tmp_path, capsys, monkeypatch, asked, kinds):
    """As a user asks for it: rows_per_step 2 goes on every mesh of two devices."""
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_backend_optimization_level=0"
    )  # it is compiled again and again
    written = tmp_path / "meshes.json"
    plan.main(
        [
            "configs/quickstart.yaml",
            *WORDS,
            f"attention.strategy={asked}",
            "--meshes",
            "--measure",
            "2",
            "--json",
            str(written),
        ]
    )
    found = json.loads(written.read_text())["meshes"]
    ran = sorted(
        (one["mesh"]["replica"], one["mesh"]["data"], one["attention_fields"].get("strategy"))
        for one in found
    )
    assert ran == [*((1, 1, kind) for kind in kinds), (1, 2, None), (2, 1, None)]
    assert all(one["result"]["mesh"] == one["mesh"] for one in found)
    assert all(len(one["result"]["losses"]) == 3 and one["loss_error"] < 1e-5 for one in found)
    assert len({tuple(one["result"]["num_loss_tokens"]) for one in found}) == 1
    said = capsys.readouterr().out
    *_, verdict, _written = said.splitlines()
    assert re.search(messages.holding(len(kinds) + 2), verdict)
