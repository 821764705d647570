"""scripts/bench/step.py times the train command's step, and records every result."""

import dataclasses
import json
import re

import pytest

from scripts.bench import report, step, timing
from scripts.bench.timing import Result
from tests import commands, messages


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """Results and output of a benchmark of a model that fits nowhere and of one that fits."""
    out = tmp_path_factory.mktemp("bench") / "new" / "results.json"
    options = "--shapes too-big tiny --lengths 256 --documents packed --steps 3 --remat full"
    done = commands.run_python("-m", step.MODULE, *options.split(), "--out", out)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.e2e
def test_a_case_has_its_figures(benchmark):
    results, printed = benchmark
    case = results["cases"][1]
    assert case["status"] == report.OK
    assert (case["shape"], case["row_tokens"]) == ("tiny", 256)
    assert (case["num_documents"], case["steps"]) == (16, 3)
    assert 0 < case["step_s"] <= case["slowest_step_s"]
    assert case["tokens_per_s"] == pytest.approx(256 / case["step_s"])
    assert case["compile_s"] > 0
    assert case["tflops_per_device"] > 0
    assert case["loss_finite"]
    assert 6 < case["loss"] < 6.5, "ln 512 = 6.24 for random weights"
    assert (case["kernel_used"], case["remat"], case["remat_used"]) == ("blockwise", "full", "full")
    assert (case["offload_activations"], case["offload_optimizer"]) == ("none", "none")
    assert case["host_gib"] == 0
    assert 0 < case["planned_gib"] < 1
    assert re.search(messages.containing("256 tokens"), case["memory_used"])
    assert case["workspace_gib"] is None, "cuDNN needs a GPU"
    assert case["compile_s"] < case["wall_s"]
    assert case["from_cache"] is False
    assert case["fallback_reason"] in printed
    assert report.HEADER in printed
    assert report.format_case(case) in printed
    if results["device"] == "cpu":
        assert (case["mfu"], case["peak_gib"], case["memory_limit_gib"]) == (None, None, None)


def run(monkeypatch, tmp_path, results, *words):
    """Exit code and file of a benchmark whose cases have these results."""
    results = iter(results)
    monkeypatch.setattr(timing, "run_case", lambda module, case, *, seconds: next(results))
    out = tmp_path / "results.json"
    code = step.main(["--shapes", "tiny", "--lengths", "256", "--out", str(out), *words])
    return code, json.loads(out.read_text())


GOOD = Result(
    status=report.OK,
    step_s=0.5,
    peak_gib=4.0,
    tflops_per_device=1.0,
    planned_gib=8.0,
    kernel_used="blockwise",
    device="cpu",
)

FULL = Result(status=report.OUT_OF_MEMORY)


def test_a_case_that_fails_fails_the_benchmark_after_the_others(monkeypatch, tmp_path):
    failed = timing.explain_exit(-6, "")
    assert failed.status == report.FAILED
    assert "-6" in failed.message
    code, results = run(monkeypatch, tmp_path, [failed, GOOD])
    assert code == 1
    assert [case["status"] for case in results["cases"]] == [report.FAILED, report.OK]
    assert results["device"] == "cpu"
    assert "0.500 times the plan" in report.summarize(results)


def test_a_comparison_has_speedup_and_memory_ratio(monkeypatch, tmp_path, capsys):
    old = tmp_path / "old.json"
    run(monkeypatch, tmp_path, [dataclasses.replace(GOOD, step_s=1.0, peak_gib=2.0), GOOD])
    (tmp_path / "results.json").rename(old)
    run(monkeypatch, tmp_path, [GOOD, FULL], "--compare", str(old))
    numbers = ("1.0000 s", "0.5000 s", "2.00", "2.00")
    expected = messages.containing("tiny 256 one auto auto none none", *numbers)
    assert re.match(expected, capsys.readouterr().out.splitlines()[-1])


def test_a_resumed_benchmark_keeps_cases_that_ended(monkeypatch, tmp_path):
    words = ["--lengths", "256", "512"]
    first = [dataclasses.replace(GOOD, step_s=0.25), FULL]
    first += [Result(status=report.TIMED_OUT), Result(status=report.NOT_RUN)]
    run(monkeypatch, tmp_path, first, *words)
    old = tmp_path / "old.json"
    (tmp_path / "results.json").rename(old)
    resumed = ["--resume", str(old), *words]
    _, actual = run(monkeypatch, tmp_path, [GOOD, GOOD], *resumed)
    statuses = [(case["status"], case["step_s"]) for case in actual["cases"]]
    assert statuses == [
        (report.OK, 0.25),
        (report.OUT_OF_MEMORY, None),
        (report.OK, 0.5),
        (report.OK, 0.5),
    ]
    _, other = run(monkeypatch, tmp_path, [GOOD] * 4, *resumed, "--remat", "full")
    assert [case["step_s"] for case in other["cases"]] == [0.5] * 4, "other cases are run"
