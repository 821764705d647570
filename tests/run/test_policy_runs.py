"""A run on trajectories in files: it resumes bit for bit, and evaluates and plans its objective."""

import datasets
import numpy as np
import pytest

from tests import batches, commands, messages, small_runs

pytestmark = pytest.mark.e2e

METRICS = (*commands.COUNTS, "loss", "grad_norm", "num_trajectories", "ratio", "entropy")


def make_fields(folder, name, **sections):
    source = {"source": str(folder / "train.jsonl"), "format": "trajectories"}
    other = {"source": str(folder / "eval.jsonl"), "format": "trajectories", "name": "other"}
    own = {
        "run": {"directory": str(folder / name), "steps": 4, "save_every": 2, "eval_every": 4},
        "model": {"config": batches.SMALL_LLAMA},
        "mesh": {"seq": 2},
        "data": {"train": [source], "eval": [other]},
        "batch": {"rows_per_step": 2},
        "objective": {"type": "policy", "loss_type": "grpo"},
    }
    fields = small_runs.make_fields(folder, **own)
    return fields | {name: fields.get(name, {}) | more for name, more in sections.items()}


def test_a_run_resumes_bit_for_bit_and_evaluates_its_objective(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    commands.write_trajectories(tmp_path / "train.jsonl", num_records=20)
    commands.write_trajectories(tmp_path / "eval.jsonl", num_records=5)
    fields = make_fields(tmp_path, "whole", objective=SEQUENCE)
    small_runs.train(fields)
    lines = commands.read_lines(tmp_path / "whole/metrics.jsonl")
    checkpoint = {"resume": str(tmp_path / "whole/checkpoints/2")}
    small_runs.train(make_fields(tmp_path, "resumed", objective=SEQUENCE, run=checkpoint))
    again = commands.read_lines(tmp_path / "resumed/metrics.jsonl")
    assert [line["step"] for line in again] == [3, 4]
    for line, right in zip(again, lines[2:], strict=True):
        assert {name: line[name] for name in METRICS} == {name: right[name] for name in METRICS}
    (line,) = commands.read_lines(tmp_path / "whole/eval.jsonl")
    assert (line["num_documents"], line["num_trajectories"]) == (5, 5)
    assert np.isclose(line["perplexity"], np.exp(line["cross_entropy"]))
    assert line["loss"] != line["cross_entropy"]
    assert "grpo" in messages.read_banner(tmp_path / "whole")


SEQUENCE = {"type": "policy", "loss_type": "grpo", "importance_sampling_level": "sequence"}
