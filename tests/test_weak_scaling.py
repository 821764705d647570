"""scripts/bench/weak_scaling.py makes a config for each case, and its results are drawn."""

import json

import pytest

from scripts.bench import machine, weak_scaling, weak_scaling_plot

RESULTS = machine.REPO / "scripts/bench/results/2026-11-24-weak-scaling-plan.json"


def test_each_device_has_the_same_tokens_in_every_case():
    for case in weak_scaling.list_cases(weak_scaling.SERIES, weak_scaling.DEVICES):
        config = weak_scaling.make_config(case)
        mesh = config.mesh
        assert mesh.replica * mesh.data * mesh.seq == case.num_devices
        tokens = config.batch.rows_per_step * config.data.max_row_tokens
        assert tokens == case.num_devices * weak_scaling.TOKENS_PER_DEVICE
        documents = config.data.max_row_tokens / weak_scaling.document_tokens(case)
        assert config.data.max_segments_per_row == documents


def test_published_memory_is_flat_and_bytes_are_those_of_the_formula():
    cases = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]
    assert {case["num_devices"] for case in cases} == set(weak_scaling.DEVICES)
    assert all(case["ratio"] == pytest.approx(1, abs=1e-6) for case in cases)
    replicas = [case["device_gib"] for case in cases if case["series"] == "groups"]
    assert max(replicas) < 1.001 * min(replicas)
    hybrids = [
        case["device_gib"] - case["state_gib"]
        for case in cases
        if case["series"] == "document" and case["num_devices"] > 32
    ]
    assert max(hybrids) < 1.01 * min(hybrids)


def test_results_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "figure.png"
    weak_scaling_plot.main([str(RESULTS), str(file)])
    assert file.stat().st_size > 10_000
