"""scripts/check_release.py: it finds problems of a plan, and compiles the self-check's programs."""

import dataclasses

import pytest

from scripts import check_release
from tests.planner import example_plans


def problems(**changes):
    """Problems found in a plan with these changes."""
    plan = dataclasses.asdict(example_plans.make_plan(jax_version="0.11.2"))
    return check_release.find_problems(plan | changes, release="0.11.2")


def test_a_plan_that_fits_and_sends_the_right_bytes_has_no_problem():
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fits": False, "shortage": "74 of 72.8 GiB"}, "74 of 72.8 GiB"),
        ({"sent_bytes": 2.01e9}, "1.0050"),
    ],
    ids=["memory", "bytes"],
)
def test_a_problem_of_a_plan_is_found(changes, named):
    (problem,) = problems(**changes)
    assert named in problem


QUICK = ("one document, ring",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in check_release.ATTENTION
    ],
)
def test_the_self_checks_programs_compile_for_a_gpu(name):
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    text = check_release.compile_selfcheck(name).as_text()
    assert ("__cudnn$fmha" in text) != name.endswith("blockwise")
