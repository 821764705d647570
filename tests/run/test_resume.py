"""A stopped run continues as if it had not been stopped, with its evaluations.

The results are equal bit for bit on the same mesh, and to rounding on others.
"""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
import transformers
from jax.experimental import multihost_utils

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data import tokenizers
from jaxsp.run import build, config_file, resume
from jaxsp.run.config_file import RunConfig
from tests import batches, commands, messages, small_runs, tolerances
from tests.small_runs import make_fields, train

STEPS = 10
STOPPED = 6
LENGTHS = [*np.random.default_rng(1).integers(1, 60, 60), 300]


def settings(folder, *words):
    sources = [
        {"source": str(folder / f"{name}.jsonl"), "format": "tokens", "name": name}
        for name in ("short", "long")
    ]
    sections = {
        "run": {"steps": STEPS, "save_every": 3, "eval_every": 5},
        "model": {"config": batches.UNEVEN_LLAMA},
        "mesh": {"data": 2, "seq": 4},
        "data": {"eval": sources, "max_segments_per_row": 8},
        "batch": {"rows_per_step": 8},
        "optimizer": {"warmup_steps": 2, "weight_decay": 0.1},
        "checkpoint": {"keep_latest": 3},
    }
    return config_file.parse(make_fields(folder, **sections), words)


