"""What a run records beside metrics.jsonl: TensorBoard's events, a profiler's trace, compiled programs for the next start."""

import json
import os
import pathlib
import struct
import subprocess
import sys

import pytest
from tensorboardX.proto import event_pb2

pytestmark = pytest.mark.e2e

WORDS = (
    "run.steps=4",
    "run.eval_every=2",
    "logging.profile_steps=[2, 3]",
    "model.config.num_hidden_layers=1",
    'data.train.0.source="{stdlib}/a*.py"',
    "data.train.0.name=a",
    "data.row_tokens=256",
    "mesh.data=1",
    "mesh.seq=2",
    "mesh.virtual_cpu_devices=2",
)


def train(folder, name):
    """A few steps of the quickstart, as a user runs it; the names of the programs that are kept then."""
    words = [f"run.directory={folder / name}", f"logging.compilation_cache={folder}/cache", *WORDS]
    done = subprocess.run(
        [sys.executable, "-m", "jaxsp.train", "configs/quickstart.yaml", *words],
        cwd=pathlib.Path(__file__).parents[2],
        # else programs that compile in a second are kept or not, as it happens
        env=os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path.name for path in (folder / "cache").glob("*-cache")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logging")
    return folder, train(folder, "first"), train(folder, "second")


def events(folder):
    """(tag, step, value) of every number in a folder of TensorBoard's, whose records are a length, its checksum, data, its
    checksum."""
    found = []
    for file in sorted(folder.iterdir()):
        left = file.read_bytes()
        while left:
            (length,) = struct.unpack("<Q", left[:8])
            event = event_pb2.Event.FromString(left[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            left = left[12 + length + 4 :]
    return found


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_tensorboard_shows_every_number_of_metrics_and_eval(runs):
    folder, *_ = runs
    found = {(tag, step): value for tag, step, value in events(folder / "first/tensorboard")}
    for name, group in (("metrics.jsonl", "train"), ("eval.jsonl", "eval/json")):
        for line in lines(folder / "first", name):
            parts = {
                f"num_tokens_by_source/{source}": n
                for source, n in line.pop("num_tokens_by_source", {}).items()
            }
            for field, value in (line | parts).items():
                if field not in ("step", "data") and value is not None:
                    assert found.pop((f"{group}/{field}", line["step"])) == pytest.approx(value), (
                        field
                    )
    assert not found


def test_a_trace_of_the_asked_steps_is_written(runs):
    folder, *_ = runs
    (trace,) = (folder / "first/profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 10_000


def test_a_second_start_compiles_nothing_that_the_first_has_kept(runs):
    folder, kept, again = runs
    assert kept == again
    assert any("step" in name for name in kept), kept
    assert (
        lines(folder / "second", "eval.jsonl")[-1]["loss"]
        == lines(folder / "first", "eval.jsonl")[-1]["loss"]
    )
