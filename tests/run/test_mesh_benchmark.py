"""All meshes of this machine's devices are timed and must have the same losses."""

import json
import re
import types

import pytest

from jaxsp import benchmark
from jaxsp.attention import ScoreConfig
from jaxsp.config import config_file
from jaxsp.run import mesh_benchmark
from jaxsp.run.benchmark import BenchmarkResult
from tests import messages

MESHES = [
    {"replica": 1, "data": 1, "seq": 2},
    {"replica": 1, "data": 2, "seq": 1},
    {"replica": 2, "data": 1, "seq": 1},
]

OVERRIDES = (
    "model.config.num_hidden_layers=1",
    "model.config.intermediate_size=64",
    'data.train.0.source="{stdlib}/a*.py"',
    "data.row_tokens=256",
    "mesh.virtual_cpu_devices=2",
)

MODEL = types.SimpleNamespace(
    num_heads=4, num_kv_heads=2, head_dim=16, layer_scores=[ScoreConfig()]
)


def result(**changes):
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


def benchmarks(monkeypatch, *outcomes):
    """Benchmarks of three meshes with these results, or reasons why they cannot run."""
    waiting = iter(outcomes)

    def run_process(path, overrides, *, num_steps):
        outcome = next(waiting)
        return (None, outcome) if isinstance(outcome, str) else (outcome, "")

    monkeypatch.setattr(mesh_benchmark, "_run_process", run_process)
    overrides = ["attention.strategy=ulysses", "mesh.virtual_cpu_devices=2"]
    return mesh_benchmark.benchmark_meshes(
        "configs/quickstart.yaml", overrides, num_steps=2, model=MODEL, print_line=lambda line: None
    )


def test_each_strategy_is_requested_with_fields_of_the_config(monkeypatch):
    requested = []

    def run_process(path, overrides, *, num_steps):
        requested.append(config_file.load(path, list(overrides)).attention)
        return result(), ""

    monkeypatch.setattr(mesh_benchmark, "_run_process", run_process)
    overrides = ["attention.kv_heads_per_gather=1", "mesh.virtual_cpu_devices=4"]
    mesh_benchmark.benchmark_meshes(
        "configs/quickstart.yaml", overrides, num_steps=2, model=MODEL, print_line=lambda line: None
    )
    fields = ("strategy", "ulysses_degree", "kv_heads_per_gather")
    assert {tuple(getattr(attention, field) for field in fields) for attention in requested} == {
        ("auto", None, 1),
        ("ulysses", None, None),
        ("ring", 2, None),
        ("ring", 1, None),
        ("all_gather", 2, 1),
        ("all_gather", 1, 1),
    }


def test_a_different_loss_is_an_internal_error_that_names_the_mesh(monkeypatch):
    results = benchmarks(
        monkeypatch, result(), result(losses=[5.0, 4.0004, 3.0], mesh=MESHES[1]), result()
    )
    expected = (
        1,
        3,
        "replica 1 x data 2 x seq 1",
        "4.0004",
        "step 2",
        4,
        "replica 1 x data 1 x seq 2",
    )
    with pytest.raises(RuntimeError, match=messages.containing(*expected)):
        mesh_benchmark.check_losses(results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requested", "strategies"),
    [
        ("ulysses", ["ulysses"]),
        pytest.param("auto", ["all_gather", "ring", "ulysses"], marks=pytest.mark.slow),
    ],
)
def test_all_meshes_have_the_same_losses(tmp_path, capsys, monkeypatch, requested, strategies):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    written = tmp_path / "meshes.json"
    command = ["configs/quickstart.yaml", *OVERRIDES, f"attention.strategy={requested}"]
    benchmark.main([*command, "--all-meshes", "--steps", "2", "--json", str(written)])
    results = json.loads(written.read_text())["meshes"]
    ran = sorted(
        (mesh["mesh"]["replica"], mesh["mesh"]["data"], mesh["attention_fields"].get("strategy"))
        for mesh in results
    )
    assert ran == [*((1, 1, strategy) for strategy in strategies), (1, 2, None), (2, 1, None)]
    assert all(mesh["result"]["mesh"] == mesh["mesh"] for mesh in results)
    assert all(len(mesh["result"]["losses"]) == 3 and mesh["loss_error"] < 1e-5 for mesh in results)
    assert len({tuple(mesh["result"]["num_loss_tokens"]) for mesh in results}) == 1
    printed = capsys.readouterr().out
    verdict = printed.splitlines()[-1]
    assert re.search(messages.containing(len(strategies) + 2), verdict)
