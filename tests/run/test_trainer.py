"""When checkpoints are due, and what is left of a run that breaks."""

import contextlib
import dataclasses
import errno
import gc
import io
import json
import pathlib
import re
import time

import filelock
import jax
import numpy as np
import pytest
import rich.console
from jax.experimental import multihost_utils

from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.retention import DELETING_SUFFIX
from jaxsp.checkpoint.writer import CheckpointWriter, WriteOutcome
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.run import build, config_file, preflight, trainer
from jaxsp.run.checkpoint_schedule import CheckpointSchedule
from jaxsp.run.run_config import RunConfig
from jaxsp.system.preemption import Preemption
from jaxsp.system.watchdog import RunStatus
from jaxsp.training import train_step
from jaxsp.training.train_state import TrainState
from tests import batches, commands, messages
from tests.small_runs import make_fields, train


def settings(folder, *words):
    sections = {
        "run": {"steps": 6, "save_every": None},
        "model": {"config": batches.SMALL_LLAMA},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    return config_file.parse(make_fields(folder, "data.jsonl", **sections), words)


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    records = [json.dumps({"input_ids": random.integers(0, 257, 64).tolist()}) for _ in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(records), encoding="utf-8")
    return tmp_path


class Recorded(CheckpointWriter):
    """Writes nothing, and notes the steps."""

    steps = ()
    compile_s = 0.0
    is_uploading = False

    def __init__(self):
        self.steps = []

    def save(self, state, meta):
        self.steps.append(meta.step)

    def poll(self, *, wait=False):
        return None


def test_minutes_count_from_the_last_checkpoint(monkeypatch):
    now = 1000.0
    state = TrainState(master={}, opt_state={}, step=np.int32(0))
    meta = CheckpointMeta(config={}, model={}, data={}, step=0, rows_consumed=0, num_tokens_total=0)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = Recorded()
    save = CheckpointSchedule(
        store, RunConfig(directory="x", steps=9, save_every="2m"), first_step=0, print_line=print
    )
    due = []
    for number in range(1, 9):
        now += 50
        if save.is_due(number):
            due.append(number)
            save.save(state, dataclasses.replace(meta, step=number))
    assert due == store.steps == [3, 6], "after 150 s, the first step's end past 120"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("save_every", "steps"),
    [
        ("5", [5, 6]),
        pytest.param("null", [6], marks=pytest.mark.slow),
        pytest.param("30m", [6], marks=pytest.mark.slow),
    ],
)
def test_checkpoints_are_written_when_asked_and_at_the_end(folder, save_every, steps):
    train(settings(folder, f"run.save_every={save_every}"))
    assert sorted(int(path.name) for path in (folder / "run/checkpoints").iterdir()) == steps


@pytest.mark.slow
@pytest.mark.e2e
def test_a_checkpoint_of_a_step_has_the_weights_after_it(folder):
    """The next step takes over the memory of the state that is being written."""
    constant = "optimizer.schedule=constant"
    train(settings(folder, "run.save_every=1", "checkpoint.keep_latest=6", constant))
    table = build.build_training(
        settings(folder, "run.directory=elsewhere"), devices=jax.devices()[:1]
    ).spec.table
    for num_steps in (1, 4):
        train(
            settings(
                folder, f"run.directory={folder}/{num_steps}", f"run.steps={num_steps}", constant
            )
        )
        one, other = (
            reader.read_weights(folder / f"{name}/checkpoints/{num_steps}", table)
            for name in ("run", num_steps)
        )
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert np.array_equal(a, b), num_steps


def test_a_write_that_failed_is_said_at_the_next_step_and_tried_again_in_a_minute(monkeypatch):
    now = 1000.0
    lines = []
    store = Recorded()
    outcomes = [
        WriteOutcome(step=2, failure="no space left on device"),
        None,
        WriteOutcome(step=3, failure=None),
    ]
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(Recorded, "poll", lambda self: outcomes.pop(0))
    save = CheckpointSchedule(
        store, RunConfig(directory="x", steps=9), first_step=1, print_line=lines.append
    )
    save.poll()
    (failed,) = lines
    assert re.match(messages.containing("checkpoint 2", "no space left on device", "60 s"), failed)
    now += 59
    save.poll()
    assert not save.is_due(3)
    now += 2
    assert save.is_due(4)
    save.poll()
    written, waited = lines[1:]
    assert re.match(messages.containing("checkpoint 3"), written)
    assert re.match(messages.containing("step 3", "0 s"), waited)
    assert (save.last_saved_step, save.is_due(4)) == (3, False)


