"""scripts/bench/workspace.py compares cuDNN's workspace with the formula.

Without a GPU, there is only the formula.
"""

import dataclasses
import json
import re
import types

import jax
import pytest

from jaxsp.attention.kernels import cudnn_bins, cudnn_calls, cudnn_limits, cudnn_memory
from jaxsp.attention.kernels.cudnn_memory import CallSplit
from jaxsp.planner.compile import compiled
from jaxsp.runtime import hardware
from scripts.bench import machine, report, workspace
from tests import messages

CASE = workspace.Case(row_tokens=1024, num_heads=4, num_kv_heads=2, max_segments=8)


@pytest.fixture(scope="module")
def h100():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    return compiled.make_devices("h100-80gb", 1)[0]


def test_cudnn_supports_every_case(h100):
    for case in workspace.CASES:
        assert not cudnn_limits.unsupported_reasons(case.work, devices=[h100])


def test_the_workspace_is_compared_with_the_formula(h100, monkeypatch):
    formula = cudnn_memory.workspace_bytes(CASE.work, CallSplit(1, cudnn_bins.CAPACITY_FACTOR))
    monkeypatch.setattr(cudnn_calls, "read_workspace_bytes", lambda text: formula // 2)
    actual = workspace.measure(CASE, h100)
    assert (actual.status, actual.head_chunks, actual.ratio) == (report.OK, 1, 0.5)
    assert actual.workspace_gib == actual.formula_gib / 2 == formula / 2**31
    sizes = (f"{actual.workspace_gib:.3f} GiB", f"{actual.formula_gib:.3f} GiB", "0.500")
    assert re.search(
        messages.containing("4/2", 128, 8, *sizes), workspace.format_case(CASE, actual)
    )


def test_without_a_gpu_there_is_a_formula_and_no_workspace(h100):
    actual = workspace.measure(CASE, h100)
    assert (actual.status, actual.workspace_gib, actual.ratio) == (report.OK, None, None)
    assert actual.formula_gib > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_case_is_compiled_as_one(deterministic, h100):
    case = dataclasses.replace(CASE, max_segments=1, deterministic=deterministic)
    text = workspace.compile_case(
        case, h100, split=CallSplit(1, cudnn_bins.CAPACITY_FACTOR)
    ).as_text()
    assert text.count('"force_deterministic": true') == (1 if deterministic else 0)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command on a made-up GPU. Returns: exit code and file."""

    def run_command(measure, *words):
        device = types.SimpleNamespace(device_kind="NVIDIA H200")
        monkeypatch.setattr(machine, "find_gpu_problem", lambda: None)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        monkeypatch.setattr(workspace, "measure", measure)
        out = tmp_path / "workspace.json"
        return workspace.main(["--out", str(out), *words]), json.loads(out.read_text())

    return run_command


def test_a_case_that_fails_fails_the_command_after_the_others(run):
    def measure(case, device):
        if case.num_heads == 16:
            return workspace.Result(status=report.FAILED, message="no execution plan")
        ratio = 40.0 if case.deterministic else case.row_tokens / 2**17
        return workspace.Result(status=report.OK, ratio=ratio)

    code, actual = run(measure)
    assert (code, actual["device"], len(actual["cases"])) == (
        1,
        "NVIDIA H200",
        len(workspace.CASES),
    )
    numbers = ("0.062", "1.000", 10, "40.000", "40.000", 2, 2)
    assert re.search(messages.containing(*numbers), actual["summary"])


def test_a_compile_error_fails_the_case(h100, monkeypatch):
    def fail(case, device, **options):
        raise jax.errors.JaxRuntimeError("no execution plan\nstack")

    monkeypatch.setattr(workspace, "compile_case", fail)
    actual = workspace.measure(CASE, h100)
    assert (actual.status, actual.message) == (report.FAILED, "no execution plan")


def test_cases_after_the_time_limit_are_not_run(run):
    code, actual = run(None, "--seconds", "-1")
    assert (code, {case["status"] for case in actual["cases"]}) == (0, {report.NOT_RUN})


@pytest.mark.skipif(hardware.count_gpus({}) > 0, reason="needs a machine without an NVIDIA GPU")
def test_the_command_needs_a_gpu(capsys):
    assert workspace.main([]) == 2
    assert "GPU" in capsys.readouterr().err
