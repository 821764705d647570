"""python -m jaxsp.launch: results of several processes, their errors, their end, and restarts."""

import os
import pathlib
import re
import signal
import time

import jax
import pytest
import rich.console

from jaxsp import launch
from jaxsp.config import config_file
from jaxsp.core import exit_codes
from jaxsp.core.errors import UserError
from jaxsp.processes import child_processes, cluster, hardware
from jaxsp.processes.cluster import Process
from jaxsp.processes.stderr_mux import PEER_LINE_DELAY_S
from jaxsp.run import trainer
from jaxsp.setup import build
from tests import commands, messages, tolerances

pytestmark = pytest.mark.usefixtures("default_signals")

ENDS_WITHIN_S = 30
"""Time limit from the failure of one process to the end of the launch."""

THREE_PROCESSES = """
import sys
from jaxsp import cli
from jaxsp.processes import child_processes, cluster, stderr_mux
fields = {"num_processes": 3, "coordinator": "127.0.0.1:1", "num_local_processes": 3}
processes = [cluster.Process(index=i, local_index=i, **fields) for i in range(3)]
def main(_):
    with child_processes.SignalForwarder() as signals:
        command = [sys.executable, "-c", sys.argv[1]]
        is_hung = child_processes.run_processes(command, processes, signals)
        if is_hung:
            print("hung")
cli.run_command(main)
"""
"""Program that runs another one in three processes, without JAX, so that they start quickly."""

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def log(*lines):
    print("\\n".join(lines), file=sys.stderr, flush=True)
"""
"""First lines of the program of each of the three."""


def run_three(program, *, launcher_program=THREE_PROCESSES):
    """Exit code, stdout and stderr of a launcher of three processes, and the seconds it took."""
    start_s = time.monotonic()
    # Not as text, which would replace \r by \n
    launcher = commands.start_python("-c", launcher_program, PREAMBLE + program, text=False)
    stdout, stderr = (output.decode() for output in launcher.communicate(timeout=60))
    return launcher.returncode, stdout, stderr, time.monotonic() - start_s


def write_config(folder, *, name, data, seq, steps=3, devices=8):
    """Writes the config of a small run. Returns its file and the run's metrics.jsonl."""
    folder.joinpath("texts").mkdir(exist_ok=True)
    for number, words in enumerate(("one ", "and another ", "the third of them ")):
        path = folder / f"texts/{number}.txt"
        if not path.exists():  # a file that is written again is tokenized again
            path.write_text(words * 40, encoding="utf-8")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    fields = {
        "run": {"directory": str(folder / name), "steps": steps},
        "model": {
            "config": {"model_type": "llama", "vocab_size": 257, "intermediate_size": 24, **sizes},
            "tokenizer": "bytes",
            "compute_dtype": "float32",
        },
        "mesh": {"data": data, "seq": seq, "virtual_cpu_devices": devices},
        "data": {
            "train": [{"source": str(folder / "texts/*.txt"), "format": "text"}],
            "row_tokens": 64,
        },
        "batch": {"rows_per_step": 2},
        "optimizer": {
            "name": "sgd",
            "learning_rate": 0.5,
            "schedule": "constant",
            "warmup_steps": 0,
        },
        "logging": {"trackers": []},
    }
    config_file.save(config_file.parse(fields), folder / f"{name}.yaml")
    return folder / f"{name}.yaml", folder / name / "metrics.jsonl"


@pytest.mark.e2e
def test_two_processes_give_the_numbers_of_one(tmp_path):
    """Devices of both processes share each row."""
    check_two_processes_against_one(tmp_path, [("across", 1, 8)])


@pytest.mark.slow
def test_a_row_inside_one_process_or_across_two_gives_the_same_numbers_also_after_resuming(
    tmp_path,
):
    check_two_processes_against_one(tmp_path, [("inside", 2, 4), ("across", 1, 8)])


def check_two_processes_against_one(tmp_path, meshes):
    """Compares two processes on each mesh with one process.

    Runs on the second mesh and later ones resume from step 2 of the first.
    """
    lines_by_mesh = {}
    first = meshes[0][0]
    for name, data, seq in meshes:
        config, metrics = write_config(tmp_path, name=name, data=data, seq=seq)
        change = f"run.resume={tmp_path}/{first}/checkpoints/2"
        if name == first:
            change = "run.save_every=2"
        launcher = commands.start_python("-m", "jaxsp.launch", "--processes", 2, config, change)
        _, stderr = launcher.communicate(timeout=300)
        assert launcher.returncode == 0, stderr
        lines_by_mesh[name] = commands.read_lines(metrics)
        assert "Tokenizing" not in stderr, "a progress bar without a terminal"
    config, metrics = write_config(tmp_path, name="one", data=1, seq=8)
    program, inputs = build.build_training(config_file.load(config, []), devices=jax.devices())
    trainer.train(program, inputs, rich.console.Console(quiet=True))
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
from jaxsp.processes import cluster, distributed
distributed.initialize(cluster.detect_process(os.environ))
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


