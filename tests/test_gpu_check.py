"""scripts/gpu_check.sh runs its stages within their time limits and writes each result at once."""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import time

import pytest

from jaxsp.system import hardware
from scripts import gpu_check, gpu_stages
from scripts.bench import cases, first_checks, report, step
from tests import messages

REPO = pathlib.Path(__file__).parent.parent

FACTS = {
    "device": "NVIDIA H100 80GB HBM3",
    "driver": "580.1",
    "jax": "0.11.2",
    "cudnn_loaded": "9.20.0",
    "commit": "abc",
}


@pytest.mark.skipif(hardware.count_gpus({}) > 0, reason="needs a machine without an NVIDIA GPU")
def test_without_a_gpu_a_stage_exits_2_with_one_line(tmp_path):
    stage = next(iter(gpu_stages.STAGES))
    path = f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"
    command = [REPO / "scripts" / "gpu_check.sh", stage, "--out", str(tmp_path / "results")]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    *_, line = done.stderr.splitlines()  # the scripts import jax before jaxsp
    assert "GPU" in line
    assert not (tmp_path / "results").exists()


class Parsed(Exception):
    """Ends a benchmark's command after its options were parsed."""


def test_the_benchmarks_accept_the_options_of_each_stage(tmp_path, monkeypatch):
    mains = {benchmark.MODULE: benchmark.main for benchmark in (first_checks, step)}
    parse = argparse.ArgumentParser.parse_args
    parsed = []

    def parse_and_stop(parser, arguments):
        parsed.append(parse(parser, arguments))
        raise Parsed

    def run(command, seconds, log):
        module = command[2]
        words = command[3:]
        with pytest.raises(Parsed):
            mains[module](words)
        pathlib.Path(words[words.index("--out") + 1]).write_text('{"summary": "fine"}')
        return 0

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(gpu_check, "run", run)
    args = argparse.Namespace(out=tmp_path, commit="def", resume=tmp_path / "old.json")
    for stage in ("memory", "speed", "first"):
        until = time.monotonic() + gpu_stages.SECONDS
        assert gpu_check.run_stage(stage, args, FACTS, until=until) == 0
    tiles, offload, table, *checks = parsed
    assert {options.commit for options in parsed} == {"def"}
    assert tiles.seconds == 240, "300 s less 60 s for a case"
    assert [options.check for options in checks] == list(gpu_stages.CHECKS)
    tile_sizes = [
        (case.mlp_tile_tokens, case.loss_tile_tokens) for case in cases.expand_cases(tiles)
    ]
    assert tile_sizes == [(32768, 4096), (32768, 512), (8192, 4096), (8192, 512)]
    pipelined = "xla_gpu_enable_pipelined_host_offloading"
    options = [case.xla_options for case in cases.expand_cases(offload)]
    assert options == [{pipelined: False}, {pipelined: True}]
    names = [(case.shape, case.row_tokens, case.documents) for case in cases.expand_cases(table)]
    assert names[:3] == [
        ("llama8b-4layers", 32768, "one"),
        ("llama8b-4layers", 32768, "packed"),
        ("llama8b-4layers", 131072, "one"),
    ]
    assert len(names) == 12
    assert table.resume == tmp_path / "old.json"


def run_stage(monkeypatch, out, *parts, until=60):
    """Exit code, index and log line of a stage of these parts."""
    monkeypatch.setitem(gpu_stages.STAGES, "mine", gpu_stages.Stage(topics="", parts=parts))
    args = argparse.Namespace(out=out, commit=None, resume=None)
    code = gpu_check.run_stage("mine", args, FACTS, until=time.monotonic() + until)
    (index,) = out.glob("*-h100-80gb-hbm3-mine.json")
    return code, json.loads(index.read_text()), (out / "LOG.md").read_text().splitlines()[-1]


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """Makes a part whose module writes a result, prints a line, and ends as asked."""
    monkeypatch.setattr(gpu_check.machine, "REPO", tmp_path)

    def make(name, *, sleep=0, code=0, seconds=60):
        text = f"""
import pathlib, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
pathlib.Path(out).write_text('{{"summary": "result of {name}"}}')
print("a line", flush=True)
time.sleep({sleep})
sys.exit({code})
"""
        (tmp_path / f"{name}.py").write_text(text)
        return gpu_stages.Part(name=name, seconds=seconds, module=name, arguments=())

    return make


@pytest.mark.e2e
def test_a_part_that_takes_too_long_is_ended_and_keeps_its_results(
    monkeypatch, tmp_path, benchmark
):
    monkeypatch.setattr(gpu_check, "LEAST_S", 2)
    parts = benchmark("slow", sleep=60, seconds=2), benchmark("late")
    began = time.monotonic()
    code, index, line = run_stage(monkeypatch, tmp_path / "out", *parts, until=3)
    assert time.monotonic() - began < 20
    assert code == 1
    assert [part["status"] for part in index["parts"]] == [report.TIMED_OUT, report.NOT_RUN]
    expected = ("slow: result of slow", report.TIMED_OUT, "late", report.NOT_RUN)
    assert re.search(messages.containing(*expected), line)


TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skip
def test_skips():
    pass
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("text", "status", "summary"),
    [
        (TESTS, report.OK, "1 passed, 1 skipped in"),
        (TESTS.replace("    pass", "    assert 0", 1), report.FAILED, "0 passed, 1 failed, 1 skip"),
        (
            TESTS.replace("def test_passes", "@pytest.mark.skip\ndef test_"),
            report.FAILED,
            "0 passed",
        ),
        ("import os\nos.abort()", report.FAILED, "no results"),
    ],
    ids=["passed", "failed", "all skipped", "crashed"],
)
def test_a_part_of_tests_counts_them(monkeypatch, tmp_path, text, status, summary):
    monkeypatch.setattr(gpu_check.machine, "REPO", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(text)
    part = gpu_stages.Part(
        name="tests", seconds=60, module="pytest", arguments=("test_it.py",), is_tests=True
    )
    _, index, _ = run_stage(monkeypatch, tmp_path / "out", part)
    assert index["parts"][0]["status"] == status
    assert index["parts"][0]["summary"].startswith(summary)
