"""Evaluations of runs: retrieval tasks in files, after a resume, and by command."""

import json

import jax
import pytest
import rich.console

from jaxsp import eval as evaluation
from jaxsp.run import build, config_file, trainer
from tests import batches, commands

TASKS = [
    {"task": "needle", "lengths": [256, 300], "depths": 2, "samples": 1},
    {"task": "multi_value", "lengths": [448], "samples": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations")
    for name, count in (("train", 8), ("eval", 3)):
        texts = [{"text": f"{name} {number} " * 12} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return folder


def settings(folder, *words):
    fields = {
        "run": {"directory": str(folder / "run"), "steps": 4, "eval_every": 2, "save_every": 2},
        "model": {"config": batches.SMALL_LLAMA, "tokenizer": "bytes", "compute_dtype": "float32"},
        "data": {
            "train": [{"source": str(folder / "train.jsonl"), "format": "text"}],
            "row_tokens": 256,
        },
        "eval": {"tasks": TASKS},
        "batch": {"rows_per_step": 2},
        "optimizer": {"learning_rate": 0.01},
        "logging": {"trackers": ["tensorboard"]},
    }
    return config_file.parse(fields, words)


def train(config):
    console = rich.console.Console(width=200, file=None)
    inputs = build.build_training(config, devices=jax.devices()[:1])
    with console.capture() as capture:
        trainer.train(inputs, console)
    return " ".join(capture.get().split())


@pytest.fixture(scope="module")
def run(folder):
    """A run without eval sets, which is resumed for one more evaluation."""
    text = train(settings(folder, "run.eval_at_start=true"))
    assert "multi_value (2 samples of 448 tokens)" in text
    assert "needle (4 samples of 256 and 300 tokens)" in text
    train(settings(folder, "run.steps=6", "run.save_every=null"))
    return folder / "run"


@pytest.mark.e2e
def test_each_evaluation_has_a_line_for_each_length_of_a_task(run):
    lines = commands.read_lines(run / "tasks.jsonl")
    cells = [("needle", 256), ("needle", 300), ("multi_value", 448)]
    expected = [(step, *cell) for step in (0, 2, 4, 6) for cell in cells]
    assert [(line["step"], line["task"], line["length"]) for line in lines] == expected
    assert lines[0]["exact_rate_by_depth"].keys() == {"0", "1"}
    assert not (run / "eval.jsonl").read_text()
    assert (run / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert lines[-1]["answer_loss"] < lines[2]["answer_loss"], "digits are rare in random weights"


@pytest.mark.e2e
def test_the_command_repeats_the_last_evaluation_and_compares_models(run, folder, capsys):
    before = commands.read_lines(run / "tasks.jsonl")
    source = {"source": str(folder / "eval.jsonl"), "format": "text", "name": "held out"}
    words = [f"data.eval={json.dumps([source])}", "mesh.data=8"]
    words.append("model.max_position_embeddings=300")
    out = folder / "before.jsonl"
    evaluation.main([str(run / "checkpoints/4"), *words, "--out", str(out)])
    assert out.with_name("before-needle.png").is_file()
    evaluation.main([str(run), *words, "--out", str(folder / "b.jsonl"), "--baseline", str(out)])
    text = capsys.readouterr().out
    first, *tasks = commands.read_lines(out)
    assert first["data"] == "held out"
    last_of_training = [line for line in before if line["step"] == 4]
    for line, other in zip(tasks, last_of_training, strict=True):
        assert line["answer_loss"] == pytest.approx(other["answer_loss"], rel=1e-5)
        assert line["exact_rate_by_depth"] == other["exact_rate_by_depth"]
    after = commands.read_lines(folder / "b.jsonl")
    for name, old, new in (
        ("held out", first["loss"], after[0]["loss"]),
        ("needle 300", tasks[1]["answer_loss"], after[2]["answer_loss"]),
    ):
        rows = [row for row in text.splitlines() if f" {old:.4f} " in row and "doubling" not in row]
        assert rows
        assert all(f"{new - old:+.4f}" in row for row in rows), name
    assert commands.read_lines(run / "tasks.jsonl") == before, "--out keeps them apart"
    assert "settings differ" not in text
    assert text.count("note: rows of 448 tokens are longer than the 300 positions") == 2
