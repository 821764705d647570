"""Several processes: the numbers of one, an answer to every mistake once, and an end for all when one fails."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import pytest
import rich.console

from jaxsp import launch
from jaxsp.config import schema
from jaxsp.core.errors import UserError
from jaxsp.run import build, trainer
from jaxsp.runtime import distributed, hardware
from jaxsp.runtime.cluster import Process
from tests import messages, noise, tolerances

pytestmark = pytest.mark.usefixtures("hearing")

REPO = pathlib.Path(__file__).parent.parent

COUNTS = (
    "step",
    "epoch",
    "num_rows",
    "num_tokens",
    "num_loss_tokens",
    "num_tokens_total",
    "padding_fraction",
    "learning_rate",
)

ENDS_WITHIN_S = 30
"""From the failure of one process to the end of the launch."""

PROCESSES = """
import sys
from jaxsp import cli, launch
from jaxsp.runtime import cluster
places = {"num_processes": 3, "coordinator": "127.0.0.1:1", "num_local_processes": 3}
job = [cluster.Process(index=i, local_index=i, **places) for i in range(3)]
def main(_):
    with launch._SignalForwarder() as orders:
        launch.run_processes([sys.executable, "-c", sys.argv[1]], job, orders)
cli.run_command(main)
"""
"""Three processes without JAX, which begin at once."""

BEGINNING = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def say(*lines):
    print("\\n".join(lines), file=sys.stderr, flush=True)
"""


def start(*words, **options):
    """Python with these arguments, in the repository, what it prints kept."""
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=REPO, **kept)


def three(program):
    """Exit code, stdout and stderr of three processes, and the seconds that they took."""
    began = time.monotonic()
    launcher = start(
        "-c", PROCESSES, BEGINNING + program, text=False
    )  # as text, \r would become \n
    printed, said = (kept.decode() for kept in launcher.communicate(timeout=60))
    return launcher.returncode, printed, said, time.monotonic() - began


def settings(folder, *, name, data, seq, steps=3, devices=8):
    """A small run from text, saved as a file for the command."""
    folder.joinpath("texts").mkdir(exist_ok=True)
    for number, words in enumerate(("one ", "and another ", "the third of them ")):
        if not (
            path := folder / f"texts/{number}.txt"
        ).exists():  # written again, it would be another text
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
        "logging": {"tensorboard": False},
    }
    schema.save(schema.parse(fields), folder / f"{name}.yaml")
    return folder / f"{name}.yaml", folder / name / "metrics.jsonl"


def lines(metrics):
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


@pytest.mark.e2e
def test_two_processes_give_the_numbers_of_one(tmp_path):
    """Devices of both processes share each row."""
    compare_processes(tmp_path, [("across", 1, 8)])


@pytest.mark.slow
def test_a_row_inside_one_process_or_across_two_gives_the_same_numbers_also_after_resuming(
    tmp_path,
):
    compare_processes(tmp_path, [("inside", 2, 4), ("across", 1, 8)])


def compare_processes(tmp_path, meshes):
    """Two processes on each mesh, where a later one resumes from the first one's step 2, against one process."""
    found = {}
    first = meshes[0][0]
    for name, data, seq in meshes:
        file, metrics = settings(tmp_path, name=name, data=data, seq=seq)
        words = (
            ["run.save_every=2"]
            if name == first
            else [f"run.resume={tmp_path}/{first}/checkpoints/2"]
        )
        launcher = start("-m", "jaxsp.launch", "--processes", 2, file, *words)
        _, said = launcher.communicate(timeout=300)
        assert launcher.returncode == 0, said
        found[name] = lines(metrics)
        # process 0 reads and tokenises, the other finds it done; so does a run after this
        assert ("Tokenising" in said) == (name == first), said
        assert "process 1: Tokenising" not in said
    file, metrics = settings(tmp_path, name="one", data=1, seq=8)
    program, material = build.build_training(schema.load(file, []), devices=jax.devices())
    trainer.train(program, material, rich.console.Console(quiet=True))
    expected = lines(metrics)
    assert [line["step"] for line in expected] == [1, 2, 3]
    for name, seen in found.items():
        for line, right in zip(seen, expected if name == first else expected[2:], strict=True):
            assert {field: line[field] for field in COUNTS} == {
                field: right[field] for field in COUNTS
            }, name
            for field in ("loss", "grad_norm", "token_accuracy"):
                assert line[field] == pytest.approx(right[field], rel=tolerances.MESH), (
                    name,
                    field,
                )


