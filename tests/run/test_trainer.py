"""When checkpoints are due, and what is left of a run that breaks."""

import dataclasses
import gc
import re
import time

import jax
import numpy as np
import pytest
import rich.console

from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.writer import CheckpointWriter, WriteOutcome
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.run import build, config_file, trainer
from jaxsp.run.config_file import RunConfig
from jaxsp.run.schedule import CheckpointSchedule
from jaxsp.system.preemption import Preemption
from jaxsp.training.train_state import TrainState
from tests import batches, commands, messages
from tests.small_runs import make_fields, train

STATE = TrainState(master={}, opt_state={}, step=np.int32(0))
META = CheckpointMeta(config={}, model={}, data={}, step=9, rows_consumed=0, num_tokens_total=0)

WORSE = ("optimizer.learning_rate=3", "optimizer.schedule=constant")
"""A run that gets worse at every step."""


def settings(folder, *words):
    sections = {
        "run": {"steps": 6, "save_every": None},
        "model": {"config": batches.SMALL_LLAMA},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    return config_file.parse(make_fields(folder, "data.jsonl", **sections), words)


def eval_set(folder):
    return f"data.eval=[{{source: {folder}/data.jsonl, format: tokens, name: held out}}]"


def list_checkpoints(folder):
    return sorted(int(path.name) for path in (folder / "run/checkpoints").iterdir())


def read_eval_steps(folder):
    return [line["step"] for line in commands.read_lines(folder / "run/eval.jsonl")]


@pytest.fixture
def folder(tmp_path):
    commands.write_documents(tmp_path / "data.jsonl", [64] * 8)
    return tmp_path


class Recorded(CheckpointWriter):
    """Writes nothing, notes the steps, and returns the given outcomes, one at each poll."""

    steps = ()
    is_uploading = False

    def __init__(self, *outcomes):
        self.steps = []
        self.outcomes = [*outcomes]

    def save(self, state, meta):
        self.steps.append(meta.step)

    def poll(self, *, wait=False):
        return self.outcomes.pop(0) if self.outcomes else None


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def make_schedule(writer, lines=None, first_step=0, **fields):
    config = RunConfig(directory="x", steps=9, **fields)
    lines = [] if lines is None else lines
    return CheckpointSchedule(writer, config, first_step=first_step, print_line=lines.append)


def test_minutes_count_from_the_last_checkpoint(clock):
    writer = Recorded()
    schedule = make_schedule(writer, save_every="2m")
    due = []
    for step in range(1, 9):
        clock[0] += 50
        if schedule.is_due(step):
            due.append(step)
            schedule.save(STATE, dataclasses.replace(META, step=step))
    assert due == writer.steps == [3, 6], "after 150 s, the first step's end past 120"


def test_a_failed_write_is_reported_at_the_next_step_and_tried_again_in_a_minute(clock):
    lines = []
    full = WriteOutcome(step=2, failure="no space left on device")
    writer = Recorded(full, None, WriteOutcome(step=3, failure=None))
    schedule = make_schedule(writer, lines, first_step=1)
    schedule.poll()
    (failed,) = lines
    assert re.match(messages.containing("checkpoint 2", "no space left on device", "60 s"), failed)
    clock[0] += 59
    schedule.poll()
    assert not schedule.is_due(3)
    clock[0] += 2
    assert schedule.is_due(4)
    schedule.poll()
    written, waited = lines[1:]
    assert re.match(messages.containing("checkpoint 3"), written)
    assert re.match(messages.containing("step 3", "0 s"), waited)
    assert (schedule.last_saved_step, schedule.is_due(4)) == (3, False)


def test_an_upload_holds_the_next_checkpoint_and_its_failure_ends_the_run_after_one_more():
    failed = WriteOutcome(step=2, failure=None, upload_failure="the store is gone")
    writer = Recorded(failed, None, WriteOutcome(step=3, failure=None))
    schedule = make_schedule(writer, save_every=2)
    writer.is_uploading = True
    assert not schedule.is_due(2)
    writer.is_uploading = False
    assert schedule.is_due(2)
    schedule.poll()
    assert schedule.is_due(3)
    schedule.save(STATE, META)
    with pytest.raises(NeedsAttentionError, match="the store is gone"):
        schedule.poll()


def test_after_the_last_step_failed_writes_are_tried_a_few_times(monkeypatch):
    lines = []
    slept = []
    monkeypatch.setattr(CheckpointSchedule, "FINAL_RETRY_WAITS_S", (5.0, 10.0))
    monkeypatch.setattr(time, "sleep", slept.append)
    full = WriteOutcome(step=9, failure="No space left on device")
    # before and after each of three attempts
    writer = Recorded(None, full, None, full, None, full)
    schedule = make_schedule(writer, lines)
    schedule.save(STATE, META, is_last=True)
    assert not lines, "the write has not ended yet"
    with pytest.raises(NeedsAttentionError, match="No space left on device"):
        schedule.finish(STATE, META)
    assert (writer.steps, slept) == ([9, 9, 9], [5.0, 10.0])
    attempts = [re.findall(r"\d+ s\b", line) for line in lines]
    assert attempts == [["5 s"], ["10 s"], []], "and not `Training continues`, in 60 s"


@pytest.mark.e2e
def test_a_run_evaluates_by_epoch_and_stops_early(folder):
    """Its best evaluation is the one before the first step."""

    def train_once(*more):
        console = rich.console.Console(file=None, width=200)
        words = ["run.steps=null", "run.epochs=9", "run.eval_at_start=true", *WORSE]
        words += ["run.eval_every=epoch", "run.save_every=epoch", "checkpoint.keep_latest=9"]
        words += ["data.eval_fraction=0.3", "run.early_stopping_patience=2", *more]
        run = build.build_training(settings(folder, *words), devices=jax.devices()[:1])
        with console.capture() as capture:
            trainer.train(run, console)
        return capture.get()

    (folder / "run").mkdir()
    (folder / "run/config.yaml").touch()
    # of a run that was killed before its first checkpoint
    (folder / "run/eval.jsonl").write_text('{"step": 0}\n')
    text = train_once()
    results = commands.read_lines(folder / "run/eval.jsonl")
    assert {line["data"] for line in results} == {"held_out"}
    num_held_out = results[0]["num_documents"]
    assert 0 < num_held_out < 8
    epoch = 8 - num_held_out  # each document fills a row
    assert read_eval_steps(folder) == [0, epoch, 2 * epoch]
    assert list_checkpoints(folder) == [epoch, 2 * epoch]
    reason = (f"step {2 * epoch}", "held_out", "run.early_stopping_patience = 2")
    assert re.search(messages.containing(*reason), text)
    banner = messages.read_banner(folder / "run")
    assert re.search(messages.containing("epoch", "held_out", f"{num_held_out} documents"), banner)
    assert reader.read_meta(folder / f"run/checkpoints/{epoch}").early_stopping.num_since_best == 1
    assert re.search(messages.containing(*reason), train_once())
    train_once("run.early_stopping_patience=3")
    assert read_eval_steps(folder) == [0, epoch, 2 * epoch, 3 * epoch]
    with pytest.raises(UserError, match=messages.containing("data.eval_fraction = 0.5", 0.3)):
        train_once("data.eval_fraction=0.5")


def test_the_best_checkpoints_are_kept_beside_the_latest(folder):
    words = ["run.save_every=1", "checkpoint.keep_best=1", *WORSE]
    train(settings(folder, eval_set(folder), *words))
    lines = commands.read_lines(folder / "run/eval.jsonl")
    losses = {line["step"]: line["loss"] for line in lines}
    assert list(losses) == [1, 2, 3, 4, 5, 6], "an evaluation precedes every checkpoint"
    best = min(losses, key=losses.get)
    assert list_checkpoints(folder) == sorted({best, 5, 6})
    assert reader.read_meta(folder / f"run/checkpoints/{best}").eval_loss == losses[best]


@pytest.mark.slow
@pytest.mark.e2e
def test_a_stop_waits_for_no_evaluation(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(
        Preemption, "should_dispatch", lambda self, step: asked.append(step) or step <= 4
    )
    words = (eval_set(folder), "run.eval_every=2", "run.save_every=2")
    train(settings(folder, *words))
    assert read_eval_steps(folder) == [2]
    assert asked == [1, 2, 3, 3, 4, 5, 5]
    assert run_paths.find_latest(folder / "run").name == "4"
    # and none is missing when the run has gone on
    monkeypatch.undo()
    train(settings(folder, *words))
    assert read_eval_steps(folder) == [2, 4, 6]


@pytest.mark.slow
def test_the_checkpoint_of_a_stop_is_ranked_by_the_evaluation_that_follows(folder, monkeypatch):
    """Neither a checkpoint nor an evaluation was due after step 3."""
    words = [eval_set(folder), "checkpoint.keep_best=1", "checkpoint.keep_latest=1", *WORSE]
    monkeypatch.setattr(Preemption, "should_dispatch", lambda self, step: step <= 3)
    train(settings(folder, *words))
    meta = reader.read_meta(folder / "run/checkpoints/3")
    assert (meta.eval_loss, meta.has_pending_evaluation) == (None, True)
    monkeypatch.undo()
    train(settings(folder, *words))
    results = commands.read_lines(folder / "run/eval.jsonl")
    assert read_eval_steps(folder) == [3, 6]
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

    words = [eval_set(folder), "run.eval_every=2"]
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


def test_waits_for_checkpoints_add_up_until_the_next_line(folder, monkeypatch):
    monkeypatch.setattr(CheckpointSchedule, "save", lambda *_, **__: 1.5)
    train(settings(folder, "run.save_every=1", "run.log_every=3"))
    lines = commands.read_lines(folder / "run/metrics.jsonl")
    waits = {line["step"]: line["checkpoint_wait_s"] for line in lines}
    assert waits == {3: 2 * 1.5, 6: 3 * 1.5}, "after steps 1 and 2; after steps 3, 4 and 5"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["logging.profile_steps=[5, 7]"], ["logging.profile_steps = [5, 7]", "6 steps"]),
        (
            ["checkpoint.keep_best=1", "checkpoint.best_eval=b"],
            ["checkpoint.best_eval = b", "held out or null"],
        ),
    ],
)
def test_what_the_run_does_not_have_is_refused(folder, words, parts):
    with pytest.raises(UserError, match=messages.containing(*parts)):
        train(settings(folder, eval_set(folder), *words))