@pytest.mark.e2e
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_ends_the_launch(tmp_path, victim):
    config, metrics = write_config(tmp_path, name="run", data=2, seq=4, steps=100_000)
    launcher = commands.start_python("-m", "jaxsp.launch", "--processes", 2, config)
    try:
        deadline = time.monotonic() + 200
        while not (metrics.exists() and metrics.read_text()):
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pids = {rank_of(pid): pid for pid in children(launcher.pid)}
        os.kill(pids[victim], signal.SIGKILL)
        kill_s = time.monotonic()
        _, stderr = launcher.communicate(timeout=100)
    finally:
        launcher.kill()
    assert time.monotonic() - kill_s < ENDS_WITHIN_S
    assert launcher.returncode == 128 + signal.SIGKILL
    assert re.search(messages.containing(f"process {victim}", "SIGKILL"), stderr)
    assert not any(is_alive(pid) for pid in pids.values())
    steps = [line["step"] for line in commands.read_lines(metrics)]
    assert steps == list(range(1, len(steps) + 1)), "each step once"


def children(pid):
    """Processes that a process has started."""
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def rank_of(pid):
    environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    return int(re.search(rb"(?:^|\0)RANK=(\d+)", environ)[1])


def is_alive(pid):
    """True if a process exists and is not a zombie."""
    try:
        return re.search(r"\) ([A-Z]) ", pathlib.Path(f"/proc/{pid}/stat").read_text())[1] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.e2e
def test_an_error_that_all_processes_find_is_printed_once(tmp_path):
    config, _ = write_config(tmp_path, name="run", data=2, seq=4)
    launcher = commands.start_python("-m", "jaxsp.launch", "--processes", 2, config, "mesh.data=3")
    stdout, stderr = launcher.communicate(timeout=100)
    assert launcher.returncode == 2, stderr
    error, end = stderr.splitlines()
    assert re.match(
        messages.containing("mesh.replica = 1, mesh.data = 3, mesh.seq = 4", 12, 8), error
    )
    assert re.search(messages.containing("2 processes", "exit code 2"), end)
    assert "devices" not in stdout, "training did not start"


@pytest.mark.e2e
def test_an_error_of_one_process_is_printed_with_its_index_and_ends_all():
    code, _, stderr, seconds = run_three("""
if rank == "2":
    log("a = 1: wrong here", "b = 2: wrong here too")
    sys.exit(2)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as JAX does
time.sleep(100)
""")
    assert code == 2
    assert stderr.splitlines() == [
        "process 2: a = 1: wrong here",
        "process 2: b = 2: wrong here too",
        "process 2 of 3 failed: exit code 2, and the others were ended",
    ]
    assert seconds < ENDS_WITHIN_S


@pytest.mark.e2e
def test_a_line_that_another_process_prints_later_is_not_left_out():
    short_delay = "import jaxsp.processes.stderr_mux as mux; mux.PEER_LINE_DELAY_S = 0.5\n"
    program = """
if rank == "0":
    log("early", "same time")
if rank == "1":
    log("same time")
    time.sleep(2)
    log("early")
"""
    launcher_program = short_delay + THREE_PROCESSES
    code, _, stderr, _ = run_three(program, launcher_program=launcher_program)
    assert code == 0
    assert stderr.splitlines() == ["early", "same time", "process 1: early"]


def test_one_of_several_processes_that_fails_prints_its_index_and_ends_immediately():
    # A running thread stands for JAX, which would wait for the others
    start_s = time.monotonic()
    failing = commands.start_python(
        "-c",
        """
import threading, time
from jaxsp import cli
from jaxsp.processes import cluster, distributed
distributed._this_process = cluster.Process(index=3, num_processes=4)
threading.Thread(target=time.sleep, args=[100]).start()
cli.run_command(lambda _: 1 / 0)
""",
    )
    _, stderr = failing.communicate(timeout=60)
    assert failing.returncode == 1
    assert stderr.splitlines()[0] == "process 3: Traceback (most recent call last):"
    assert stderr.splitlines()[-1] == "process 3: ZeroDivisionError: division by zero"
    assert all(line.startswith("process 3: ") for line in stderr.splitlines())
    assert time.monotonic() - start_s < ENDS_WITHIN_S


