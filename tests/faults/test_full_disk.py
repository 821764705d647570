"""A disk that is full during a save, or under the files of numbers, costs a run nothing but time."""

import contextlib
import io
import json
import pathlib
import re
import resource
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
import rich.console

from jaxsp.checkpoint.schedule import CheckpointSchedule
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.config import config_file
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.reporting.metrics import MetricsWriter
from jaxsp.reporting.progress import Progress
from jaxsp.run import build, trainer
from jaxsp.runtime import run_dir, run_paths
from jaxsp.runtime.jsonl import AppendFile
from tests import batches, messages

pytestmark = pytest.mark.e2e

STEPS = 16


def settings(folder, run, *words):
    random = np.random.default_rng(0)
    records = [json.dumps({"input_ids": random.integers(0, 257, 64).tolist()}) for _ in range(8)]
    source = folder / "data.jsonl"
    if not source.exists():  # a file that is written again is read again
        source.write_text("\n".join(records), encoding="utf-8")
    fields = {
        "run": {"directory": str(run), "steps": STEPS, "save_every": 2},
        "model": {"config": batches.SMALL_LLAMA, "compute_dtype": "float32"},
        "data": {"train": [{"source": str(source), "format": "tokens"}], "row_tokens": 64},
        "batch": {"rows_per_step": 1},
        "optimizer": {"learning_rate": 0.1},
        "checkpoint": {"keep_latest": 1},
    }
    return config_file.parse(fields, words)


def train(chosen):
    said = io.StringIO()
    program, material = build.build_training(chosen, devices=jax.devices()[:1])
    trainer.train(program, material, rich.console.Console(file=said, width=200))
    return said.getvalue()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk):
    """Takes all that is left when the first checkpoint is whole."""
    while run_paths.find_latest(disk / "run") is None:
        time.sleep(0.01)
    with (disk / "ballast").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return


def events(directory):
    """How many whole records TensorBoard's files hold."""
    number = 0
    for file in directory.iterdir():
        left = file.read_bytes()
        while left:
            length = int.from_bytes(left[:8], "little")
            assert len(left) >= length + 16, "half a record"
            left, number = left[length + 16 :], number + 1
    return number


