"""Processes of a job: how they join, print and end."""

import signal

import pytest

from jaxsp.system import distributed
from jaxsp.system.cluster import Process
from tests import commands, two_processes

JOIN = """
import os, time
from jaxsp.system import cluster, distributed
print("before", flush=True)
distributed.initialize(cluster.detect_process(os.environ), timeout_s=60)
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks")
print("joined", flush=True)
time.sleep(100)
"""


def test_sigterm_ends_one_of_several_processes():
    """Output of Gloo, to file descriptor 1, is discarded."""
    processes = two_processes.start("-c", JOIN)
    try:
        for process in processes:
            assert [process.stdout.readline() for _ in range(2)] == ["before\n", "joined\n"]
        processes[1].terminate()
        assert processes[1].wait(10) == -signal.SIGTERM
    finally:
        for process in processes:
            process.kill()
            process.communicate()


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
    assert distributed.read_folder("event") == {
        distributed.STOP_KEY: {10: "SIGTERM", 2: "run.stop_after = 1h"},
        distributed._FAILED_KEY: {3: "1"},
    }
    assert store.num_reads == 1


@pytest.mark.parametrize(("num_processes", "seconds"), [(2, 0.5), (100, 0.5), (1000, 5.0)])
def test_process_0_answers_a_limited_number_of_reads(monkeypatch, num_processes, seconds):
    monkeypatch.setattr(distributed, "this_process", Process(num_processes=num_processes))
    assert distributed.poll_interval_s() == seconds


def test_lines_of_other_processes_begin_with_their_number(monkeypatch, capfd):
    monkeypatch.setattr(distributed, "this_process", Process(num_processes=4, index=3))
    distributed.log("stops \x1b[31m\n\nnow\n")
    assert capfd.readouterr().err == "process 3: stops \\x1b[31m\nprocess 3: \nprocess 3: now\n"


def test_output_that_cannot_be_written_does_not_end_a_process():
    """For example to a terminal that is gone, or to a log on a full disk."""
    program = "import os; from jaxsp.system import distributed; os.close(2); "
    program += "os.open('/dev/full', os.O_WRONLY); distributed.log('a'); print('continued')"
    assert commands.run_python("-c", program).stdout == "continued\n"