@pytest.mark.e2e
def test_output_of_jax_about_a_lost_process_does_not_hide_the_cause():
    code, _, stderr, _ = run_three("""
if rank == "1":
    log("E0101 12:00:00 agent.cc:289] an error of its own")
    time.sleep(0.2)
if rank == "0":
    time.sleep(0.2)
    log("Traceback (most recent call last):", "ValueError: the cause")
    sys.exit(1)
if rank == "1":
    time.sleep(0.5)
    log("E0101 12:00:00 agent.cc:289] Polled an error from coordination service")
    log("F0101 client.h:80] Terminating", "@ 0x7f32")
    os.abort()
time.sleep(100)
""")
    assert code == 1
    assert stderr.splitlines() == [
        "Traceback (most recent call last):",
        "ValueError: the cause",
        "process 1: E0101 12:00:00 agent.cc:289] an error of its own",
        "process 0 of 3 failed: exit code 1, and the others were ended",
    ]


def test_only_process_0_prints_to_the_terminal():
    code, stdout, stderr, _ = run_three("""
print("out of", rank, flush=True)
log("\\rat 10 %\\rat 100 % of " + rank, "warned")
""")
    assert code == 0
    assert stdout == "out of 0\n"
    first, *others = stderr.split("\n")
    assert first == "\rat 10 %\rat 100 % of 0"
    assert others[0] == "warned"
    assert sorted(others[1:]) == ["", "process 1: at 100 % of 1", "process 2: at 100 % of 2"]


def test_a_launched_process_detects_its_place_in_the_job():
    _, stdout, _, _ = run_three("""
from jaxsp.processes import cluster
print(cluster.detect_process(os.environ))
""")
    process = Process(
        index=0, num_processes=3, coordinator="127.0.0.1:1", local_index=0, num_local_processes=3
    )
    assert stdout == f"{process}\n"


def test_no_process_is_left_when_the_launcher_is_gone():
    launcher = commands.start_python("-c", THREE_PROCESSES, PREAMBLE + "time.sleep(100)")
    pids = wait_for_three(launcher)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate(timeout=10)
    time.sleep(0.5)
    assert not any(is_alive(pid) for pid in pids)


def wait_for_three(launcher):
    """Process ids of the three processes of a launcher that has just started."""
    wait_until(lambda: len(children(launcher.pid)) == 3)
    return children(launcher.pid)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGHUP, 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_reaches_the_processes(tmp_path, number, code):
    program = f"""
signal.signal({number:d}, lambda *_: (Path("{tmp_path}", rank).touch(), sys.exit({code})))
time.sleep(100)
"""
    launcher = commands.start_python("-c", THREE_PROCESSES, PREAMBLE + program)
    pids = wait_for_three(launcher)
    time.sleep(0.5)
    launcher.send_signal(number)
    launcher.communicate(timeout=20)
    assert launcher.returncode == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.e2e
def test_a_shutdown_may_take_long_and_is_not_a_failure(tmp_path):
    # Process 0 receives the signal before it can handle it
    program = f"""
def handle(*_):
    time.sleep({PEER_LINE_DELAY_S} + 2)
    Path("{tmp_path}", rank).touch()
    sys.exit(0)
if rank != "0":
    signal.signal(signal.SIGTERM, handle)
Path("{tmp_path}", "ready" + rank).touch()
time.sleep(100)
"""
    launcher = commands.start_python("-c", THREE_PROCESSES, PREAMBLE + program)
    wait_until(lambda: len([*tmp_path.iterdir()]) == 3)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)  # srun sends it to all
    _, stderr = launcher.communicate(timeout=20)
    assert launcher.returncode == 0, stderr
    assert (tmp_path / "1").exists()
    assert (tmp_path / "2").exists()


def test_a_second_signal_kills(tmp_path):
    program = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("{tmp_path}", rank).touch()
