"""scripts/bench/anchors.py compares plans, here made up, with published runs."""

import json
import re

import pytest

from jaxsp.planner.compile import gpus
from scripts.bench import anchors, configs, published_runs
from tests.planner import example_plans

PLAN = example_plans.make_plan(
    num_devices=8, step_s_estimate=5.0, tokens_per_s_estimate=16000 / 5.0
)


@pytest.mark.parametrize("run", published_runs.RUNS, ids=lambda run: run.name)
def test_a_run_names_its_source_and_fills_its_mesh(run):
    assert re.fullmatch(r"https://(github\.com/[^/]+/[^/]+/\S+|arxiv\.org/abs/\S+)", run.source)
    assert run.checked in (published_runs.READ, published_runs.SECOND_HAND)
    assert run.unit in (published_runs.SECONDS, published_runs.TOKENS_PER_S)
    assert run.kernel in (published_runs.CUDNN, published_runs.FLASH2)
    assert run.note
    assert run.device in gpus.GPUS
    assert run.data * run.seq == run.num_devices
    assert run.rows_per_step % (run.data * run.rows_per_microbatch) == 0


def test_the_command_writes_every_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(configs, "prepare_to_plan", lambda: None)
    monkeypatch.setattr(anchors, "make_plan", lambda run: PLAN)
    assert anchors.main(["--out", str(tmp_path / "anchors.json")]) == 0
    actual = json.loads((tmp_path / "anchors.json").read_text())
    names = [run.name for run in published_runs.RUNS]
    assert [run["name"] for run in actual["runs"]] == names
    assert [anchor["name"] for anchor in actual["cases"]] == names
    assert actual["summary"] in capsys.readouterr().out
