"""Stopping: what a signal does to one process, before training, while a step runs, and twice."""

import re
import signal
import subprocess
import sys
import time

import pytest

from jaxsp.config.schema import RunConfig
from jaxsp.runtime import preemption
from jaxsp.runtime.preemption import Preemption
from jaxsp.runtime.run_status import RunStatus
from tests import messages

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("hearing")]

PROGRAM = """
import os, sys, time
from jaxsp.config import schema
from jaxsp.runtime import preemption, run_status
now = run_status.RunStatus()
settings = schema.RunConfig(directory=sys.argv[1], shutdown_grace=sys.argv[2], stop_after=eval(sys.argv[3]))
begun, step_s = int(sys.argv[4]), float(sys.argv[5])
with preemption.Preemption(settings, now) as stop:
    for step in range(1, begun + 1):
        assert stop.should_dispatch(step)
        now.dispatched(step, 64)
        if step < begun:
            now.finished(step, step_s)
    print("ready", flush=True)
    # waits as for a device: in one call of C
    while begun and stop.reason is None:
        time.sleep(0.1)
    time.sleep(0.3 if begun else 100)
    print("next step:", stop.should_dispatch(begun + 1), flush=True)
    time.sleep(float(sys.argv[6]))
"""
"""A run that has sent some steps to the devices, of which the last is running."""


def run(
    folder,
    *,
    number=signal.SIGTERM,
    shutdown_grace="25s",
    stop_after=None,
    begun=3,
    step_s=0.1,
    then_s=0.0,
    again_after=None,
):
    """Exit code, stdout, stderr, and seconds from the signal to the end."""
    words = map(str, (folder, shutdown_grace, repr(stop_after), begun, step_s, then_s))
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        began = time.monotonic()
        if stop_after is None:
            running.send_signal(number)
        if again_after is not None:
            time.sleep(again_after)
            running.send_signal(number)
        printed, said = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    return running.returncode, printed, said, time.monotonic() - began


def test_a_step_that_was_let_go_and_not_sent_yet_counts_as_one_to_wait_for(tmp_path):
    now = RunStatus()
    stop = Preemption(RunConfig(directory=str(tmp_path), steps=9), now)
    for step in (1, 2):
        assert stop.should_dispatch(step)
        now.dispatched(step, 64)
        now.finished(step, 7.0)
    assert stop.should_dispatch(3)
    stop._hold_dispatch("SIGTERM")
    assert (stop._progress.num_dispatched, stop._progress.remaining_s) == (3, 7.0)
    now.dispatched(3, 64)
    stop._hold_dispatch("SIGTERM")
    assert stop._progress.remaining_s == pytest.approx(7.0, abs=0.5)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_after_a_signal_no_further_step_is_sent(tmp_path, name):
    code, printed, said, _ = run(tmp_path, number=getattr(signal, name))
    assert (code, printed) == (0, "next step: False\n")
    assert re.search(messages.holding("step 3"), said)


def test_before_the_first_step_a_signal_leaves_at_once(tmp_path):
    code, printed, said, seconds = run(tmp_path, begun=0)
    assert (code, printed) == (0, "")
    assert "SIGTERM" in said.splitlines()[-1]
    assert seconds < 5, "the main thread sleeps for 100"


def test_where_the_grace_is_too_short_it_leaves_at_once_and_says_what_is_lost(tmp_path):
    (tmp_path / "checkpoints/2/master").mkdir(parents=True)
    (tmp_path / "checkpoints/2/meta").mkdir()
    (tmp_path / "checkpoints/2/meta/metadata").write_text("{}")
    code, printed, said, _ = run(tmp_path, step_s=100.0)
    assert (code, printed) == (0, "")
    assert re.search(r"\b(99|100) s\b", said)
    assert re.search(messages.holding("run.shutdown_grace", "25s", "1 step", "step 2"), said)


def test_where_nothing_was_saved_all_steps_are_said_to_be_lost(tmp_path):
    _, _, said, _ = run(tmp_path, step_s=100.0)
    assert re.search(messages.holding("run.shutdown_grace", "25s", "3 steps"), said)


def test_a_second_signal_leaves_at_once(tmp_path):
    code, _, said, seconds = run(tmp_path, then_s=100.0, again_after=1.5)
    assert code == 128 + signal.SIGTERM
    assert "SIGTERM" in said.splitlines()[-1]
    assert seconds < 10


def test_signals_at_the_same_time_are_one(tmp_path):
    code, printed, _, _ = run(tmp_path, then_s=1.0, again_after=0.2)
    assert (code, printed) == (0, "next step: False\n")


def test_a_run_stops_when_its_time_is_up_however_long_the_step_takes(tmp_path):
    code, printed, said, _ = run(tmp_path, stop_after="0.6s", step_s=100.0)
    assert (code, printed) == (0, "next step: False\n")
    assert re.search(messages.holding("run.stop_after = 0.6s", "step 3"), said)


def test_processes_that_are_started_do_not_inherit_the_signals(tmp_path):
    program = """
import os, signal, subprocess, sys, time
from jaxsp.config import schema
from jaxsp.runtime import preemption, run_status
with preemption.Preemption(schema.RunConfig(directory="x"), run_status.RunStatus()) as stop:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    time.sleep(0.5)
    child.send_signal(signal.SIGTERM)
    print(child.wait(), stop.reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{-signal.SIGTERM} None\n"


@pytest.mark.parametrize(
    ("reason", "rest_s", "parts"),
    [
        ("SIGINT", 0.2, ["step 74", "Ctrl-C"]),
        ("SIGTERM to process 1", 9.7, ["SIGTERM to process 1", "step 74", "10 s", "SIGTERM"]),
        ("run.stop_after = 30m", 0.2, ["run.stop_after = 30m", "step 74", "Ctrl-C"]),
    ],
)
def test_a_stop_names_its_step_and_how_to_leave_at_once(reason, rest_s, parts):
    said = preemption.stop_message(reason, stop_step=74, remaining_s=rest_s)
    assert re.match(".*" + messages.holding(*parts), said)
    assert "SIGINT" not in said, "who pressed Ctrl-C knows it"
    assert bool(re.search(r"\d s\b", said)) == (rest_s > 1)
