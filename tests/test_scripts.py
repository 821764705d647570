"""Scripts without a GPU: every one can be imported, and those that make published tables work."""

import importlib
import json
import pathlib
import re

import numpy as np
import pytest

from jaxsp.planner.compile import gpus
from scripts.bench import configs, memory, packing, published_runs
from tests.planner import example_plans

REPO = pathlib.Path(__file__).parent.parent

NAMES = [
    ".".join(file.relative_to(REPO).with_suffix("").parts) for file in REPO.glob("scripts/**/*.py")
]

PLAN = example_plans.make_plan(step_s_estimate=5.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_script_can_be_imported(name):
    importlib.import_module(name)


@pytest.mark.parametrize(
    ("options", "num_devices"),
    [(options, num_devices) for options in memory.OPTIONS for num_devices in memory.TOKENS][::5],
)
def test_the_mesh_of_a_case_of_the_memory_table_has_its_devices(options, num_devices):
    case = memory.Case(options=options, num_devices=num_devices, row_tokens=131072, max_segments=64)
    config = memory.make_config(case)
    assert config.mesh.data * config.mesh.seq == num_devices
    assert config.batch.rows_per_step == config.mesh.data


def test_the_memory_table_has_fields_of_its_plans(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "prepare_to_plan", lambda: None)
    monkeypatch.setattr(configs, "plan_config", lambda config, **arguments: PLAN)
    out = tmp_path / "memory.json"
    words = ["--options", "none", "remat full", "--devices", "1", "--tokens", "8192"]
    assert memory.main([*words, "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert [(case["options"], case["device_gib"]) for case in cases] == [
        ("none", PLAN.device_gib),
        ("remat full", PLAN.device_gib),
    ]


@pytest.mark.parametrize("run", published_runs.RUNS, ids=lambda run: run.name)
def test_a_published_run_names_its_source_and_fills_its_mesh(run):
    assert re.fullmatch(r"https://(github\.com/[^/]+/[^/]+/\S+|arxiv\.org/abs/\S+)", run.source)
    assert run.device in gpus.GPUS
    assert run.data * run.seq == run.num_devices
    assert run.rows_per_step % (run.data * run.rows_per_microbatch) == 0


def test_published_times_are_compared_with_estimates(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(configs, "prepare_to_plan", lambda: None)
    monkeypatch.setattr(configs, "plan_config", lambda config, **arguments: PLAN)
    out = tmp_path / "runs.json"
    assert published_runs.main(["--out", str(out)]) == 0
    first, *others = json.loads(out.read_text())["cases"]
    assert first["measured_over_estimate"] == [364 / 5, 373 / 5, 380 / 5]
    assert len(others) == len(published_runs.RUNS) - 1
    assert "72.8 to 76 times the estimate" in capsys.readouterr().out


def test_packers_are_compared_on_the_same_lengths(tmp_path, monkeypatch):
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


def test_the_bound_is_the_fewest_rows_for_small_cases():
    assert packing.min_rows(np.array([6, 6, 6]), 10, 9) == 3, "no two fit into a row"
    assert packing.min_rows(np.array([6, 6, 4, 4]), 10, 9) == 2
    assert packing.min_rows(np.array([6, 6, 5, 5]), 10, 9) == 3, "5 and 6 do not fit into a row"
    assert packing.min_rows(np.array([1, 1, 1, 1]), 10, 2) == 2, "at most two in a row"