def test_an_upload_holds_the_next_checkpoint_and_its_failure_ends_the_run_after_one_more(
    monkeypatch,
):
    state = TrainState(master={}, opt_state={}, step=np.int32(0))
    meta = CheckpointMeta(
        config={}, model={}, data={}, step=3, rows_consumed={}, num_tokens_total=0
    )
    store = Recorded()
    failed = WriteOutcome(step=2, failure=None, upload_failure="the store is gone")
    outcomes = [failed, None, WriteOutcome(step=3, failure=None)]
    monkeypatch.setattr(Recorded, "poll", lambda self, *, wait=False: outcomes.pop(0))
    save = CheckpointSchedule(
        store, RunConfig(directory="x", steps=9, save_every=2), first_step=0, print_line=print
    )
    store.is_uploading = True
    assert not save.is_due(2)
    store.is_uploading = False
    assert save.is_due(2)
    save.poll()
    assert save.is_due(3)
    save.save(state, meta)
    with pytest.raises(NeedsAttentionError, match="the store is gone"):
        save.poll()


def test_failed_write_is_not_printed_as_success_and_after_the_last_step_training_does_not_continue(
    monkeypatch,
):
    lines = []
    slept = []
    store = Recorded()
    monkeypatch.setattr(Recorded, "poll", lambda self, *, wait=False: outcomes.pop(0))
    monkeypatch.setattr(CheckpointSchedule, "FINAL_RETRY_WAITS_S", (5.0, 10.0))
    monkeypatch.setattr(time, "sleep", slept.append)
    full = WriteOutcome(step=9, failure="No space left on device")
    # before and after each of three attempts
    outcomes = [None, full, None, full, None, full]
    state = TrainState(master={}, opt_state={}, step=np.int32(0))
    meta = CheckpointMeta(config={}, model={}, data={}, step=9, rows_consumed=0, num_tokens_total=0)
    save = CheckpointSchedule(
        store, RunConfig(directory="x", steps=9), first_step=0, print_line=lines.append
    )
    save.save(state, meta, is_last=True)
    assert not lines, "the write has not ended yet"
    with pytest.raises(NeedsAttentionError, match="No space left on device"):
        save.finish(state, meta)
    assert (store.steps, slept, len(lines)) == ([9, 9, 9], [5.0, 10.0], 3)
    attempts = [re.findall(r"\d+ s\b", line) for line in lines]
    assert attempts == [["5 s"], ["10 s"], []], "and not `Training continues`, in 60 s"


@pytest.mark.slow
def test_a_write_that_fails_does_not_end_the_run_before_its_end(folder, monkeypatch):
    tried = []

    def fail(self, meta):
        tried.append(meta.step)
        raise OSError("no space left on device")

    monkeypatch.setattr(CheckpointWriter, "_finalize", fail)
    monkeypatch.setattr(CheckpointSchedule, "FINAL_RETRY_WAITS_S", (0.1, 0.1))
    with pytest.raises(
        NeedsAttentionError, match=messages.containing(6, "no space left on device")
    ):
        train(settings(folder, "run.save_every=4"))
    assert tried == [4, 6, 6, 6]
    assert not list((folder / "run/checkpoints").iterdir()), "what was written of them is removed"
    assert len((folder / "run/metrics.jsonl").read_text().splitlines()) == 6


