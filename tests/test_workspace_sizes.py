"""scripts/bench/workspace.py compares cuDNN's workspace with the formula.

Without a GPU, there is only the formula.
"""

import json
import re
import types

import jax
import pytest

from jaxsp.planner.compile import compiled
from scripts.bench import machine, report, workspace
from tests import messages

CASE = workspace.Case(row_tokens=1024, num_heads=4, num_kv_heads=2, max_segments=8)


@pytest.fixture(scope="module")
def h100():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    return compiled.make_devices("h100-80gb", 1)[0]


def test_without_a_gpu_there_is_a_formula_and_no_workspace(h100):
    actual = workspace.measure(CASE, h100)
    assert (actual.status, actual.workspace_gib, actual.ratio) == (report.OK, None, None)
    assert actual.formula_gib > 0


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
