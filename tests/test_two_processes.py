"""Results of two processes, and how one that fails ends."""

import re
import time

import jax
import pytest
import rich.console

from jaxsp.run import build, config_file, trainer
from tests import batches, commands, messages, small_runs, tolerances, two_processes

pytestmark = pytest.mark.usefixtures("default_signals")


@pytest.mark.e2e
def test_two_processes_give_the_numbers_of_one(tmp_path):
    """Devices of both processes share each row."""
    check_two_processes_against_one(tmp_path, [("across", 1, 8)])


@pytest.mark.e2e
def test_two_processes_with_a_teacher_give_the_numbers_of_one(tmp_path):
    words = write_teacher(tmp_path)
    check_two_processes_against_one(tmp_path, [("across", 2, 4)], words)


@pytest.mark.slow
def test_two_processes_store_and_read_the_predictions_of_all_classes(tmp_path):
    """256 of 257 tokens, and the class of all others: the numbers are those of the teacher in the
    step of one process."""
    words = write_teacher(tmp_path)
    stored = [f"objective.predictions={tmp_path}/predictions", "objective.top_k=256"]
    config, _ = two_processes.write_config(tmp_path, name="across", data=2, seq=4)
    processes = two_processes.start("-m", "jaxsp.score", config, *words, *stored)
    outputs = two_processes.wait(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    check_two_processes_against_one(tmp_path, [("across", 2, 4)], words, stored)


def write_teacher(folder):
    """Writes a teacher. Returns: settings of a distillation from it."""
    teacher = batches.SMALL_LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 8}
    small_runs.write_model(folder / "teacher", teacher, std=0.4)
    return ["objective.type=distill", f"objective.teacher={folder}/teacher"]


@pytest.mark.slow
def test_a_row_inside_one_process_or_across_two_gives_the_same_numbers_also_after_resuming(
    tmp_path,
):
    check_two_processes_against_one(tmp_path, [("inside", 2, 4), ("across", 1, 8)])


def check_two_processes_against_one(tmp_path, meshes, words=(), words_of_two=()):
    """Compares two processes on each mesh with one process.

    Runs on the second mesh and later ones resume from step 2 of the first.
    Args: words: settings of all runs. words_of_two: more of those of two processes.
    """
    lines_by_mesh = {}
    first = meshes[0][0]
    for name, data, seq in meshes:
        config, metrics = two_processes.write_config(tmp_path, name=name, data=data, seq=seq)
        change = f"run.resume={tmp_path}/{first}/checkpoints/2"
        if name == first:
            change = "run.save_every=2"
        processes = two_processes.start("-m", "jaxsp.train", config, change, *words, *words_of_two)
        outputs = two_processes.wait(processes)
        assert [process.returncode for process in processes] == [0, 0], outputs
        lines_by_mesh[name] = commands.read_lines(metrics)
        assert "Tokenizing" not in str(outputs), "a progress bar without a terminal"
    config, metrics = two_processes.write_config(tmp_path, name="one", data=1, seq=8)
    inputs = build.build_training(config_file.load(config, words), devices=jax.devices())
    trainer.train(inputs, rich.console.Console(quiet=True))
    expected = commands.read_lines(metrics)
    assert [line["step"] for line in expected] == [1, 2, 3]
    for name, lines in lines_by_mesh.items():
        expected_lines = expected if name == first else expected[2:]
        for line, expected_line in zip(lines, expected_lines, strict=True):
            for field in (*commands.COUNTS, "learning_rate"):
                assert line[field] == expected_line[field], (name, field)
            for field in ("loss", "grad_norm", "token_accuracy"):
                value = pytest.approx(expected_line[field], rel=tolerances.MESH)
                assert line[field] == value, (name, field)


TORCHRUN_JOB = """
import os, pathlib, sys, jax
from jaxsp.system import distributed
distributed.initialize(distributed.detect_process(os.environ))
pathlib.Path(sys.argv[1], f"{jax.process_index()} of {jax.process_count()}").touch()
distributed.shutdown()
"""


@pytest.mark.e2e
def test_torchrun_starts_a_job(tmp_path):
    pytest.importorskip("torch", reason="torchrun is part of torch, which this Python has not")
    program = tmp_path / "job.py"
    program.write_text(TORCHRUN_JOB)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone")
    environment = {"XLA_FLAGS": "", "PYTHONPATH": ""}  # conftest.py hides torch there
    job = commands.start_python(*torchrun, program, tmp_path, env=environment)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 0, stderr
    assert {path.name for path in tmp_path.iterdir()} == {"job.py", "0 of 2", "1 of 2"}


@pytest.mark.slow
def test_an_error_that_both_processes_find_ends_both(tmp_path):
    config, _ = two_processes.write_config(tmp_path, name="run", data=2, seq=4)
    processes = two_processes.start("-m", "jaxsp.train", config, "mesh.data=3")
    for process, (stdout, stderr) in zip(processes, two_processes.wait(processes), strict=True):
        assert process.returncode == 2, stderr
        assert re.search(
            messages.containing("mesh.replica = 1, mesh.data = 3, mesh.seq = 4", 12, 8), stderr
        )
        assert "devices" not in stdout, "training did not start"


def test_one_of_several_processes_that_fails_prints_its_index_and_ends_immediately():
    # A running thread stands for JAX, which would wait for the others
    start_s = time.monotonic()
    failing = commands.start_python(
        "-c",
        """
import threading, time
from jaxsp import cli
from jaxsp.system import distributed
distributed.this_process = distributed.Process(index=3, num_processes=4)
threading.Thread(target=time.sleep, args=[100]).start()
cli.run_command(lambda _: 1 / 0)
""",
    )
    _, stderr = failing.communicate(timeout=60)
    assert failing.returncode == 1
    assert stderr.splitlines()[0] == "process 3: Traceback (most recent call last):"
    assert stderr.splitlines()[-1] == "process 3: ZeroDivisionError: division by zero"
    assert all(line.startswith("process 3: ") for line in stderr.splitlines())
    assert time.monotonic() - start_s < two_processes.ENDS_WITHIN_S
