"""A run whose output cannot be written: it ends as without, with the same numbers."""

import signal
import subprocess
import time

import pytest
import yaml

from tests import batches, commands, small_runs

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("default_signals")]

NUM_STEPS = 6


def start(folder, name, **options):
    """Starts a run that prints a line after every second step."""
    run = {"directory": str(folder / name), "steps": NUM_STEPS, "eval_every": 2, "save_every": 2}
    config = small_runs.make_fields(
        folder,
        run=run,
        model={"config": batches.SMALL_LLAMA},
        mesh={"virtual_cpu_devices": 1},
        data={"eval": [{"source": str(folder / "train.jsonl"), "format": "tokens"}]},
        batch={"rows_per_step": 2},
    )
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    return commands.start_python("-m", "jaxsp.train", file, **options)


def read_numbers(directory):
    """Losses and the like of a run, by step."""
    lines = commands.read_lines(directory / "metrics.jsonl")
    numbers = [[line[name] for name in ("step", "loss", "grad_norm")] for line in lines]
    evals = [line["loss"] for line in commands.read_lines(directory / "eval.jsonl")]
    return numbers, evals


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Folder with the data, and the numbers of a run."""
    folder = tmp_path_factory.mktemp("output")
    commands.write_documents(folder / "train.jsonl", [64] * 4)
    process = start(folder, "undisturbed", stdout=subprocess.DEVNULL)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return folder, read_numbers(folder / "undisturbed")


def test_a_reader_that_ends_does_not_end_the_run(undisturbed):
    """It ends while a checkpoint is written."""
    folder, expected = undisturbed
    directory = folder / "lost"
    with start(folder, "lost", stderr=subprocess.STDOUT) as process:
        wait_until(lambda: any(directory.glob("checkpoints/*.partial")), process)
        process.stdout.close()
        assert process.wait(300) == 0
    assert read_numbers(directory) == expected
    assert (directory / "checkpoints" / str(NUM_STEPS)).is_dir()


def test_a_terminal_that_closes_stops_the_run_after_a_checkpoint(undisturbed):
    """Its output fails, and it gets SIGHUP."""
    folder, (numbers, evals) = undisturbed
    directory = folder / "hangup"
    with start(folder, "hangup", stderr=subprocess.STDOUT) as process:
        file = directory / "metrics.jsonl"
        wait_until(lambda: file.exists() and file.stat().st_size, process)
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        assert process.wait(300) == 0
    seen, seen_evals = read_numbers(directory)
    assert seen == numbers[: len(seen)]
    assert seen_evals == evals[: len(seen_evals)]
    assert (directory / "checkpoints" / str(len(seen))).is_dir()


def wait_until(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
