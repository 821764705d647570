"""Processes of a job: how they join, print and end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxsp import launch
from jaxsp.processes import distributed
from jaxsp.processes.cluster import Process
from jaxsp.processes.local_peers import LocalPeers
from tests.messages import assert_names

JOIN = (
    "import os; from jaxsp.processes import cluster, distributed; "
    "distributed.initialize(cluster.detect_process(os.environ), timeout_s={})"
)


@pytest.mark.e2e
def test_processes_do_not_wait_forever_for_one_that_never_starts():
    # Process 1 of the first job is missing, and process 0 of the second one
    missing = {
        (0, "first"): ["2", "3"],
        (2, "first"): ["process 0"],
        (1, "second"): ["process 0"],
    }
    ports = {job: launch.free_port() for job in ("first", "second")}
    processes = {}
    for index, job in missing:
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[job]),
            "WORLD_SIZE": "3",
            "RANK": str(index),
        }
        processes[index, job] = subprocess.Popen(
            [sys.executable, "-c", JOIN.format(3)],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
    for (index, job), process in processes.items():
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1, stderr
        start = f"process {index} of 3: "
        (_, last) = (line for line in stderr.splitlines() if line.startswith(start))
        assert_names(last, "3 s", f"127.0.0.1:{ports[job]}", *missing[index, job], start=start)
        assert "stack trace" not in stderr, "ends before JAX's own timeout"


def test_sigterm_ends_one_of_several_processes():
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launch.free_port()),
        "WORLD_SIZE": "2",
    }
    program = f"{JOIN.format(60)}; print('joined', flush=True); import time; time.sleep(100)"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | variables | {"RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["joined\n"] * 2
        processes[1].terminate()
        assert processes[1].wait(10) == -signal.SIGTERM
    finally:
        for process in processes:
            process.kill()
            process.communicate()


JOIN_AND_WAIT = "\nprint('joined', flush=True)\nimport time\ntime.sleep(100)"


@pytest.mark.e2e
def test_a_process_ends_within_seconds_after_another_on_its_node_was_killed():
    """JAX would end it after 100 s without heartbeats."""
    environ = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launch.free_port()),
        "WORLD_SIZE": "2",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", JOIN.format(60) + JOIN_AND_WAIT]
    processes = [
        subprocess.Popen(command, env=environ | {"RANK": str(rank)}, **pipes) for rank in range(2)
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["joined\n"] * 2
        time.sleep(2)  # each has found the other
        processes[1].kill()
        processes[0].wait(timeout=30)
    finally:
        for process in processes:
            process.kill()
        outputs = [process.communicate() for process in processes]
    assert processes[0].returncode == 1
    assert "process 1 on this node has been killed" in outputs[0][1]


class Store:
    """JAX's key-value store with these values."""

    def __init__(self, values):
        self.values = values
        self.num_reads = 0

    def key_value_dir_get(self, prefix):
        self.num_reads += 1
        return [item for item in self.values.items() if item[0].startswith(prefix)]


def test_all_events_are_read_from_process_0_at_once(monkeypatch):
    values = {
        "jaxsp/event/failed/3": "1",
        "jaxsp/event/stop/10": "SIGTERM",
        "jaxsp/event/stop/2": "run.stop_after = 1h",
        "jaxsp/progress/0": "{}",
    }
    store = Store(values)
    monkeypatch.setattr(distributed, "_kv_client", store)
    monkeypatch.setattr(distributed, "_events", {})
    distributed._read_events()
    stops = {10: "SIGTERM", 2: "run.stop_after = 1h"}
    assert distributed.last_read(distributed.STOP_KEY) == stops
    assert distributed.last_read(distributed._FAILED_KEY) == {3: "1"}
    assert distributed.last_read(distributed._EXITED_KEY) == {}
    assert store.num_reads == 1


@pytest.mark.parametrize("num_processes", [2, 8, 100, 1024, 10_000])
def test_process_0_answers_a_limited_number_of_reads(monkeypatch, num_processes):
    monkeypatch.setattr(distributed, "_this_process", Process(num_processes=num_processes))
    reads_per_s = num_processes / distributed.poll_interval_s()
    assert reads_per_s <= distributed.MAX_POLLS_PER_S
    assert distributed.poll_interval_s() == 0.5 or reads_per_s == distributed.MAX_POLLS_PER_S


def test_functions_that_conda_s_python_lacks_are_not_needed(monkeypatch, capfd):
    for name in ("pidfd_open", "memfd_create"):
        monkeypatch.delattr(os, name)
    peers = LocalPeers()
    peers.add({1: os.getpid()})
    assert peers.wait(0.0) == set()
    distributed.log_stacks()
    assert "test_functions_that_conda_s_python_lacks" in capfd.readouterr().err


def test_the_end_of_a_process_on_this_node_is_detected_at_once():
    killed, running, ended = (subprocess.Popen(["sleep", "100"]) for _ in range(3))
    try:
        ended.kill()
        ended.wait()
        peers = LocalPeers()
        peers.add({4: killed.pid, 5: running.pid, 6: ended.pid})
        assert peers.wait(0.01) == {6}, "it had ended before"
        killed.kill()
        killed.wait()
        peers.add({4: killed.pid, 5: running.pid, 6: ended.pid})
        assert peers.wait(0.01) == {4, 6}
    finally:
        for process in (killed, running, ended):
            process.kill()
            process.wait()


def run_program(program):
    """Runs Python, and captures its output."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_output_that_cannot_be_written_does_not_end_a_process():
    """For example to a terminal that is gone, or to a log on a full disk."""
    result = run_program("""
import os
from jaxsp.processes import distributed
os.close(2)
os.open("/dev/full", os.O_WRONLY)
distributed.log("a")
print("continued")
""")
    assert result.stdout == "continued\n"


def test_output_of_gloo_is_discarded_and_that_of_jaxsp_is_printed():
    result = run_program("""
import os
from jaxsp.processes import distributed
print("before")
distributed._discard_gloo_output()
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks")
print("after")
""")
    assert result.stdout.splitlines() == ["before", "after"]
