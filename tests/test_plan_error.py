"""scripts/bench/plan_error.py compares plans with measurements, here made up."""

import json
import re

from jaxsp.memory import memory_causes
from jaxsp.planner import planning
from scripts.bench import cases, configs, plan_error, report, step, timing
from tests import messages
from tests.planner import example_plans

CASE = cases.Case(shape="tiny", row_tokens=1024, documents="packed", kernel="auto", steps=1)


def make_plan():
    sizes = {memory_causes.WEIGHTS: 28.0, memory_causes.WORKSPACE: 2.0, planning.RESERVED: 6.3}
    return example_plans.make_plan(device_gib=30.0, memory=sizes)


def measured(status=report.OK, **numbers):
    """The record of a measured case."""
    return timing.make_record(CASE, step.Result(status=status, **numbers))


def test_each_measured_case_is_planned_for_the_gpu_of_the_file(tmp_path, monkeypatch):
    planned = []

    def plan(case, gpu):
        planned.append((case, gpu))
        return make_plan()

    monkeypatch.setattr(configs, "prepare_to_plan", lambda: None)
    monkeypatch.setattr(plan_error, "make_plan", plan)
    results = tmp_path / "measured.json"
    out = tmp_path / "errors.json"
    records = [measured(peak_gib=29.0), measured(report.OUT_OF_MEMORY), measured(report.NOT_RUN)]
    results.write_text(json.dumps({"device": "NVIDIA H200", "cases": records}))
    assert plan_error.main([str(results), "--out", str(out)]) == 0
    actual = json.loads(out.read_text())
    assert planned == [(CASE, "h200-141gb")] * 2
    assert [case["peak_gib"] for case in actual["cases"]] == [29.0, None]
    assert re.search(messages.containing("1.034", "1.034", "10 %"), actual["summary"])
