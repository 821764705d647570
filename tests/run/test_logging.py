"""Records besides metrics.jsonl: TensorBoard events, a profiler trace, cached compiled programs."""

import struct

import pytest
from tensorboardX.proto import event_pb2

from jaxsp import report
from tests import commands
from tests.run import test_report

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
    """Trains some steps of the quickstart, and returns the names of the cached programs."""
    words = [f"run.directory={folder / name}", f"run.compilation_cache={folder}/cache", *WORDS]
    # otherwise programs that compile in about a second are cached only sometimes
    env = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = commands.run_python("-m", "jaxsp.train", "configs/quickstart.yaml", *words, env=env)
    assert done.returncode == 0, done.stderr
    return {path.name for path in (folder / "cache").glob("*-cache")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logging")
    return folder, train(folder, "first"), train(folder, "second")


def events(folder):
    """Returns (tag, step, value) of every number in TensorBoard's folder.

    A record has a length (8 bytes), its checksum (4), data, and the checksum of the data (4).
    """
    numbers = []
    for file in sorted(folder.iterdir()):
        left = file.read_bytes()
        while left:
            (length,) = struct.unpack("<Q", left[:8])
            event = event_pb2.Event.FromString(left[12 : 12 + length])
            numbers += [
                (value.tag, event.step, value.simple_value) for value in event.summary.value
            ]
            left = left[12 + length + 4 :]
    return numbers


@pytest.mark.slow
def test_tensorboard_shows_every_number_of_metrics_and_eval(runs):
    folder, *_ = runs
    numbers = {(tag, step): value for tag, step, value in events(folder / "first/tensorboard")}
    for name, group in (("metrics.jsonl", "train"), ("eval.jsonl", "eval/json")):
        for line in commands.read_lines(folder / "first" / name):
            step = line.pop("step")
            for field, value in commands.flatten_numbers(line).items():
                number = numbers.pop((f"{group}/{field}", step))
                assert number == pytest.approx(value), field
    assert not numbers


@pytest.mark.slow
def test_second_start_compiles_nothing_that_the_first_has_cached(runs):
    folder, first, second = runs
    assert first == second
    assert any("step" in name for name in first), first
    losses = [
        commands.read_lines(folder / run / "eval.jsonl")[-1]["loss"] for run in ("first", "second")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_start_is_recorded_with_its_mesh_memory_and_trace(runs):
    folder, *_ = runs
    (start,) = commands.read_lines(folder / "first/starts.jsonl")
    assert (start["num_devices"], start["mesh"]["seq"], start["num_steps"]) == (2, 2, 4)
    memory = start["memory"]
    weights = 4 * start["num_parameters"]
    assert memory["device"]["weights"] <= weights, "no more than whole float32 weights"
    counts = memory["device"]["optimizer state"] - 2 * memory["device"]["weights"]
    assert 0 <= counts < 1024, "two moments, and AdamW's count of each weight"
    assert memory["device"]["other temporaries"] > 0
    assert start["compile_s"] > 0
    (trace,) = (folder / "first/profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 10_000


def test_the_report_of_two_runs_has_their_losses(runs, capsys):
    folder, *_ = runs
    out = folder / "report.html"
    report.main([str(folder / "first"), str(folder / "second"), "--out", str(out)])
    assert str(out) in capsys.readouterr().out
    text = out.read_text(encoding="utf-8")
    shown = [trace["y"] for trace in test_report.Page(text).charts["Training loss"]["traces"]]
    for name in ("first", "second"):
        assert [
            line["loss"] for line in commands.read_lines(folder / name / "metrics.jsonl")
        ] in shown
