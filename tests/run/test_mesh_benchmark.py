"""All meshes of this machine's devices are timed and must have the same losses."""

import types

import pytest

from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.run import benchmark as run_benchmark
from jaxsp.run import config_file
from jaxsp.run.benchmark import BenchmarkResult
from tests import messages

MODEL = types.SimpleNamespace(
    num_heads=4, num_kv_heads=2, head_dim=16, layer_scores=[ScoreConfig()]
)


def result(**changes):
    fields = {
        "mesh": "a",
        "losses": [5.0, 4.0, 3.0],
        "num_loss_tokens": [10, 11, 12],
        "step_s": 0.5,
        "tokens_per_s": 100.0,
        "peak_gib": None,
        "device_gib": 0.1,
        "remat": "save_attention",
        "step_s_estimate": None,
    }
    return BenchmarkResult(**fields | changes)


def test_each_strategy_is_requested_with_fields_of_the_config(monkeypatch):
    requested = []

    def run_process(path, overrides, num_steps):
        requested.append(config_file.load(path, list(overrides)).attention)
        return result()

    monkeypatch.setattr(run_benchmark, "_run_process", run_process)
    overrides = ["attention.kv_heads_per_gather=1", "mesh.virtual_cpu_devices=4"]
    run_benchmark.benchmark_meshes(
        "configs/quickstart.yaml", overrides, 2, MODEL, lambda line: None
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


def test_a_different_loss_is_an_internal_error_that_names_the_meshes():
    results = {"a": result(), "b": result(losses=[5.0, 4.0004, 3.0]), "c": "does not fit"}
    expected = ("b", "[5.0, 4.0004, 3.0]", "a", "[5.0, 4.0, 3.0]")
    with pytest.raises(RuntimeError, match=messages.containing(*expected)):
        run_benchmark.check_losses(results, dtype="float32")
    run_benchmark.check_losses(results, dtype="bfloat16")
