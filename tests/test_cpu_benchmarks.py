"""Benchmarks of scripts/bench that need no GPU: packing, tokenization, batches, checkpoints."""

import json

import datasets
import numpy as np
import pytest

from scripts.bench import batches, checkpoints, packing, polling, tokenization


def test_packers_are_compared_on_the_same_lengths(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(packing, "has_trl", lambda: False)
    out = tmp_path / "packing.json"
    options = "--documents 2000 --grain-documents 500 --harder-documents 300 --repeats 1".split()
    assert packing.main([*options, "--out", str(out)]) == 0
    actual = json.loads(out.read_text())
    names = {lengths.name for lengths in (packing.MANY, *packing.HARDER)}
    assert {case["lengths"] for case in actual["cases"]} == names
    ours = [case for case in actual["cases"] if case["packer"].startswith("jaxsp")]
    assert all(case["most"] <= int(case["packer"].split()[1]) for case in ours)
    assert all(case["bound"] <= case["rows"] for case in actual["cases"])
    assert all(0.5 < case["fullness"] <= 1 for case in actual["cases"])
    assert [case["documents"] for case in actual["cases"][:4]] == [2000, 2000, 500, 500]
    first, header, *_ = capsys.readouterr().out.splitlines()
    assert "trl" in first
    assert header == packing.HEADER
    assert not [case for case in actual["cases"] if "trl" in case["packer"]]


def test_the_bound_is_the_fewest_rows_for_small_cases():
    assert packing.min_rows(np.array([6, 6, 6]), 10, 9) == 3, "no two fit into a row"
    assert packing.min_rows(np.array([6, 6, 4, 4]), 10, 9) == 2
    assert packing.min_rows(np.array([6, 6, 5, 5]), 10, 9) == 3, "5 and 6 do not fit into a row"
    assert packing.min_rows(np.array([1, 1, 1, 1]), 10, 2) == 2, "at most two in a row"


@pytest.mark.e2e
def test_tokenization_is_compared_with_the_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    out = tmp_path / "tokenization.json"
    assert tokenization.main(["--megabytes", "0.05", "--runs", "2", "--out", str(out)]) == 0
    actual = json.loads(out.read_text())
    assert actual["command"].startswith("python -m scripts.bench.tokenization --megabytes 0.05")
    assert [case["format"] for case in actual["cases"]] == ["text", "messages"]
    for case in actual["cases"]:
        assert case["tokens"] > 1000
        assert len(case["ratios"]) == 2
        assert min(case["ratios"]) > 0
    assert capsys.readouterr().out.startswith("format text  documents ")


def test_batches_are_timed_over_a_whole_epoch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(batches, "ROW_TOKENS", 8192)
    out = tmp_path / "batches.json"
    assert batches.main(["--tokens", "500000", "--seconds", "0", "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    names = ["1 device", "2 x 4 devices", "dataset[i], plain", "dataset[i], numpy"]
    assert [case["name"].split(": ")[1] for case in cases[:4]] == names
    for case in (*cases[:2], *cases[4:6]):
        assert case["num_tokens"] >= 500_000
        assert len(case["anonymous_mib"]) == 3
    assert cases[0]["num_tokens"] == cases[1]["num_tokens"], "the epoch is the same on both meshes"
    assert capsys.readouterr().out.splitlines()[0] == batches.HEADER


@pytest.mark.slow
@pytest.mark.e2e
def test_checkpoints_are_timed_and_then_removed(tmp_path, monkeypatch, capsys):
    for name in ("HIDDEN_SIZE", "VOCAB_SIZE"):
        monkeypatch.setattr(checkpoints, name, 64)
    out = tmp_path / "checkpoints.json"
    options = ["--gigabytes", "0.001", "--saves", "2", "--folder", str(tmp_path)]
    assert checkpoints.main([*options, "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    names = ["save, which compiles", "save", "restore", "weights, as for export"]
    assert [case["name"] for case in cases] == names
    assert all(0 < case["blocked_s"] <= case["seconds"] for case in cases)
    assert cases[0]["num_bytes"] == cases[2]["num_bytes"]
    assert cases[0]["num_bytes"] == pytest.approx(3 * cases[3]["num_bytes"], rel=1e-3), (
        "weights, two moments and counts"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints.json"]
    assert capsys.readouterr().out.splitlines()[0] == checkpoints.HEADER


@pytest.mark.e2e
def test_processes_join_and_read(tmp_path, capsys):
    out = tmp_path / "polling.json"
    options = ["--processes", "3", "--seconds", "1", "--out", str(out)]
    assert polling.main(options) == 0
    paced, unpaced = json.loads(out.read_text())["cases"]
    assert 3 < paced["reads_per_s"] < 9, "three processes read every half second"
    assert unpaced["reads_per_s"] > 100
    assert capsys.readouterr().out.splitlines()[0] == polling.HEADER
