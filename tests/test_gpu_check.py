"""scripts/gpu_check.sh runs its stages within their time limits and writes each result at once."""

import argparse
import pathlib
import subprocess
import sys
import time

import pytest

from jaxsp.system import hardware
from scripts import gpu_check, gpu_stages
from scripts.bench import cases, first_checks, step

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