@pytest.mark.e2e
def test_a_run_evaluates_by_epoch_and_stops_early(folder):
    """A run that learns ever worse: its best evaluation is the one before the first step."""

    def train_once(*more):
        console = rich.console.Console(file=io.StringIO(), width=200)
        words = [
            "run.steps=null",
            "run.epochs=9",
            "run.eval_at_start=true",
            "data.eval_fraction=0.3",
        ]
        words += ["run.eval_every=epoch", "run.save_every=epoch", "checkpoint.keep_latest=9"]
        words += [
            "run.early_stopping_patience=2",
            "optimizer.learning_rate=3",
            "optimizer.schedule=constant",
        ]
        material = build.build_training(settings(folder, *words, *more), devices=jax.devices()[:1])
        trainer.train(material, console)
        return console.file.getvalue()

    def steps():
        results = commands.read_lines(folder / "run/eval.jsonl")
        assert {line["data"] for line in results} == {"held_out"}
        saved = sorted(int(path.name) for path in (folder / "run/checkpoints").iterdir())
        return [line["step"] for line in results], saved, results[0]["num_documents"]

    (folder / "run").mkdir()
    (folder / "run/config.yaml").touch()
    (folder / "run/eval.jsonl").write_text(
        '{"step": 0}\n'
    )  # of a run that was killed before its first checkpoint
    lines = train_once()
    evaluated, saved, num_held_out = steps()
    assert 0 < num_held_out < 8
    epoch = 8 - num_held_out  # each document fills a row
    assert (evaluated, saved) == ([0, epoch, 2 * epoch], [epoch, 2 * epoch])
    reason = (f"step {2 * epoch}", "held_out", "run.early_stopping_patience = 2")
    assert re.search(messages.containing(*reason), lines)
    banner = messages.read_banner(folder / "run")
    held_out = (f"{num_held_out} document", f"{64 * num_held_out} tokens")
    assert re.search(messages.containing(*held_out), banner)
    assert re.search(messages.containing("epoch", "held_out", f"{num_held_out} documents"), banner)
    assert reader.read_meta(folder / f"run/checkpoints/{epoch}").early_stopping.num_since_best == 1

    assert re.search(messages.containing(*reason), train_once())
    train_once("run.early_stopping_patience=3")
    assert steps()[:2] == ([0, epoch, 2 * epoch, 3 * epoch], [epoch, 2 * epoch, 3 * epoch])
    with pytest.raises(UserError, match=messages.containing("data.eval_fraction = 0.5", 0.3)):
        train_once("data.eval_fraction=0.5")


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_that_broke_is_evaluated_no_more(folder):
    words = (f"data.eval=[{{source: {folder}/data.jsonl, format: tokens}}]", "run.eval_every=1")
    with pytest.raises(NeedsAttentionError, match=messages.containing("run.on_nonfinite=skip")):
        train(
            settings(folder, *words, "optimizer.learning_rate=1e30", "optimizer.max_grad_norm=null")
        )
    lines = commands.read_lines(folder / "run/metrics.jsonl")
    broken = next(line["step"] for line in lines if line["loss"] is None)
    results = commands.read_lines(folder / "run/eval.jsonl")
    assert [line["step"] for line in results] == list(range(1, broken))


@pytest.mark.slow  # system/test_run_lock.py locks the folder
@pytest.mark.e2e
def test_a_run_is_written_by_one_process_at_a_time(folder):
    train(settings(folder))
    before = (folder / "run/metrics.jsonl").read_text()
    says = messages.containing(f"run.directory = {folder}/run", "process")
    with filelock.FileLock(folder / "run/lock"), pytest.raises(UserError, match=says):
        train(settings(folder, "run.steps=8"))
    assert (folder / "run/metrics.jsonl").read_text() == before
    train(settings(folder, "run.steps=8"))


def test_the_best_checkpoints_are_kept_beside_the_latest(folder):
    """A run that learns ever worse: the lowest loss is that of its first checkpoint."""
    words = [
        f"data.eval=[{{source: {folder}/data.jsonl, format: tokens, name: held out}}]",
        "run.save_every=1",
    ]
    train(
        settings(
            folder,
            *words,
            "checkpoint.keep_best=1",
            "optimizer.learning_rate=3",
            "optimizer.schedule=constant",
        )
    )
    lines = commands.read_lines(folder / "run/eval.jsonl")
    losses = {line["step"]: line["loss"] for line in lines}
    assert list(losses) == [1, 2, 3, 4, 5, 6], "an evaluation precedes every checkpoint"
    best = min(losses, key=losses.get)
    kept = sorted(int(path.name) for path in (folder / "run/checkpoints").iterdir())
    assert kept == sorted({best, 5, 6})
    assert reader.read_meta(folder / f"run/checkpoints/{best}").eval_loss == losses[best]


