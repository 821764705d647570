"""scripts/bench/plan_error.py: a plan beside what a GPU measured, which here nobody did."""

import pytest

from jaxsp.core import jobs
from jaxsp.planner import budget
from scripts.bench import plan_error, report, step
from tests.planner import made

CASE = plan_error.CASES[0]


def planned():
    return made.plan(device_gib=30.0, memory={budget.WEIGHTS: 28.0, budget.WORKSPACE: 2.0, budget.RESERVED: 6.3})


def test_the_allowance_that_would_have_been_right_is_what_the_peak_leaves_over():
    error = plan_error.compared(CASE, planned(), step.Result(status=report.OK, peak_gib=29.0, step_s=4.0))
    assert error.ratio == pytest.approx(30 / 29)
    assert (error.allowance_gib, error.implied_gib) == (2.0, 1.0)
    assert error.ratio_s == pytest.approx(5.0 / 4.0)
    assert "30.00 GiB, measured  29.00: 1.034; cuDNN's allowance 2.00, implied 1.00" in plan_error.line(error)
    assert plan_error.summary([error]) == "planned over measured peak 1.034 to 1.034: within 10 %"


def test_a_plan_that_is_far_off_and_a_case_that_failed_are_said():
    far = plan_error.compared(CASE, planned(), step.Result(status=report.OK, peak_gib=40.0))
    failed = plan_error.compared(CASE, planned(), step.Result(status=report.OUT_OF_MEMORY, message="no room"))
    assert "not measured: out of memory: no room" in plan_error.line(failed)
    assert plan_error.summary([far]) == "planned over measured peak 0.750 to 0.750: NOT within 10 %"
    assert plan_error.summary([far, failed]).endswith("NOT within 10 %; 1 of 2 cases failed")
    assert plan_error.summary([failed]) == "nothing was measured"


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(jobs, "num_gpus", lambda environ: 0)
    assert plan_error.main([]) == 2
    assert "There is no NVIDIA GPU here" in capsys.readouterr().err


@pytest.mark.slow
def test_a_case_is_planned_for_the_gpu_that_is_here():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    tiny = step.Case(shape="tiny", row_tokens=1024, documents="packed", kernel="auto", steps=1)
    plan = plan_error.planned(tiny, "h200-141gb")
    assert (plan.device, plan.num_devices, plan.document_tokens) == ("h200-141gb", 1, 64)