@pytest.mark.e2e
def test_torchrun_starts_a_job(tmp_path):
    pytest.importorskip(
        "torch", reason="torchrun comes with torch, which this Python has no build of"
    )
    program = tmp_path / "job.py"
    program.write_text(
        "import os, pathlib, sys, jax\nfrom jaxsp.runtime import cluster, distributed\n"
        "distributed.initialize(cluster.detect_process(os.environ))\n"
        "pathlib.Path(sys.argv[1], f'{jax.process_index()} of {jax.process_count()}').touch()\ndistributed.shutdown()\n"
    )
    words = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        2,
        "--standalone",
        program,
        tmp_path,
    )
    job = start(*words, env=os.environ | {"XLA_FLAGS": ""})
    _, said = job.communicate(timeout=120)
    assert job.returncode == 0, said
    assert {path.name for path in tmp_path.iterdir()} == {"job.py", "0 of 2", "1 of 2"}


@pytest.mark.e2e
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_ends_the_launch(tmp_path, victim):
    file, metrics = settings(tmp_path, name="run", data=2, seq=4, steps=100_000)
    launcher = start("-m", "jaxsp.launch", "--processes", 2, file)
    try:
        deadline = time.monotonic() + 200
        while not (metrics.exists() and metrics.read_text()):
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (ranks,) = [{rank_of(pid): pid for pid in children(launcher.pid)}]
        os.kill(ranks[victim], signal.SIGKILL)
        killed = time.monotonic()
        _, said = launcher.communicate(timeout=100)
    finally:
        launcher.kill()
    assert time.monotonic() - killed < ENDS_WITHIN_S
    assert launcher.returncode == 128 + signal.SIGKILL
    assert re.search(messages.holding(f"process {victim}", "SIGKILL"), said)
    assert not any(alive(pid) for pid in ranks.values())
    steps = [line["step"] for line in lines(metrics)]
    assert steps == list(range(1, len(steps) + 1)), "each step once"