def test_a_full_disk_costs_no_line_and_no_checkpoint_once_there_is_room(
    tmp_path, small_disk, monkeypatch, capfd
):
    """Full from step 3 to step 11: the saves of steps 4 to 10 fail; that of step 12 is whole."""
    write, whole = MetricsWriter.write_step, {}

    def fills(self, line):
        if 3 <= line.step < 11:  # again and again: a save that fails gives back its room
            fill(small_disk)
        if line.step == 11:
            whole["then"] = run_paths.find_latest(small_disk / "run").name
            (small_disk / "ballast").unlink()
        write(self, line)

    monkeypatch.setattr(MetricsWriter, "write_step", fills)
    said = train(settings(tmp_path, small_disk / "run"))
    assert whole["then"] == "2"
    assert re.search(messages.holding("checkpoint 4", "step 2"), said)
    failed = re.findall(r"checkpoint (\d+)\b.*No space left on device", said)
    assert failed == ["4", "6", "8", "10"]
    lines = [
        json.loads(line) for line in (small_disk / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert events(small_disk / "run/tensorboard") == STEPS + 2
    assert [path.name for path in (small_disk / "run/checkpoints").iterdir()] == [str(STEPS)]
    errors_said = capfd.readouterr().err
    full, again = [line for line in errors_said.splitlines() if "metrics.jsonl" in line]
    assert "No space left on device" in full
    assert "No space left on device" not in again
    assert "Traceback" not in errors_said
    monkeypatch.undo()
    # the same numbers as on a disk with room
    train(settings(tmp_path, tmp_path / "plain"))
    plain = [
        json.loads(line) for line in (tmp_path / "plain/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]


@pytest.mark.slow
def test_the_checkpoint_before_the_disk_was_full_is_gone_on_from(tmp_path, small_disk, monkeypatch):
    monkeypatch.setattr(CheckpointSchedule, "FINAL_RETRY_WAITS_S", (0.1, 0.1))
    write = MetricsWriter.write_step

    def fills(self, line):
        if line.step == 3:
            fill(small_disk)
        write(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write_step", fills)
        says = messages.holding(STEPS, "No space left on device", "step 2")
        with pytest.raises(NeedsAttentionError, match=says):
            train(settings(tmp_path, small_disk / "run"))
    (small_disk / "ballast").unlink()
    assert [path.name for path in (small_disk / "run/checkpoints").iterdir()] == ["2"]
    train(settings(tmp_path, small_disk / "run"))
    lines = [
        json.loads(line) for line in (small_disk / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))


@pytest.fixture
def small_files():
    """Call it with the bytes that a file may have; needs no mount."""
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, handler)


def test_records_that_find_no_room_wait_for_it_and_none_is_cut(tmp_path, small_files, capfd):
    given = [letter * 60_000 for letter in (b"a", b"b", b"c", b"d", b"e")]
    lines = AppendFile(tmp_path / "a")
    lines.add(given[0])
    small_files(100_000)
    for record in given[1:3]:
        lines.add(record)
        assert (tmp_path / "a").read_bytes() == given[0]
    with pytest.raises(OSError, match="No space left on device"):
        lines.sync()
    small_files(None)
    lines.add(given[3])
    lines.sync()
    assert (tmp_path / "a").read_bytes() == b"".join(given[:4])
    small_files(250_000)
    lines.add(given[4])
    lines.close()
    assert (tmp_path / "a").read_bytes() == b"".join(given[:4])
    full, again, full_again, lost = capfd.readouterr().err.splitlines()
    for line in (full, full_again):
        assert re.match(messages.holding(tmp_path / "a", "File too large"), line)
    assert "File too large" not in again
    assert re.match(messages.holding(tmp_path / "a", "60,000 bytes"), lost)


@pytest.mark.slow
def test_a_save_that_finds_no_room_is_tried_again(tmp_path, small_files, monkeypatch):
    save = CheckpointWriter.save

    def limited(self, state, meta):
        small_files(20_000 if meta.step == 4 else None)
        outcome = save(self, state, meta)
        if outcome is None:
            self._pending.future.exception()  # waits until it has ended
        small_files(None)
        return outcome

    monkeypatch.setattr(CheckpointWriter, "save", limited)
    said = train(settings(tmp_path, tmp_path / "run"))
    assert re.findall(r"checkpoint (\d+)\b.*File too large", said) == ["4"]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [str(STEPS)]


@pytest.mark.parametrize("file", ["metrics.jsonl", "events"])
def test_no_checkpoint_counts_a_step_whose_line_is_not_on_the_disk(tmp_path, monkeypatch, file):
    """A kill would lose it for ever, since the run goes on behind it."""
    settle, settled = AppendFile.sync, []

    def full_at_first(self):
        if self._path.name.startswith(file):
            settled.append(self._path)
            if len(settled) == 1:
                raise OSError(28, "No space left on device")
        settle(self)

    monkeypatch.setattr(AppendFile, "sync", full_at_first)
    said = train(settings(tmp_path, tmp_path / "run", "run.steps=4", "logging.tensorboard=true"))
    assert re.search(messages.holding("checkpoint 2", "[Errno 28]"), said)
    waits = re.findall(r"step (\d+) .*checkpoint.* \d+(?:\.\d)? s", said)
    assert waits == ["4"], "of the checkpoint that was written"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["4"]
    assert len(settled) == 2, "before each checkpoint"


@pytest.mark.parametrize("held", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_disk_that_is_full_at_the_beginning_is_named(tmp_path, monkeypatch, held):
    """The train command holds the folder from before it reads anything."""
    train(settings(tmp_path, tmp_path / "run", "run.steps=2"))
    longer = settings(tmp_path, tmp_path / "run", "run.steps=3")
    before = (tmp_path / "run/config.yaml").read_text()
    write = pathlib.Path.write_text

    def full(self, text, **how):
        if not self.is_relative_to(tmp_path / "run"):  # such as the cache of tokens
            return write(self, text, **how)
        write(self, text[:10], **how)
        raise OSError(28, "No space left on device")

    with run_dir.lock(tmp_path / "run") if held else contextlib.nullcontext():
        monkeypatch.setattr(pathlib.Path, "write_text", full)
        says = messages.holding(f"run.directory = {tmp_path}/run", "No space left on device")
        with pytest.raises(UserError, match=says):
            train(longer)
    assert (tmp_path / "run/config.yaml").read_text() == before


def test_a_log_on_a_full_disk_does_not_end_the_run():
    said = 0
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # to close it is to write it
        progress = Progress(rich.console.Console(file=full), first_step=0, num_steps=9)
        for number in range(3):
            progress.print_line(f"step {number}")
            said += 1
    assert said == 3