time.sleep(100)
"""
    launcher = commands.start_python("-c", THREE_PROCESSES, PREAMBLE + program)
    pids = wait_for_three(launcher)
    wait_until(lambda: len([*tmp_path.iterdir()]) == 3)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.3)
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert stderr.splitlines()[-1] == "killed by a second SIGTERM"
    assert not any(is_alive(pid) for pid in pids)


LOST_PEER = """
log("E0101 Polled an error from coordination service", "F0101 client.h:80] Terminating")
os.abort()
"""


@pytest.mark.parametrize(
    ("program", "is_hung"),
    [
        ('sys.exit(75 if rank == "1" else 1)', True),
        (LOST_PEER, False),
        pytest.param("os.abort()", False, marks=pytest.mark.slow),
        pytest.param("sys.exit(1)", False, marks=pytest.mark.slow),
        pytest.param("", False, marks=pytest.mark.slow),
    ],
)
def test_only_a_job_that_hangs_is_to_be_started_again(program, is_hung):
    _, stdout, stderr, _ = run_three(program)
    assert (stdout == "hung\n") == is_hung, stderr


def test_restarts_in_a_row_without_a_new_checkpoint_are_counted(tmp_path, monkeypatch, capfd):
    launched = []

    def run_processes(command, processes, signals):
        launched.append(command)
        if len(launched) == 3:
            (tmp_path / "run/checkpoints/7").mkdir(parents=True)
        return True

    monkeypatch.setattr(child_processes, "run_processes", run_processes)
    # A run that must not resume at first does so when it is started again
    changes = [f"run.directory={tmp_path}/run", "run.resume=never"]
    options = ["--processes", "2", "--restarts", "2"]
    with pytest.raises(SystemExit) as error:
        launch.main([*options, "configs/quickstart.yaml", *changes])
    assert error.value.code == exit_codes.HUNG
    assert len(launched) == 5, "once, two restarts, and two after the new checkpoint"
    assert ["run.resume=auto" in command for command in launched] == [False, True, True, True, True]
    restart, end = capfd.readouterr().err.splitlines()[-2:]
    assert re.search(messages.containing("checkpoint", "step 7"), restart)
    assert re.search(messages.containing("2 restarts"), end)


@pytest.mark.parametrize(
    ("arguments", "environ", "num_gpus", "parts"),
    [
        ("", {}, 0, ["--processes: ", "--processes 2"]),
        ("--processes 9", {}, 8, ["--processes = 9: ", 1, 8]),
        ("--processes 0", {}, 0, ["--processes = 0: ", 1]),
        ("--nodes 2 --node 2 --coordinator a:1", {}, 8, ["--node = 2: ", 0, 1]),
        ("--nodes 2", {}, 8, ["--nodes = 2: ", "--coordinator"]),
        ("", {"SLURM_STEP_NUM_TASKS": "8"}, 8, ["SLURM_STEP_NUM_TASKS = 8: "]),
        ("--nodes 2 --coordinator a", {}, 8, ["--coordinator = a: ", "port"]),
    ],
)
def test_invalid_arguments_are_refused(monkeypatch, arguments, environ, num_gpus, parts):
    monkeypatch.setattr(hardware, "count_gpus", lambda _: num_gpus)
    monkeypatch.setattr(os, "environ", environ)
    with pytest.raises(UserError, match=messages.containing(*parts)):
        launch.main([*arguments.split(), "configs/quickstart.yaml", "run.steps=1"])


@pytest.fixture
def plan(monkeypatch):
    """Function that returns the processes that launch starts on a node with four GPUs."""
    jobs = []

    def run_processes(command, processes, signals):
        jobs.append(processes)

    monkeypatch.setattr(child_processes, "run_processes", run_processes)
    monkeypatch.setattr(hardware, "count_gpus", lambda _: 4)

    def plan_processes(options):
        launch.main([*options.split(), "--coordinator", "node-0:29500", "configs/quickstart.yaml"])
        return jobs.pop()

    return plan_processes


def test_a_large_job_has_one_process_per_node(plan):
    assert plan("--nodes 17 --node 3 --processes 4")[0].num_processes == 68
    assert plan("--nodes 16 --node 3")[0].num_processes == 64
    (process,) = plan("--nodes 17 --node 3")
    assert (process.index, process.num_processes) == (3, 17)
    assert cluster.choose_local_gpus(process, 4) is None, "it uses all GPUs"


def test_one_launch_per_node_makes_one_job(plan):
    (first, second) = (plan(f"--nodes 2 --node {node}") for node in (0, 1))
    assert [process.index for process in first + second] == list(range(8))
    assert [process.local_index for process in second] == [0, 1, 2, 3]
    for process in first + second:
        assert process.num_processes == 8
        assert process.num_local_processes == 4
        assert process.coordinator == "node-0:29500"
