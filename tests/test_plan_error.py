"""scripts/bench/plan_error.py compares plans with measurements, here made up."""

import json
import re

import pytest

from jaxsp.core.errors import UserError
from jaxsp.planner import planning
from jaxsp.training import memory_causes
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


def test_the_implied_allowance_is_the_peak_without_the_rest_of_the_plan():
    error = plan_error.compare(measured(peak_gib=29.0, step_s=4.0), make_plan())
    assert error.ratio == pytest.approx(30 / 29)
    assert (error.allowance_gib, error.implied_gib) == (2.0, 1.0)
    assert error.ratio_s == pytest.approx(5.0 / 4.0)
    line = plan_error.format_error(error)
    assert re.search(messages.containing("30.00", "29.00", "1.034", "2.00", "1.00"), line)
    ratios = messages.containing("1.034", "1.034", "10 %", "1.25", "1.25")
    assert re.search(ratios, plan_error.summarize([error]))
    assert "NOT" not in plan_error.summarize([error])


def test_a_summary_reports_large_errors_and_cases_without_a_peak():
    far = plan_error.compare(measured(peak_gib=40.0), make_plan())
    full = plan_error.compare(measured(report.OUT_OF_MEMORY, message="no room"), make_plan())
    assert re.search(
        messages.containing(report.OUT_OF_MEMORY, "no room"), plan_error.format_error(full)
    )
    ratios = ("0.750", "0.750", "NOT", "10 %")
    assert re.search(messages.containing(*ratios), plan_error.summarize([far]))
    assert re.search(messages.containing(*ratios, 1, 2), plan_error.summarize([far, full]))
    assert not re.search(r"\d", plan_error.summarize([full])), "there is no ratio"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command on records of an H200. Returns: exit code and file."""
    monkeypatch.setattr(configs, "prepare_to_plan", lambda: None)

    def run_command(*records, device="NVIDIA H200", plan=lambda case, gpu: make_plan(), words=()):
        monkeypatch.setattr(plan_error, "make_plan", plan)
        results = tmp_path / "measured.json"
        out = tmp_path / "errors.json"
        results.write_text(json.dumps({"device": device, "cases": records}))
        code = plan_error.main([str(results), "--out", str(out), *words])
        return code, json.loads(out.read_text()) if out.exists() else None

    return run_command


def test_each_measured_case_is_planned_for_the_gpu_of_the_file(run):
    planned = []

    def plan(case, gpu):
        planned.append((case, gpu))
        return make_plan()

    full = measured(report.OUT_OF_MEMORY)
    code, actual = run(measured(peak_gib=29.0), full, measured(report.NOT_RUN), plan=plan)
    assert planned == [(CASE, "h200-141gb")] * 2
    assert code == 0
    assert [case["peak_gib"] for case in actual["cases"]] == [29.0, None]
    assert re.search(messages.containing("1.034", "1.034", "10 %"), actual["summary"])


def test_a_large_error_or_a_missing_plan_fails_the_command(run, capsys):
    assert run(measured(peak_gib=40.0))[0] == 1
    assert run(measured(report.OUT_OF_MEMORY))[0] == 1, "nothing was compared"
    assert run(measured(peak_gib=29.0), words=["--seconds", "-1"])[0] == 1
    assert re.search(messages.containing("tiny 1,024 packed", "time"), capsys.readouterr().out)

    def plan(case, gpu):
        if case.documents == "one":
            raise UserError("no such attention")
        return make_plan()

    other = measured(peak_gib=29.0) | {"documents": "one"}
    code, actual = run(measured(peak_gib=29.0), other, plan=plan)
    assert (code, len(actual["cases"])) == (1, 1)
    expected = messages.containing("tiny 1,024 one", "no such attention")
    assert re.search(expected, capsys.readouterr().out)


def test_an_unknown_device_is_refused(run, capsys):
    assert run(measured(), device="cpu") == (2, None)
    assert re.search(messages.containing("cpu", "H100"), capsys.readouterr().err)


@pytest.mark.slow
def test_a_case_is_make_plan():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    plan = plan_error.make_plan(CASE, "h200-141gb")
    assert (plan.device_type, plan.num_devices, plan.document_tokens) == ("h200-141gb", 1, 64)
