"""Evaluations of runs: retrieval tasks in files, after a resume, and by command."""

import itertools
import json
import os

import jax
import pytest
import rich.console

from jaxsp import eval as evaluation
from jaxsp.core.errors import UserError
from jaxsp.run import build, comparison, config_file, trainer
from tests import batches, commands, small_runs
from tests.run import synthetic_runs

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
    sections = {
        "run": {"steps": 4, "eval_every": 2, "save_every": 2},
        "model": {"config": batches.SMALL_LLAMA, "tokenizer": "bytes"},
        "data": {
            "train": [{"source": str(folder / "train.jsonl"), "format": "text"}],
            "row_tokens": 256,
        },
        "eval": {"tasks": TASKS},
        "batch": {"rows_per_step": 2},
    }
    return config_file.parse(small_runs.make_fields(folder, **sections), words)


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
    with pytest.raises(UserError, match=r"--baseline.*would be added to it"):
        evaluation.main([str(run), *words, "--out", os.path.relpath(out), "--baseline", str(out)])
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


def test_a_baseline_with_other_settings_is_named(tmp_path):
    """The files of a run's directory, against lines with other rows, documents and records."""
    harness = {"lm_eval": "arc", "results": {"acc": 0.5}, "row_tokens": 64, "limit": 1000}
    files = {
        "eval.jsonl": synthetic_runs.eval_lines([0], names=("books", "code")),
        "tasks.jsonl": [synthetic_runs.task_line(0, "needle", 64)],
        "lm_eval.jsonl": [harness],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    before = comparison.read(tmp_path)
    assert before == list(itertools.chain(*files.values()))
    changes = (
        {"data_digest": "x", "row_tokens": 512},
        {"row_tokens": 512},
        {"rope": "yarn", "compute_dtype": "float32"},
        {"limit": None, "row_tokens": 32},
    )
    after = [line | change for line, change in zip(before, changes, strict=True)]
    console = rich.console.Console(width=40, file=None)
    with console.capture() as capture:
        comparison.print_table(console, before, after)
    rows = capture.get().splitlines()
    table = rows[:-3]
    assert table[1].split() == "books loss 4.2000 4.2000 +0.0000".split()
    assert len({len(row) for row in table}) == 1, "rows are not wrapped on a narrow terminal"
    differ = "settings differ: "
    assert rows[-3:] == [
        f"books: {differ}rows of 4,096 tokens before, rows of 512 tokens after",
        f"task needle, 64 tokens: {differ}bfloat16 compute, no RoPE before, float32 compute, "
        "RoPE yarn after",
        f"lm-eval arc: {differ}rows of 64 tokens, 1,000 records before, rows of 32 tokens, "
        "all records after",
    ]


def test_of_a_baseline_the_last_line_of_each_name_counts(tmp_path):
    first, second = synthetic_runs.eval_lines([4, 9])
    lines = [
        second | {"long_ppl": 5.5},
        second | {"long_ppl": None},
        # jaxsp eval of an earlier checkpoint
        first,
        {"data": None, "loss": 1.0},
        {"data": "samples.jsonl has no numbers"},
    ]
    for path in (tmp_path / "eval.jsonl", tmp_path / "out.jsonl"):
        path.write_text("\n".join(map(json.dumps, lines)))
    console = rich.console.Console(file=None)
    for path, loss in ((tmp_path, second["loss"]), (tmp_path / "out.jsonl", first["loss"])):
        with console.capture() as capture:
            comparison.print_table(console, comparison.read(path), [second])
        row = next(row.split() for row in capture.get().splitlines() if row.startswith("held"))
        assert row[3] == f"{loss:.4f}"
        assert "long_ppl" not in capture.get()
