"""A disk that is full during a save, or under metrics.jsonl, costs a run only time."""

import io
import re
import resource
import signal
import subprocess
import time

import jax
import pytest
import rich.console

from jaxsp.checkpoint import run_paths
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.run import build, config_file, trainer
from jaxsp.run.metrics import MetricsWriter
from jaxsp.system import run_lock
from jaxsp.system.jsonl import AppendFile
from tests import batches, commands, messages, small_runs

pytestmark = pytest.mark.e2e

NUM_STEPS = 16


def make_config(folder, directory, *changes):
    source = folder / "train.jsonl"
    if not source.exists():  # a file that is written again is tokenized again
        commands.write_documents(source, [64] * 8)
    fields = small_runs.make_fields(
        folder,
        run={"directory": str(directory), "steps": NUM_STEPS, "save_every": 2},
        model={"config": batches.SMALL_LLAMA},
        checkpoint={"keep_latest": 1},
        logging={"trackers": ["tensorboard"]},
    )
    return config_file.parse(fields, changes)


def train(config):
    """Trains on one device. Returns the output."""
    output = io.StringIO()
    inputs = build.build_training(config, devices=jax.devices()[:1])
    trainer.train(inputs, rich.console.Console(file=output, width=200))
    return output.getvalue()


@pytest.fixture
def small_disk(tmp_path):
    """Folder of a file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {result.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk):
    """Fills the disk as soon as the first checkpoint is complete."""
    while run_paths.find_latest(disk / "run") is None:
        time.sleep(0.01)
    with (disk / "ballast").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return


def count_records(directory):
    """Number of complete records in TensorBoard's files."""
    count = 0
    for file in directory.iterdir():
        content = file.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            assert len(content) >= length + 16, "half a record"
            content = content[length + 16 :]
            count += 1
    return count


def read_metrics(directory):
    return commands.read_lines(directory / "metrics.jsonl")


def checkpoint_names(directory):
    return [path.name for path in (directory / "checkpoints").iterdir()]


# orbax reports errors of writes after they are over
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_costs_no_line_and_no_checkpoint_once_there_is_space(
    tmp_path, small_disk, monkeypatch, capfd
):
    """Full from step 3 to step 11: the saves of steps 4 to 10 fail; that of step 12 is complete."""
    directory = small_disk / "run"
    write = MetricsWriter.write
    latest_when_full = []

    def write_to_full_disk(self, name, line):
        if 3 <= line["step"] < 11:  # repeatedly, since a save that fails frees its space
            fill(small_disk)
        if line["step"] == 11:
            latest_when_full.append(run_paths.find_latest(directory).name)
            (small_disk / "ballast").unlink()
        write(self, name, line)

    monkeypatch.setattr(MetricsWriter, "write", write_to_full_disk)
    output = train(make_config(tmp_path, directory))
    assert latest_when_full == ["2"]
    assert re.search(messages.containing("checkpoint 4", "step 2"), output)
    failed = re.findall(r"checkpoint (\d+)\b.*No space left on device", output)
    assert failed == ["4", "6", "8", "10"]
    lines = read_metrics(directory)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert count_records(directory / "tensorboard") == NUM_STEPS + 2
    assert checkpoint_names(directory) == [str(NUM_STEPS)]
    stderr = capfd.readouterr().err
    full, written = [line for line in stderr.splitlines() if "metrics.jsonl" in line]
    assert "No space left on device" in full
    assert "No space left on device" not in written
    assert "Traceback" not in stderr
    monkeypatch.undo()
    # The same numbers as on a disk with space
    train(make_config(tmp_path, tmp_path / "plain"))
    expected = read_metrics(tmp_path / "plain")
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected]


@pytest.fixture
def limit_file_size():
    """Function that limits the bytes of each file; needs no mount."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, handler)


def test_records_wait_for_space_and_none_is_cut(tmp_path, limit_file_size, capfd):
    path = tmp_path / "a"
    records = [letter * 60_000 for letter in (b"a", b"b", b"c", b"d", b"e")]
    file = AppendFile(path)
    file.add(records[0])
    limit_file_size(100_000)
    for record in records[1:3]:
        file.add(record)
        assert path.read_bytes() == records[0]
    with pytest.raises(OSError, match="File too large, in writing a"):
        file.sync()
    limit_file_size(None)
    file.add(records[3])
    file.sync()
    assert path.read_bytes() == b"".join(records[:4])
    limit_file_size(250_000)
    file.add(records[4])
    file.close()
    assert path.read_bytes() == b"".join(records[:4])
    full, written, full_again, lost = capfd.readouterr().err.splitlines()
    for line in (full, full_again):
        assert re.match(messages.containing(path, "File too large"), line)
    assert "File too large" not in written
    assert re.match(messages.containing(path, "60,000 bytes"), lost)


@pytest.mark.slow
def test_no_checkpoint_is_written_before_the_lines_of_its_steps(tmp_path, monkeypatch):
    """A kill would lose such a line forever, since the run resumes after it."""
    sync = AppendFile.sync
    synced = []

    def fail_once(self):
        if self._path.name.startswith("metrics.jsonl"):
            synced.append(self._path)
            if len(synced) == 1:
                raise OSError(28, "No space left on device")
        sync(self)

    monkeypatch.setattr(AppendFile, "sync", fail_once)
    output = train(make_config(tmp_path, tmp_path / "run", "run.steps=4"))
    assert re.search(messages.containing("checkpoint 2", "[Errno 28]"), output)
    waits = re.findall(r"step (\d+) .*checkpoint.* \d+(?:\.\d)? s", output)
    assert waits == ["4"], "only the checkpoint that was written"
    assert checkpoint_names(tmp_path / "run") == ["4"]
    assert len(synced) == 2, "before each checkpoint"


@pytest.mark.slow
def test_the_error_names_a_disk_that_is_full_at_the_start(tmp_path, monkeypatch):
    """The train command locks the folder before it reads anything."""
    directory = tmp_path / "run"
    train(make_config(tmp_path, directory, "run.steps=2"))
    config = make_config(tmp_path, directory, "run.steps=3")
    before = (directory / "config.yaml").read_text()
    write_atomic = files.write_atomic

    def write_to_full_disk(path, text, **options):
        if not path.is_relative_to(directory):  # such as the cache of tokens
            return write_atomic(path, text, **options)
        path.with_name(f"{path.name}{files.PARTIAL_SUFFIX}").write_text(text[:10])
        raise OSError(28, "No space left on device")

    with run_lock.lock(directory):
        monkeypatch.setattr(files, "write_atomic", write_to_full_disk)
        parts = messages.containing(f"run.directory = {directory}", "No space left on device")
        with pytest.raises(UserError, match=parts):
            train(config)
    assert (directory / "config.yaml").read_text() == before