def children(pid):
    """Processes that a process has started."""
    return [
        int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def rank_of(pid):
    return int(
        re.search(rb"(?:^|\0)RANK=(\d+)", pathlib.Path(f"/proc/{pid}/environ").read_bytes())[1]
    )


def alive(pid):
    """Whether a process is there, and is no mere entry that nobody asked about."""
    try:
        return re.search(r"\) ([A-Z]) ", pathlib.Path(f"/proc/{pid}/stat").read_text())[1] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.e2e
def test_a_mistake_that_all_processes_find_is_said_once(tmp_path):
    file, _ = settings(tmp_path, name="run", data=2, seq=4)
    launcher = start("-m", "jaxsp.launch", "--processes", 2, file, "mesh.data=3")
    printed, said = launcher.communicate(timeout=100)
    assert launcher.returncode == 2, said
    mistake, end = noise.without(said)
    assert re.match(
        messages.holding("mesh.replica = 1, mesh.data = 3, mesh.seq = 4", 12, 8), mistake
    )
    assert re.search(messages.holding("2 processes", "exit code 2"), end)
    assert "devices" not in printed, "nothing was begun"


@pytest.mark.e2e
def test_a_mistake_that_one_process_finds_is_said_under_its_number_and_ends_all():
    code, _, said, seconds = three("""
if rank == "2":
    say("a = 1: wrong here", "b = 2: wrong here too")
    sys.exit(2)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as JAX does
time.sleep(100)
""")
    assert code == 2
    assert said.splitlines() == [
        "process 2: a = 1: wrong here",
        "process 2: b = 2: wrong here too",
        "process 2 of 3 failed: exit code 2, and the others were ended",
    ]
    assert seconds < ENDS_WITHIN_S


def test_one_of_several_processes_ends_at_once_with_its_number():
    # a thread that goes on stands for JAX, which would wait for the others
    began = time.monotonic()
    failing = start(
        "-c",
        """
import threading, time
from jaxsp import cli
from jaxsp.runtime import distributed, hardware
distributed._this_process = cluster.Process(index=3, num_processes=4)
threading.Thread(target=time.sleep, args=[100]).start()
cli.run_command(lambda _: 1 / 0)
""",
    )
    _, said = failing.communicate(timeout=60)
    assert failing.returncode == 1
    assert said.splitlines()[0] == "process 3: Traceback (most recent call last):"
    assert said.splitlines()[-1] == "process 3: ZeroDivisionError: division by zero"
    assert all(line.startswith("process 3: ") for line in said.splitlines())
    assert time.monotonic() - began < ENDS_WITHIN_S


@pytest.mark.e2e
def test_what_jax_says_of_a_process_that_is_gone_does_not_hide_why():
    code, _, said, _ = three("""
if rank == "1":
    say("E0101 12:00:00 agent.cc:289] an error of its own")
    time.sleep(0.2)
if rank == "0":
    time.sleep(0.2)
    say("Traceback (most recent call last):", "ValueError: the cause")
    sys.exit(1)
if rank == "1":
    time.sleep(0.5)
    say("E0101 12:00:00 agent.cc:289] Polled an error from coordination service", "F0101 client.h:80] Terminating", "@ 0x7f32")
    os.abort()
time.sleep(100)
""")
    assert code == 1
    assert said.splitlines() == [
        "Traceback (most recent call last):",
        "ValueError: the cause",
        "process 1: E0101 12:00:00 agent.cc:289] an error of its own",
        "process 0 of 3 failed: exit code 1, and the others were ended",
    ]


def test_only_process_0_has_the_terminal():
    code, printed, said, _ = three("""
print("out of", rank, flush=True)
say("\\rat 10 %\\rat 100 % of " + rank, "warned")
""")
    assert code == 0
    assert printed == "out of 0\n"
    first, *others = said.split("\n")
    assert first == "\rat 10 %\rat 100 % of 0"
    assert others[0] == "warned"
    assert sorted(others[1:]) == ["", "process 1: at 100 % of 1", "process 2: at 100 % of 2"]


def test_a_launched_process_finds_its_place():
    _, printed, _, _ = three("""
from jaxsp.runtime import cluster
print(cluster.detect_process(os.environ))
""")
    place = Process(
        index=0, num_processes=3, coordinator="127.0.0.1:1", local_index=0, num_local_processes=3
    )
    assert printed == f"{place}\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_process_is_left_when_the_launcher_is_gone(number):
    launcher = start("-c", PROCESSES, BEGINNING + "time.sleep(100)")
    left = three_of(launcher)
    launcher.send_signal(number)
    launcher.communicate(timeout=10)
    time.sleep(0.5)
    assert not any(alive(pid) for pid in left)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_the_processes_hear_what_the_launcher_is_told(tmp_path, number, code):
    heard = (
        BEGINNING
        + f"""
signal.signal({number:d}, lambda *_: (Path("{tmp_path}", rank).touch(), sys.exit({code})))
time.sleep(100)
"""
    )
    launcher = start("-c", PROCESSES, heard)
    left = three_of(launcher)
    time.sleep(0.5)
    launcher.send_signal(number)
    launcher.communicate(timeout=20)
    assert launcher.returncode == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert not any(alive(pid) for pid in left)


@pytest.mark.e2e
def test_a_stop_may_take_its_time_and_is_no_failure(tmp_path):
    # 0 is asked before it can hear
    heard = (
        BEGINNING
        + f"""
if rank != "0":
    slow_s = {launch.PEER_LINE_DELAY_S} + 2
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(slow_s), Path("{tmp_path}", rank).touch(), sys.exit(0)))
Path("{tmp_path}", "ready" + rank).touch()
time.sleep(100)
"""
    )
    launcher = start("-c", PROCESSES, heard)
    wait_for(lambda: len([*tmp_path.iterdir()]) == 3)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)  # srun's, to all
    _, said = launcher.communicate(timeout=20)
    assert launcher.returncode == 0, said
    assert (tmp_path / "1").exists()
    assert (tmp_path / "2").exists()