def test_the_eval_set_that_ranks_checkpoints_must_exist(folder):
    evaluated = f"data.eval=[{{source: {folder}/data.jsonl, format: tokens, name: a}}]"
    says = messages.containing("checkpoint.best_eval = b", "a or null")
    with pytest.raises(UserError, match=says):
        settings(folder, evaluated, "checkpoint.keep_best=1", "checkpoint.best_eval=b")


@pytest.mark.slow
def test_a_checkpoint_is_whole_though_an_older_one_cannot_be_deleted(folder, monkeypatch, capfd):
    rename = pathlib.Path.rename

    def stuck(self, target):
        if str(target).endswith(DELETING_SUFFIX):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", stuck)
    train(settings(folder, "run.save_every=3", "checkpoint.keep_latest=1"))
    assert sorted(path.name for path in (folder / "run/checkpoints").iterdir()) == ["3", "6"]
    assert re.search(messages.containing("checkpoint 6", "[Errno 16]"), capfd.readouterr().err)


@pytest.mark.slow
@pytest.mark.e2e
def test_the_time_a_checkpoint_took_is_in_the_line_after_it(folder):
    train(settings(folder, "run.save_every=2"))
    lines = commands.read_lines(folder / "run/metrics.jsonl")
    assert [line["checkpoint_wait_s"] is not None for line in lines] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.slow
def test_a_run_without_a_checkpoint_begins_anew_and_says_so(folder):
    (folder / "run").mkdir()
    (folder / "run/config.yaml").touch()
    (folder / "run/metrics.jsonl").write_text('{"step": 3}\n')
    train(settings(folder))
    banner = messages.read_banner(folder / "run")
    assert re.search(messages.containing("seed 0", "checkpoint"), banner)
    lines = commands.read_lines(folder / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 7)]


@pytest.mark.slow
@pytest.mark.e2e
def test_a_stop_waits_for_no_evaluation(folder, monkeypatch):
    result = []
    monkeypatch.setattr(
        Preemption, "should_dispatch", lambda self, number: result.append(number) or number <= 4
    )
    words = (
        f"data.eval=[{{source: {folder}/data.jsonl, format: tokens}}]",
        "run.eval_every=2",
        "run.save_every=2",
    )
    train(settings(folder, *words))
    actual = [line["step"] for line in commands.read_lines(folder / "run/eval.jsonl")]
    assert actual == [2]
    assert result == [1, 2, 3, 3, 4, 5, 5]
    assert run_paths.find_latest(folder / "run").name == "4"
    # and none is missing when the run has gone on
    monkeypatch.undo()
    train(settings(folder, *words))
    actual = [line["step"] for line in commands.read_lines(folder / "run/eval.jsonl")]
    assert actual == [2, 4, 6]


@pytest.mark.slow
def test_checkpoint_of_a_stop_is_ranked_by_the_evaluation_that_follows(folder, monkeypatch):
    """A run that gets worse at every step, stopped after step 3.

    Neither a checkpoint nor an evaluation was due there.
    """
    words = [
        f"data.eval=[{{source: {folder}/data.jsonl, format: tokens, name: held out}}]",
        "checkpoint.keep_best=1",
    ]
    words += [
        "checkpoint.keep_latest=1",
        "optimizer.learning_rate=3",
        "optimizer.schedule=constant",
    ]
    monkeypatch.setattr(Preemption, "should_dispatch", lambda self, number: number <= 3)
    train(settings(folder, *words))
    meta = reader.read_meta(folder / "run/checkpoints/3")
    assert (meta.eval_loss, meta.has_pending_evaluation) == (None, True)
    monkeypatch.undo()
    train(settings(folder, *words))
    results = commands.read_lines(folder / "run/eval.jsonl")
    assert [line["step"] for line in results] == [3, 6]
    metas = [reader.read_meta(path) for path in sorted((folder / "run/checkpoints").iterdir())]
    actual = [(meta.step, meta.eval_loss, meta.has_pending_evaluation) for meta in metas]
    assert actual == [(3, results[0]["loss"], False), (6, results[1]["loss"], False)]
    assert metas[0].eval_loss < metas[1].eval_loss


