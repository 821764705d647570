"""Runs of distillation: meshes, resuming, stored predictions, evaluation and export."""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import rich.console

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.core.errors import UserError
from jaxsp.run import build, config_file, score_command, trainer
from jaxsp.system import distributed
from jaxsp.system.cluster import Process
from tests import batches, commands, small_runs

TEACHER = batches.UNEVEN_LLAMA | {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 270,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    small_runs.write_model(folder / "teacher", TEACHER, std=0.4)
    small_runs.write_model(folder / "student", batches.SMALL_LLAMA, std=0.1)
    commands.write_documents(folder / "train.jsonl", [*range(20, 60)])
    return folder


def settings(folder: pathlib.Path, name: str, *words: str, sizes: tuple[int, int] = (1, 1)) -> Any:
    sections = {
        "run": {"directory": str(folder / name), "steps": 4, "save_every": 2},
        "model": {"source": str(folder / "student")},
        "mesh": {"data": sizes[0], "seq": sizes[1]},
        "data": {"eval_fraction": 0.1},
        "batch": {"rows_per_step": 8},
        "objective": {"type": "distill", "teacher": str(folder / "teacher")},
        "checkpoint": {"keep_latest": 9},
        "optimizer": {"schedule": "constant"},
    }
    return config_file.parse(small_runs.make_fields(folder, **sections), words)


def run(config: Any) -> list[dict[str, Any]]:
    """Trains. Returns: lines of metrics.jsonl."""
    devices = jax.devices()[: config.mesh.data * config.mesh.seq]
    inputs = build.build_training(config, devices=devices)
    trainer.train(inputs, rich.console.Console(quiet=True))
    return commands.read_lines(pathlib.Path(config.run.directory) / "metrics.jsonl")


@pytest.mark.e2e
def test_a_run_on_one_mesh_goes_on_on_another_and_its_model_is_used_without_the_teacher(
    folder, capsys
):
    straight = run(settings(folder, "straight"))
    run(settings(folder, "resumed", "run.steps=2"))
    resumed = run(settings(folder, "resumed", sizes=(2, 2)))
    for line, expected in zip(resumed, straight, strict=True):
        assert line["num_loss_tokens"] == expected["num_loss_tokens"]
        for name in ("loss", "cross_entropy", "divergence", "grad_norm", "teacher_agreement"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    assert straight[-1]["loss"] < straight[0]["loss"]
    (evaluated,) = commands.read_lines(folder / "straight/eval.jsonl")
    assert evaluated["perplexity"] == pytest.approx(np.exp(evaluated["cross_entropy"]))
    assert evaluated["loss"] == evaluated["divergence"] < evaluated["cross_entropy"]
    evaluation.main([str(folder / "straight"), "mesh.seq=4", "mesh.data=2"])
    again = commands.read_lines(folder / "straight/eval.jsonl")[-1]
    assert again["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)
    export.main([str(folder / "straight"), str(folder / "exported")])
    config = json.loads((folder / "exported/config.json").read_text())
    assert config["num_hidden_layers"] == 1
    before = ["objective.teacher=null", "objective.type=sft", "run.steps=1"]
    run(settings(folder, "sft", *before))
    words = ["objective.type=distill", f"objective.teacher={folder / 'teacher'}"]
    evaluation.main([str(folder / "sft"), "mesh.seq=4", "mesh.data=2", *words])
    assert commands.read_lines(folder / "sft/eval.jsonl")[-1]["divergence"] > 0
    changed = settings(folder, "straight", f"objective.teacher={folder / 'student'}", "run.steps=5")
    with pytest.raises(UserError, match="another base: teacher/"):
        run(changed)


@pytest.mark.e2e
def test_stored_predictions_of_all_classes_are_those_of_the_teacher_in_the_step(
    folder, monkeypatch
):
    """256 of 257 tokens, and the class of all others, which is the last token."""
    monkeypatch.setattr(distributed, "initialize", lambda _: None)
    words = ["objective.temperature=1.3", "objective.divergence=jsd"]
    stored = [f"objective.predictions={folder / 'predictions'}", "objective.top_k=256"]
    config = settings(folder, "stored", *words, *stored, sizes=(2, 4))
    with pytest.raises(UserError, match=r"has none for these documents of train.*jaxsp score"):
        run(config)
    console = rich.console.Console(quiet=True)
    compile_forward = score_command.train_step.compile_forward

    def compile_and_fail(*args):
        compute = compile_forward(*args)
        calls = iter(range(2))
        return lambda *inputs: (next(calls), compute(*inputs))[1]

    with monkeypatch.context() as patch:  # as if it had been killed in the third batch
        patch.setattr(score_command.train_step, "compile_forward", compile_and_fail)
        with pytest.raises(StopIteration):
            score_command.score(config, Process(), console)
    with pytest.raises(UserError, match="incomplete for train"):
        run(config)
    # another mesh has other batches
    other_mesh = settings(folder, "stored", *words, *stored, sizes=(8, 1))
    score_command.score(other_mesh, Process(), console)
    files = sorted((folder / "predictions").glob("*/predictions"))
    lines = run(config)
    for line, expected in zip(lines, run(settings(folder, "live", *words)), strict=True):
        for name in ("loss", "cross_entropy", "grad_norm", "teacher_agreement"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5), name
    with pytest.raises(UserError, match=r"by .* with temperature 1 "):
        run(settings(folder, "other", "objective.divergence=jsd", *stored))
    content = bytearray(files[0].read_bytes())
    content[-500] ^= 4
    files[0].write_bytes(content)
    damaged = settings(folder, "damaged", *words, *stored)
    with pytest.raises(Exception, match="IS DAMAGED"):
        run(damaged)
    with pytest.raises(UserError, match="incomplete for"):
        run(damaged)
    for path in (folder / "teacher").iterdir():
        os.utime(path, (0, 0))  # a copy is the same teacher
    score_command.score(other_mesh, Process(), console)
    losses = [line["loss"] for line in lines]
    assert [line["loss"] for line in run(damaged)] == pytest.approx(losses, rel=1e-5)


def test_a_teacher_with_other_tokens_is_refused(folder):
    teacher = folder / "other"
    small_runs.write_model(teacher, TEACHER | {"vocab_size": 300}, std=0.1)
    from jaxsp.data import tokenizers

    tokenizer = tokenizers.load(tokenizers.BYTE_TOKENIZER)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(teacher)
    words = [f"objective.teacher={teacher}", "model.tokenizer=bytes"]
    text = folder / "text.jsonl"
    text.write_text(json.dumps({"text": "one two three"}) + "\n")
    source = f"data.train=[{{source: {text}, format: text}}]"
    with pytest.raises(UserError, match=r"its tokenizer: .*token 257 is '<other>'"):
        run(settings(folder, "refused", *words, source, "data.eval_fraction=null"))
