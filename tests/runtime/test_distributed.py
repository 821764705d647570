"""How the processes of a job begin and end together."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.messages import assert_names

JOIN = (
    "import os; from jaxsp.runtime import cluster, distributed; "
    "distributed.initialize(cluster.detect_process(os.environ), timeout_s={})"
)


@pytest.mark.e2e
def test_a_process_that_never_starts_is_not_waited_for_for_ever():
    # of one job process 0 is missing, of another process 1
    waiting = {
        (0, "lonely"): ["2", "3"],
        (2, "lonely"): ["process 0"],
        (1, "headless"): ["process 0", "Connection refused"],
    }
    ports = {name: free_port() for name in ("lonely", "headless")}
    started = {}
    for index, name in waiting:
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[name]),
            "WORLD_SIZE": "3",
            "RANK": str(index),
        }
        started[index, name] = subprocess.Popen(
            [sys.executable, "-c", JOIN.format(3)],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
    for (index, name), process in started.items():
        _, printed = process.communicate(timeout=60)
        assert process.returncode == 1, printed
        begins = f"process {index} of 3: "
        (_, ended) = (line for line in printed.splitlines() if line.startswith(begins))
        assert_names(ended, "3 s", f"127.0.0.1:{ports[name]}", *waiting[index, name], start=begins)
        assert "stack trace" not in printed, "before JAX ends it in its own words"


def test_one_of_several_processes_can_be_ended():
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    waits = f"{JOIN.format(60)}; print('joined', flush=True); import time; time.sleep(100)"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", waits],
            env=os.environ | variables | {"RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        assert [process.stdout.readline() for process in both] == ["joined\n"] * 2
        both[1].terminate()
        assert both[1].wait(10) == -signal.SIGTERM
    finally:
        for process in both:
            process.kill()
            process.communicate()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_words_that_nobody_hears_end_nothing():
    """A terminal that is gone, or a log on a full disk."""
    program = "import os; os.close(2); os.open('/dev/full', os.O_WRONLY); "
    program += "from jaxsp.runtime import distributed; distributed.log('a')"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print('went on')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_output_of_gloo_is_discarded_and_ours_is_printed():
    program = """
import os
from jaxsp.runtime import distributed
print("before")
distributed._discard_gloo_output()
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks")
print("after")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "after"]