def lines(directory, name="metrics.jsonl"):
    return commands.read_lines(directory / name)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Folder of an uninterrupted run of ten steps, with checkpoints of steps 6, 9 and 10."""
    folder = tmp_path_factory.mktemp("straight")
    commands.write_documents(folder / "train.jsonl", LENGTHS)
    commands.write_documents(folder / "short.jsonl", [3, 2, 40, 20, 16], seed=1)
    commands.write_documents(folder / "long.jsonl", [150], seed=2)
    train(settings(folder))
    return folder


@pytest.fixture
def stopped(straight, tmp_path):
    """A copy of the run as if it had been stopped after step 7: its latest checkpoint is step 6."""
    for file in straight.glob("*.jsonl"):
        shutil.copy(file, tmp_path)
    shutil.copytree(straight / "run", tmp_path / "run")
    for step in (9, 10):
        shutil.rmtree(tmp_path / "run/checkpoints" / str(step))
    kept = lines(tmp_path / "run")[: STOPPED + 1]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in kept))
    return tmp_path


def check(actual, expected, *, rel=0.0):
    """Compares the lines of two runs."""
    for line, other in zip(actual, expected, strict=True):
        assert [line[name] for name in commands.COUNTS] == [other[x] for x in commands.COUNTS]
        for name in ("loss", "grad_norm", "learning_rate", "token_accuracy"):
            assert line[name] == pytest.approx(other[name], rel=rel, abs=0), (name, line["step"])


@pytest.mark.e2e
@pytest.mark.parametrize("mesh", [(2, 4), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_a_resumed_run_gives_the_numbers_of_one_that_was_not_stopped(straight, stopped, mesh):
    train(settings(stopped, f"mesh.data={mesh[0]}", f"mesh.seq={mesh[1]}"))
    rel = 0.0 if mesh == (2, 4) else tolerances.MESH
    check(lines(stopped / "run"), lines(straight / "run"), rel=rel)
    first, second = lines(stopped / "run", "starts.jsonl")
    assert (first["from_step"], first["previous_step"], first["checkpoint"]) == (0, None, None)
    assert (second["from_step"], second["previous_step"]) == (6, STOPPED + 1)
    assert second["checkpoint"] == str(stopped / "run/checkpoints/6")
    assert second["mesh"] == {"replica": 1, "data": mesh[0], "seq": mesh[1]}
    chosen = settings(straight, f"run.directory={straight}/elsewhere")
    table = build.build_training(chosen, devices=jax.devices()).spec.table
    expected, actual = (
        jax.tree.leaves(reader.read_weights(folder / f"run/checkpoints/{STEPS}", table))
        for folder in (straight, stopped)
    )
    for array, other in zip(expected, actual, strict=True):
        assert np.linalg.norm(array - other) <= rel * np.linalg.norm(array)
    actual = lines(stopped / "run", "eval.jsonl")
    steps = [(line["step"], line["data"]) for line in actual]
    assert steps == [(n, name) for n in (5, 10) for name in ("short", "long")]
    for line, other in zip(actual, lines(straight / "run", "eval.jsonl"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=rel, abs=0)


@pytest.mark.e2e
def test_evaluation_of_a_run_equals_that_during_training(straight, capsys):
    out = straight / "again.jsonl"
    evaluation.main([str(straight / "run"), "--out", str(out)])
    before = lines(straight / "run", "eval.jsonl")
    assert [line | {"seconds": 0} for line in lines(straight, "again.jsonl")] == [
        line | {"seconds": 0} for line in before if line["step"] == STEPS
    ]
    assert "perplexity" in capsys.readouterr().out
    # another checkpoint, another mesh, other data
    words = [f"data.eval=[{{source: {straight}/train.jsonl, format: tokens}}]", "mesh.data=1"]
    words = [str(straight / "run/checkpoints/9"), *words, "--out", str(out)]
    with pytest.raises(UserError, match=messages.containing("mesh.seq = 8", 4)):
        evaluation.main([*words, "mesh.seq=8", "attention.strategy=ulysses"])
    out.unlink()
    # training's 8 rows a step are no multiple of 6
    evaluation.main([*words, "mesh.replica=2", "mesh.seq=4", "batch.rows_per_microbatch=3"])
    (line,) = lines(straight, "again.jsonl")
    assert (line["step"], line["num_tokens"], line["num_documents"]) == (9, sum(LENGTHS), 61)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["model.config.hidden_size=64"], "model.config"),
        (["--out", "nowhere/e.jsonl"], "--out = nowhere/e.jsonl"),
        (["data.eval.0.format=text", "model.tokenizer=nowhere"], "model.tokenizer = nowhere"),
    ],
)
def test_evaluations_of_a_run_that_cannot_be_are_refused(straight, words, part):
    with pytest.raises(UserError, match=messages.containing(part)):
        evaluation.main([str(straight / "run"), *words])


@pytest.mark.e2e
def test_a_checkpoint_outside_a_run_has_no_run(straight, tmp_path, monkeypatch):
    assert run_paths.find_run_dir(straight / "run/checkpoints/9") == straight / "run"
    shutil.copytree(straight / "run/checkpoints/9", tmp_path / "kept/9")
    (tmp_path / "model").mkdir()  # of another project
    monkeypatch.chdir(tmp_path)
    evaluation.main(["kept/9"])
    assert not (tmp_path / "eval.jsonl").exists()


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_the_other_run_again(
    straight, stopped, monkeypatch
):
    words = [f"run.directory={stopped}/second", f"run.resume={stopped}/run"]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "save", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(settings(stopped, *words))
    actual = f"run.directory = {stopped}/second"
    with pytest.raises(UserError, match=messages.containing(actual, words[1])):
        train(settings(stopped, words[0]))
    suggestions = (f"run.directory={stopped}/second-2", "run.resume=auto")
    with pytest.raises(UserError, match=messages.containing(actual, *suggestions)):
        train(settings(stopped, words[0], f"run.resume={straight}/run"))
    train(settings(stopped, *words))
    check(lines(stopped / "second"), lines(straight / "run")[STOPPED:])
    assert lines(stopped / "run")[-1]["step"] == STOPPED + 1, "the first run is unchanged"
    # and from its own checkpoints, as soon as there are some
    shutil.rmtree(stopped / f"second/checkpoints/{STEPS}")
    train(settings(stopped, *words))
    check(lines(stopped / "second"), lines(straight / "run")[STOPPED:])
    (stopped / "second/damaged").mkdir()
    shutil.rmtree(stopped / "second/checkpoints")
    for resumed in (words[1], "run.resume=auto"):
        with pytest.raises(UserError, match=messages.containing(actual, "second/damaged")):
            train(settings(stopped, words[0], resumed))


def test_processes_that_see_other_checkpoints_do_not_begin(tmp_path, monkeypatch):
    """Before one of them reads what another does not see, and all wait for each other."""
    run = RunConfig(directory=str(tmp_path), steps=9)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.array([own, 4]))
    with pytest.raises(UserError, match=f"{tmp_path}: processes would begin at steps 0 or 4"):
        resume.open_checkpoint(run, [], ProblemCollector())
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="files that are not a run's"):
        resume.open_checkpoint(run, [], ProblemCollector())


def test_layers_that_differ_are_named_by_their_runs():
    model = batches.model(num_layers=3)
    (layer,) = {*model.layers}
    windows = (layer, layer, dataclasses.replace(layer, window=4))
    described = resume.describe_model(dataclasses.replace(model, layers=windows))
    expected = resume.describe_model(model)
    different = {name: described[name] for name in expected if described[name] != expected[name]}
    assert different == {"window of layers": [(None, 2), (4, 1)]}


@pytest.mark.slow
def test_a_run_goes_on_where_its_model_s_folder_is_gone(tmp_path):
    (tmp_path / "a.txt").write_text("All work and no play makes Jack a dull boy. " * 20)
    folder = tmp_path / "hf"
    small_runs.write_model(folder, batches.UNEVEN_LLAMA, std=0.1)
    tokenizers.make_byte_tokenizer().save_pretrained(folder)
    words = ["model.config=null", f"model.source={folder}", "data.eval=[]", "run.save_every=2"]
    words += [f"data.train=[{{source: {tmp_path}/a.txt, format: text}}]"]
    train(settings(tmp_path, *words, "run.steps=2"))
    shutil.rmtree(folder)
    second = [f"run.directory={tmp_path}/second", f"run.resume={tmp_path}/run"]
    train(settings(tmp_path, *words, "run.steps=3", *second))
    assert [line["step"] for line in lines(tmp_path / "second")] == [3]
    with pytest.raises(UserError, match=messages.containing(f"model.source = {folder}")):
        train(settings(tmp_path, *words, f"run.directory={tmp_path}/third"))
    export.main([str(tmp_path / "second"), str(tmp_path / "out")])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("é").input_ids == [195, 169]


@pytest.mark.e2e
def test_a_finished_run_keeps_its_latest_checkpoints_and_is_left_alone(straight):
    assert {path.name for path in (straight / "run/checkpoints").iterdir()} == {"6", "9", "10"}
    before = {path: path.stat().st_mtime_ns for path in (straight / "run").rglob("*")}
    train(settings(straight))
    assert {path: path.stat().st_mtime_ns for path in (straight / "run").rglob("*")} == before


@pytest.mark.e2e
def test_rows_per_step_may_change_and_no_row_comes_twice_or_never(straight, stopped):
    train(settings(stopped, "batch.rows_per_step=4", "run.steps=14"))
    actual = lines(stopped / "run")
    expected = lines(straight / "run")
    assert [line["step"] for line in actual] == list(range(1, 15))
    total = expected[-1]["num_tokens_total"]
    assert actual[-1]["num_tokens_total"] == total, "8 steps of 4 rows are 4 steps of 8"
    assert reader.read_meta(run_paths.find_latest(stopped / "run")).rows_consumed == STEPS * 8
    counts = [line["num_loss_tokens"] for line in actual[STOPPED:]]
    pairs = [first + second for first, second in zip(counts[::2], counts[1::2], strict=True)]
    assert pairs == [line["num_loss_tokens"] for line in expected[STOPPED:]]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("then", "words", "begins", "parts"),
    [
        pytest.param(
            *("restart", ["data.row_tokens=128"], 0, ["data.row_tokens = 128", 64]),
            marks=pytest.mark.slow,
        ),
        ("continue", ["run.seed=1"], STOPPED * 8, ["run.seed = 1", 0, STOPPED * 8]),
    ],
)
def test_other_data_starts_anew_or_is_continued(stopped, then, words, begins, parts):
    chosen = settings(stopped, *words, f"run.on_data_change={then}")
    run = build.build_training(chosen, devices=jax.devices())
    assert (run.start.step, run.spec.num_steps) == (STOPPED, STEPS)
    assert run.schedule.begin_row == begins
    train(chosen)
    actual = lines(stopped / "run")
    assert [line["step"] for line in actual] == list(range(1, STEPS + 1))
    assert re.search(messages.containing(*parts), messages.read_banner(stopped / "run"))
    rows = [run.train_set.stream.row(begins + n) for n in range(8 * (STEPS - STOPPED))]
    tokens = np.reshape([row.length.sum() for row in rows], (-1, 8)).sum(1).tolist()
    assert [line["num_tokens"] for line in actual[STOPPED:]] == tokens
    meta = reader.read_meta(run_paths.find_latest(stopped / "run"))
    assert meta.rows_consumed == begins + 8 * (STEPS - STOPPED)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run.seed=1"], ["run.seed = 1", 0, "run.on_data_change=restart"]),
        (["data.row_tokens=128"], ["data.row_tokens = 128", 64, "run.on_data_change=restart"]),
        (["data.max_segments_per_row=9"], ["data.max_segments_per_row = 9", 8]),
        (
            ["data.row_tokens=128", "run.on_data_change=continue"],
            ["data.row_tokens = 128", 64, "run.on_data_change = continue"],
        ),
        (["data.train.0.source=SHORT"], ["short.jsonl", 5, 61, 81]),
        (["model.config.hidden_size=64"], ["hidden_size = 64", 60]),
        (["optimizer.name=sgd"], ["optimizer.name", "adamw"]),
        (["run.directory=OTHER", "run.resume=NOWHERE"], ["run.resume = NOWHERE"]),
        (["run.resume=never"], ["run.directory = ", "run.resume=auto"]),
    ],
)
def test_what_would_not_be_the_same_run_is_refused(straight, words, parts):
    before = (straight / "run/metrics.jsonl").read_bytes()
    words = [word.replace("SHORT", f"{straight}/short.jsonl") for word in words]
    with pytest.raises(UserError, match=messages.containing(*parts)):
        train(settings(straight, *words))
    assert (straight / "run/metrics.jsonl").read_bytes() == before