def test_logged_lines_are_passed_on_and_garbage_is_collected_only_at_evaluations(folder):
    """From the end of the first step, until an error of the user's function ends the run."""
    lines = []
    is_automatic = []
    num_lines_at_collections = set()

    def receive(line):
        files = ("metrics.jsonl", "eval.jsonl")
        assert any(line in commands.read_lines(folder / "run" / file) for file in files)
        lines.append(dict(line))
        is_automatic.append(gc.isenabled())
        line.clear()  # the receiver's own copy
        if len(lines) == 6:
            raise ZeroDivisionError

    def watch(phase, info):
        if lines and phase == "start" and info["generation"] == 2:
            num_lines_at_collections.add(len(lines))

    words = [f"data.eval=[{{source: {folder}/data.jsonl, format: tokens}}]", "run.eval_every=2"]
    run = build.build_training(settings(folder, *words), devices=jax.devices()[:1])
    gc.callbacks.append(watch)
    try:
        with pytest.raises(ZeroDivisionError):
            trainer.train(run, rich.console.Console(quiet=True), on_line=receive)
    finally:
        gc.callbacks.remove(watch)
    found = [(line["step"], "data" in line) for line in lines]
    assert found == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    assert is_automatic == [True] + 5 * [False]
    assert num_lines_at_collections == {1, 3}, "after the first step, and after the evaluation"
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_where_nothing_is_evaluated_nothing_is_compiled_for_it(folder, monkeypatch):
    monkeypatch.setattr(train_step, "compile_forward", lambda *_: 1 / 0)
    train(settings(folder, "run.steps=2"))


@pytest.mark.slow
@pytest.mark.e2e
def test_a_step_counts_as_running_before_the_devices_have_it(folder, monkeypatch):
    """A stop that comes while it is being sent has to wait for it too."""
    compile_ = preflight.compile_step
    seen = []
    now = RunStatus()

    def watched(spec, console):
        step, seconds = compile_(spec, console)
        look = lambda *given: seen.append(now.num_dispatched) or step.executable(*given)
        return dataclasses.replace(step, executable=look), seconds

    monkeypatch.setattr(preflight, "compile_step", watched)
    chosen = settings(folder, "run.steps=3")
    material = build.build_training(chosen, devices=jax.devices()[:1])
    trainer.train(material, rich.console.Console(quiet=True), preemption=Preemption(now))
    assert seen == [1, 2, 3]
    assert now.num_dispatched == now.num_finished == 3


def test_steps_to_profile_that_the_run_does_not_have_are_refused(folder):
    says = messages.containing("logging.profile_steps = [5, 7]", "6 steps")
    with pytest.raises(UserError, match=says):
        train(settings(folder, "logging.profile_steps=[5, 7]"))


OTHERS = [
    ("nothing", []),
    ("train", ["data: books"]),
    ("eval", ["data: held out"]),
    ("step", ["run.directory = ", "0 or 4"]),
    ("config", ["config"]),
]


@pytest.mark.parametrize(("other", "says"), OTHERS)
def test_processes_with_different_data_or_configs_do_not_train_together(
    folder, monkeypatch, other, says
):
    """Two nodes with different files of equal lengths would mix halves of their rows.

    The losses would look normal.
    """
    one = {"source": f"{folder}/data.jsonl", "format": "tokens"}
    named = [
        f"data.train={json.dumps([{**one, 'name': 'books'}])}",
        f"data.eval={json.dumps([{**one, 'name': 'held out'}])}",
    ]
    material = build.build_training(settings(folder, *named), devices=jax.devices()[:1])
    lines = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda own: lines.append(own) or np.stack([own, own])
    )
    preflight.check_agreement(material)
    changed = {
        "nothing": {},
        "train": {"train_set": dataclasses.replace(material.train_set, digests=("z",))},
        "eval": {"eval_sets": (dataclasses.replace(material.eval_sets[0], digests=("z",)),)},
        "step": {"start": dataclasses.replace(material.start, step=4)},
        "config": {"config": settings(folder, *named, "run.seed=1")},
    }[other]
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack([lines[0], own]))
    says = messages.containing(*says) or None
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        preflight.check_agreement(dataclasses.replace(material, **changed))