def test_a_second_signal_kills(tmp_path):
    deaf = (
        BEGINNING
        + f'signal.signal(signal.SIGTERM, signal.SIG_IGN); Path("{tmp_path}", rank).touch(); time.sleep(100)'
    )
    launcher = start("-c", PROCESSES, deaf)
    left = three_of(launcher)
    wait_for(lambda: len([*tmp_path.iterdir()]) == 3)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.3)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert said.splitlines()[-1] == "killed by a second SIGTERM"
    assert not any(alive(pid) for pid in left)


def wait_for(done):
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("program", "again"),
    [
        ('sys.exit(75 if rank == "1" else 1)', True),
        (
            'say("E0101 Polled an error from coordination service", "F0101 client.h:80] Terminating"); os.abort()',
            False,
        ),
        ("os.abort()", False),
        ("sys.exit(1)", False),
        ("", False),
    ],
)
def test_what_hangs_is_to_be_started_again_and_nothing_else(program, again):
    words = PROCESSES.replace("launch.run_processes([", "print(launch.run_processes([").replace(
        "job, orders)", "job, orders))"
    )
    launcher = start("-c", words, BEGINNING + program)
    printed, said = launcher.communicate(timeout=60)
    assert (printed == "True\n") == again, said


def test_restarts_in_a_row_without_a_new_checkpoint_are_counted(tmp_path, monkeypatch, capfd):
    commands = []

    def run(command, job, orders):
        commands.append(command)
        if len(commands) == 3:
            (tmp_path / "run/checkpoints/7").mkdir(parents=True)
        return True

    monkeypatch.setattr(launch, "run_processes", run)
    # what began anew by its config goes on when it starts again
    words = [
        "--processes",
        "2",
        "--restarts",
        "2",
        "configs/quickstart.yaml",
        f"run.directory={tmp_path}/run",
        "run.resume=never",
    ]
    with pytest.raises(SystemExit) as ended:
        launch.main(words)
    assert ended.value.code == distributed.EXIT_HUNG
    assert len(commands) == 5, "once, twice again, and twice after the new checkpoint"
    assert ["run.resume=auto" in command for command in commands] == [False, True, True, True, True]
    said = capfd.readouterr().err.splitlines()
    assert said[-2:] == [
        "all processes start again, from the checkpoint of step 7",
        "not started again: 2 restarts in a row brought no new checkpoint",
    ]


def three_of(launcher):
    """The processes of a launch that has just begun."""
    deadline = time.monotonic() + 20
    while len(found := children(launcher.pid)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("words", "environ", "num_gpus", "says"),
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
def test_a_launch_that_cannot_be_is_refused(monkeypatch, words, environ, num_gpus, says):
    monkeypatch.setattr(hardware, "count_gpus", lambda _: num_gpus)
    monkeypatch.setattr(os, "environ", environ)
    with pytest.raises(UserError, match=messages.holding(*says)):
        launch.main([*words.split(), "configs/quickstart.yaml", "run.steps=1"])


def test_a_launch_on_each_node_makes_one_job(monkeypatch):
    begun = []
    monkeypatch.setattr(launch, "run_processes", lambda _, job, orders: begun.append(job))
    monkeypatch.setattr(hardware, "count_gpus", lambda _: 4)
    for node in "01":
        launch.main(
            [
                "--nodes",
                "2",
                "--node",
                node,
                "--coordinator",
                "node-0:29500",
                "configs/quickstart.yaml",
            ]
        )
    (first, second) = begun
    assert [process.index for process in first + second] == list(range(8))
    assert [process.local_index for process in second] == [0, 1, 2, 3]
    assert {
        (process.num_processes, process.num_local_processes, process.coordinator)
        for process in first + second
    } == {(8, 4, "node-0:29500")}
