"""A stopped run continues as if it had not been stopped, with its evaluations.

The results are equal bit for bit on the same mesh, and to rounding on others.
"""

import json
import pathlib
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
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.core.errors import UserError
from jaxsp.data import tokenizers
from jaxsp.hf import model_config, weights
from jaxsp.run import build, config_file, resume
from jaxsp.run.run import StartPoint
from jaxsp.run.run_config import RunConfig
from tests import batches, commands, messages, tolerances
from tests.data import test_dataset
from tests.small_runs import make_fields, train

STEPS = 10
STOPPED = 6


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
    return commands.read_lines(pathlib.Path(directory) / name)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Folder of an uninterrupted run of ten steps, with checkpoints of steps 6, 9 and 10."""
    folder = tmp_path_factory.mktemp("straight")
    lengths = [*np.random.default_rng(1).integers(1, 60, 60), 300]
    commands.write_documents(folder / "train.jsonl", lengths)
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
    kept = [
        json.dumps(line) + "\n" for line in lines(tmp_path / "run") if line["step"] <= STOPPED + 1
    ]
    (tmp_path / "run/metrics.jsonl").write_text("".join(kept))
    return tmp_path


def check(found, expected, *, exact):
    """Lines of two runs say the same; those before the stop are the very lines."""
    for line, other in zip(found, expected, strict=True):
        assert {name: line[name] for name in commands.COUNTS} == {
            name: other[name] for name in commands.COUNTS
        }
        for name in ("loss", "grad_norm", "learning_rate", "token_accuracy"):
            if exact:
                assert line[name] == other[name], (name, line["step"])
            else:
                assert line[name] == pytest.approx(other[name], rel=tolerances.MESH), (
                    name,
                    line["step"],
                )


@pytest.mark.e2e
@pytest.mark.parametrize(
    "mesh", [(2, 4), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((8, 1), (1, 2)))]
)
def test_a_resumed_run_gives_the_numbers_of_one_that_was_not_stopped(straight, stopped, mesh):
    words = [f"mesh.data={mesh[0]}", f"mesh.seq={mesh[1]}"]
    train(settings(stopped, *words))
    exact = mesh == (2, 4)
    check(lines(stopped / "run"), lines(straight / "run"), exact=exact)
    first, second = lines(stopped / "run", "starts.jsonl")
    assert (first["from_step"], first["previous_step"], first["checkpoint"]) == (0, None, None)
    assert (second["from_step"], second["previous_step"]) == (6, STOPPED + 1)
    assert second["checkpoint"] == str(stopped / "run/checkpoints/6")
    assert second["mesh"] == {"replica": 1, "data": mesh[0], "seq": mesh[1]}
    whole = [
        reader.read_weights(folder / f"run/checkpoints/{STEPS}", prepare_table(folder))
        for folder in (straight, stopped)
    ]
    for straight_array, stopped_array in zip(*map(jax.tree.leaves, whole), strict=True):
        if exact:
            assert np.array_equal(straight_array, stopped_array)
        else:
            assert np.linalg.norm(
                straight_array - stopped_array
            ) <= tolerances.MESH * np.linalg.norm(straight_array)
    actual = lines(stopped / "run", "eval.jsonl")
    expected = lines(straight / "run", "eval.jsonl")
    assert [(line["step"], line["data"]) for line in actual] == [
        (n, name) for n in (5, 10) for name in ("short", "long")
    ]
    for line, other in zip(actual, expected, strict=True):
        assert line["loss"] == (
            other["loss"] if exact else pytest.approx(other["loss"], rel=tolerances.MESH)
        )


def prepare_table(folder):
    chosen = settings(folder, f"run.directory={folder}/elsewhere")
    return build.build_training(chosen, devices=jax.devices()).spec.table


@pytest.mark.e2e
def test_evaluation_of_a_run_equals_that_during_training(straight, capsys):
    before = lines(straight / "run", "eval.jsonl")
    out = straight / "again.jsonl"
    evaluation.main([str(straight / "run"), "--out", str(out)])
    again = lines(straight, "again.jsonl")
    assert [{**line, "seconds": 0} for line in again] == [
        {**line, "seconds": 0} for line in before if line["step"] == STEPS
    ]
    assert "perplexity" in capsys.readouterr().out
    # another checkpoint, another mesh, other data
    words = [
        "mesh.data=1",
        "mesh.seq=8",
        f"data.eval=[{{source: {straight}/train.jsonl, format: tokens}}]",
    ]
    out.unlink()
    by_heads = [*words, "attention.strategy=ulysses"]
    with pytest.raises(UserError, match=messages.containing("mesh.seq = 8", 4)):
        evaluation.main([str(straight / "run/checkpoints/9"), *by_heads, "--out", str(out)])
    # (training's 8 rows a step are no whole number of turns of 6 rows)
    words += ["mesh.replica=2", "mesh.seq=4", "batch.rows_per_microbatch=3"]
    evaluation.main([str(straight / "run/checkpoints/9"), *words, "--out", str(out)])
    (line,) = lines(straight, "again.jsonl")
    assert (line["step"], line["num_tokens"], line["num_documents"]) == (
        9,
        300 + np.random.default_rng(1).integers(1, 60, 60).sum(),
        61,
    )


@pytest.mark.e2e
def test_evaluation_of_a_run_asks_for_what_it_can_do(straight, tmp_path):
    run = str(straight / "run")
    with pytest.raises(UserError, match=messages.containing("model.config", run)):
        evaluation.main([run, "model.config.hidden_size=64"])
    out = f"--out = {tmp_path}/nowhere/e.jsonl"
    with pytest.raises(UserError, match=messages.containing(out)):
        evaluation.main([run, "--out", str(tmp_path / "nowhere/e.jsonl")])
    text = [
        f"data.eval=[{{source: {straight}/train.jsonl, format: text}}]",
        f"model.tokenizer={tmp_path}",
    ]
    with pytest.raises(UserError, match=messages.containing(f"model.tokenizer = {tmp_path}")):
        evaluation.main([run, *text])


@pytest.mark.e2e
def test_a_checkpoint_outside_a_run_has_no_run(straight, tmp_path, monkeypatch):
    assert run_paths.find_run_dir(straight / "run/checkpoints/9") == straight / "run"
    shutil.copytree(straight / "run/checkpoints/9", tmp_path / "kept/9")
    (tmp_path / "model").mkdir()  # of another project
    monkeypatch.chdir(tmp_path)
    evaluation.main(["kept/9"])
    assert not (tmp_path / "eval.jsonl").exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_goes_on_in_another_directory(straight, stopped):
    words = [f"run.directory={stopped}/second", f"run.resume={stopped}/run"]
    train(settings(stopped, *words))
    check(lines(stopped / "second"), lines(straight / "run")[STOPPED:], exact=True)
    assert [line["step"] for line in lines(stopped / "run")][-1] == STOPPED + 1, (
        "the first run's files are unchanged"
    )


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_that_was_cut_off_before_a_checkpoint_of_its_own_begins_again_where_it_was_told(
    straight, stopped, monkeypatch
):
    words = [f"run.directory={stopped}/second", f"run.resume={stopped}/run"]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "save", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(settings(stopped, *words))
    assert lines(stopped / "second")
    actual = f"run.directory = {stopped}/second"
    suggestion = f"run.resume={stopped}/run"
    with pytest.raises(UserError, match=messages.containing(actual, suggestion)):
        train(settings(stopped, words[0]))
    suggestions = (f"run.directory={stopped}/second-2", "run.resume=auto")
    with pytest.raises(UserError, match=messages.containing(actual, *suggestions)):
        train(settings(stopped, words[0], f"run.resume={straight}/run"))
    train(settings(stopped, *words))
    check(lines(stopped / "second"), lines(straight / "run")[STOPPED:], exact=True)
    # and from its own checkpoints, as soon as there are some
    shutil.rmtree(stopped / f"second/checkpoints/{STEPS}")
    train(settings(stopped, *words))
    check(lines(stopped / "second"), lines(straight / "run")[STOPPED:], exact=True)
    (stopped / "second/damaged").mkdir()
    shutil.rmtree(stopped / "second/checkpoints")
    for resumed in (words[1], "run.resume=auto"):
        damaged = f"{stopped}/second/damaged"
        with pytest.raises(UserError, match=messages.containing(actual, damaged)):
            train(settings(stopped, words[0], resumed))


def test_processes_that_see_other_checkpoints_do_not_begin(tmp_path, monkeypatch):
    """Before one of them reads what another does not see, and all wait for each other."""
    run = RunConfig(directory=str(tmp_path), steps=9)
    actual = iter([[4, 4], [4, 0], [resume._NO_START, 4], [resume._NO_START, 4]])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.array(next(actual)))
    resume.check_same_checkpoint(run, tmp_path / "checkpoints/4", [])
    result = f"run.directory = {tmp_path}"
    with pytest.raises(UserError, match=messages.containing(result, 0, 4)):
        resume.check_same_checkpoint(run, tmp_path / "checkpoints/4", [])
    with pytest.raises(UserError, match=r"^is not empty$"):
        resume.check_same_checkpoint(run, None, ["is not empty"])
    with pytest.raises(UserError, match=messages.containing(result, "process 0")):
        resume.check_same_checkpoint(run, tmp_path / "checkpoints/4", [])


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ([], []),
        (["run.eval_at_start=true"], ["run.eval_at_start"]),
        (
            ["optimizer.warmup_fraction=0.1", "optimizer.warmup_steps=0"],
            ["optimizer.warmup_steps", "optimizer.warmup_fraction"],
        ),
    ],
)
def test_a_field_that_an_earlier_version_did_not_have_was_at_its_default(tmp_path, words, fields):
    before = settings(tmp_path)
    now = settings(tmp_path, *words)
    documents = test_dataset.data_of([[3, 4]], before)
    written = before.model_dump(mode="json")
    for group, name in (
        ("run", "eval_at_start"),
        ("data", "eval_fraction"),
        ("optimizer", "warmup_fraction"),
    ):
        del written[group][name]
    meta = CheckpointMeta(
        config=written,
        model=batches.UNEVEN_LLAMA,
        data=documents.fingerprint(before.data, seed=before.run.seed)
        | {"data.long_documents": "split"},
        step=4,
        rows_consumed=32,
        num_tokens_total=7,
    )
    model = model_config.parse_model_config(batches.UNEVEN_LLAMA)
    checkpoint = resume.RunCheckpoint(
        path=tmp_path, meta=meta, config=config_file.parse(meta.config)
    )
    start = resume.make_start_point(checkpoint, now, model=model, data=documents)
    actual = " ".join(x for x in start.config_changes if "learning rate" not in x)
    assert re.findall(r"(\S+) \S+ -> ", actual) == fields
    assert "None" not in actual


@pytest.mark.e2e
@pytest.mark.parametrize(("num_steps", "rate"), [(10, None), (18, "0.00854"), (8, "0.0025")])
def test_a_resumed_run_names_a_jump_of_the_learning_rate(stopped, num_steps, rate):
    """Cosine from 0.01 after 2 steps of warmup: 0.005 in step 7 of 10."""
    config = settings(stopped, f"run.steps={num_steps}")
    inputs = build.build_training(config, devices=jax.devices())
    changes = [change for change in inputs.start.config_changes if "learning rate" in change]
    assert changes == ([f"learning rate of step 7 0.005 -> {rate}"] if rate else [])
    assert inputs.is_resume
    words = [f"run.directory={stopped}/second", f"run.resume={stopped}/run"]
    other = settings(stopped, *words, f"run.steps={num_steps}")
    assert not build.build_training(other, devices=jax.devices()).is_resume


def test_the_learning_rate_of_a_run_of_epochs_is_that_of_its_last_epoch(tmp_path):
    """Half of two epochs of 4 steps of 8 rows are done; without warmup, the rest has half the peak.

    With steps of 4 rows, 8 are left, of 4 + 8.
    """
    words = ["run.steps=null", "run.eval_every=null", "optimizer.warmup_steps=0"]
    before = settings(tmp_path, "run.epochs=2", *words)
    now = settings(tmp_path, "run.epochs=2", "batch.rows_per_step=4", *words)
    documents = test_dataset.data_of([[64] * 32], before)
    start = StartPoint(step=4, rows_consumed=32)
    rates = [resume.find_next_rate(config, start, documents) for config in (before, now)]
    assert rates == ["0.005", "0.0075"]


@pytest.mark.slow
def test_a_run_goes_on_where_its_model_s_folder_is_gone(tmp_path):
    text = "All work and no play makes Jack a dull boy. "
    (tmp_path / "a.txt").write_text(text * 20)
    spec = build.build_training(
        settings(
            tmp_path,
            "data.eval=[]",
            f"data.train=[{{source: {tmp_path}/a.txt, format: text}}]",
            "model.tokenizer=bytes",
        ),
        devices=jax.devices(),
    ).spec
    whole = jax.tree.map(lambda row: np.zeros(row.stacked_shape, np.float32), spec.table)
    folder = tmp_path / "hf"
    weights.export_model(
        whole,
        table=spec.table,
        fields=batches.UNEVEN_LLAMA,
        tokenizer=tokenizers.make_byte_tokenizer(),
        directory=folder,
    )
    words = ["model.config=null", f"model.source={folder}", "data.eval=[]", "run.save_every=2"]
    words += [f"data.train=[{{source: {tmp_path}/a.txt, format: text}}]"]
    train(settings(tmp_path, *words, "run.steps=2"))
    shutil.rmtree(folder)
    train(
        settings(
            tmp_path,
            *words,
            "run.steps=3",
            f"run.directory={tmp_path}/second",
            f"run.resume={tmp_path}/run",
        )
    )
    assert [line["step"] for line in lines(tmp_path / "second")] == [3]
    with pytest.raises(UserError, match=messages.containing(f"model.source = {folder}")):
        train(settings(tmp_path, *words, f"run.directory={tmp_path}/third"))
    export.main([str(tmp_path / "second"), str(tmp_path / "out")])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("é").input_ids == [195, 169]


@pytest.mark.e2e
def test_a_finished_run_is_left_alone(straight):
    before = {path: path.stat().st_mtime_ns for path in (straight / "run").rglob("*")}
    train(settings(straight))
    assert {path: path.stat().st_mtime_ns for path in (straight / "run").rglob("*")} == before


@pytest.mark.e2e
def test_rows_per_step_may_change_and_no_row_comes_twice_or_never(straight, stopped):
    train(settings(stopped, "batch.rows_per_step=4", "run.steps=14"))
    actual = lines(stopped / "run")
    expected = lines(straight / "run")
    assert [line["step"] for line in actual] == list(range(1, 15))
    assert actual[-1]["num_tokens_total"] == expected[-1]["num_tokens_total"], (
        "8 steps of 4 rows are 4 steps of 8"
    )
    assert reader.read_meta(run_paths.find_latest(stopped / "run")).rows_consumed == STEPS * 8
    for half in range(4):
        pair = actual[STOPPED + 2 * half : STOPPED + 2 * half + 2]
        assert (
            sum(line["num_loss_tokens"] for line in pair)
            == expected[STOPPED + half]["num_loss_tokens"]
        )


REFUSED = [
    (["run.seed=1"], ["run.seed = 1", 0, "run.on_data_change=restart"]),
    (["data.row_tokens=128"], ["data.row_tokens = 128", 64, "run.on_data_change=restart"]),
    (
        ["data.max_segments_per_row=9"],
        ["data.max_segments_per_row = 9", 8, "run.on_data_change=restart"],
    ),
    (
        ["data.row_tokens=128", "run.on_data_change=continue"],
        ["data.row_tokens = 128", 64, "run.on_data_change = continue"],
    ),
    (["data.train.0.source=SHORT"], ["short.jsonl", 5, 61, 81]),
    (["model.config.hidden_size=64"], ["hidden_size = 64", 60]),
    (["optimizer.name=sgd"], ["optimizer.name", "adamw"]),
    (["run.directory=OTHER", "run.resume=NOWHERE"], ["run.resume = NOWHERE"]),
    (["run.resume=never"], ["run.directory = ", "run.resume=auto"]),
]
"""Changes of a config, and what the message has."""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("then", "words", "begins", "said"),
    [
        pytest.param(
            "restart",
            ["data.row_tokens=128"],
            0,
            ["data.row_tokens = 128", 64],
            marks=pytest.mark.slow,
        ),
        pytest.param("restart", ["run.seed=1"], 0, ["run.seed = 1", 0], marks=pytest.mark.slow),
        ("continue", ["run.seed=1"], STOPPED * 8, ["run.seed = 1", 0, STOPPED * 8]),
    ],
)
def test_other_data_begins_anew_or_goes_on_where_it_is_asked_to(stopped, then, words, begins, said):
    chosen = settings(stopped, *words, f"run.on_data_change={then}")
    material = build.build_training(chosen, devices=jax.devices())
    spec = material.spec
    assert (material.start.step, spec.num_steps, material.schedule.begin_row) == (
        STOPPED,
        STEPS,
        begins,
    )
    train(chosen)
    actual = lines(stopped / "run")
    assert [line["step"] for line in actual] == list(range(1, STEPS + 1))
    assert re.search(messages.containing(*said), messages.read_banner(stopped / "run"))
    # what was learned is what the new plan has there
    stream = material.train_set.stream
    rows = [stream.row(begins + index) for index in range(8 * (STEPS - STOPPED))]
    tokens = [
        sum(int(row.length.sum()) for row in rows[8 * step : 8 * step + 8])
        for step in range(STEPS - STOPPED)
    ]
    assert [line["num_tokens"] for line in actual[STOPPED:]] == tokens
    meta = reader.read_meta(run_paths.find_latest(stopped / "run"))
    assert meta.rows_consumed == begins + 8 * (STEPS - STOPPED)


@pytest.mark.e2e
@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_what_would_not_be_the_same_run_is_refused(straight, words, says):
    before = (straight / "run/metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as found:
        train(
            settings(
                straight, *(word.replace("SHORT", f"{straight}/short.jsonl") for word in words)
            )
        )
    assert re.search(messages.containing(*says), str(found.value))
    assert (straight / "run/metrics.jsonl").read_bytes() == before


@pytest.mark.e2e
def test_the_newest_checkpoints_are_kept(straight):
    assert sorted(int(path.name) for path in (straight / "run/checkpoints").iterdir()) == [6, 9, 10]
