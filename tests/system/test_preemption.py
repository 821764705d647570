"""Effects of a signal on one process: before training, during a step, and twice."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxsp.system import preemption
from jaxsp.system.preemption import Preemption
from jaxsp.system.watchdog import RunStatus
from tests import messages

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("default_signals")]

PROGRAM = """
import functools, json, pathlib, sys, time
from datetime import timedelta
from jaxsp.system import preemption, watchdog
from jaxsp.checkpoint import run_paths
options = json.loads(sys.argv[1])
num_steps = options["num_steps"]
status = watchdog.RunStatus()
stop = preemption.Preemption(
    status,
    shutdown_grace=timedelta(seconds=25),
    stop_after=options["stop_after_s"] and timedelta(seconds=options["stop_after_s"]),
    describe_loss=functools.partial(
        run_paths.describe_lost_steps, pathlib.Path(options["directory"])
    ),
)
with stop.listen():
    for step in range(1, num_steps + 1):
        assert stop.should_dispatch(step)
        status.dispatched()
        if step < num_steps:
            status.finished(step, options["step_s"])
    print("ready", flush=True)
    # Waits as for a device: inside one call of C
    while num_steps and stop.reason is None:
        time.sleep(0.1)
    time.sleep(0.3 if num_steps else 100)
    print("next step:", stop.should_dispatch(num_steps + 1), flush=True)
    time.sleep(options["final_sleep_s"])
"""
"""Run that has dispatched some steps, of which the last one is running."""


def run(
    folder,
    *,
    number=signal.SIGTERM,
    stop_after_s=None,
    num_steps=3,
    step_s=0.1,
    final_sleep_s=0.0,
    repeat_after_s=None,
):
    """Exit code, stdout, stderr, and seconds from the signal to the end."""
    options = {
        "directory": str(folder),
        "stop_after_s": stop_after_s,
        "num_steps": num_steps,
        "step_s": step_s,
        "final_sleep_s": final_sleep_s,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        start_s = time.monotonic()
        if stop_after_s is None:
            process.send_signal(number)
        if repeat_after_s is not None:
            time.sleep(repeat_after_s)
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, stdout, stderr, time.monotonic() - start_s


def test_a_step_that_is_allowed_and_not_dispatched_yet_counts_as_remaining():
    status = RunStatus()
    stop = Preemption(status)
    for step in (1, 2):
        assert stop.should_dispatch(step)
        status.dispatched()
        status.finished(step, 7.0)
    assert stop.should_dispatch(3)
    stop._hold_dispatch("SIGTERM")
    assert (stop._progress.num_dispatched, stop._progress.remaining_s) == (3, 7.0)
    status.dispatched()
    stop._hold_dispatch("SIGTERM")
    assert stop._progress.remaining_s == pytest.approx(7.0, abs=0.5)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_no_step_is_dispatched_after_a_signal(tmp_path, name):
    code, stdout, stderr, _ = run(tmp_path, number=getattr(signal, name))
    assert (code, stdout) == (0, "next step: False\n")
    assert re.search(messages.containing("step 3"), stderr)


def test_a_signal_before_the_first_step_ends_the_process_immediately(tmp_path):
    code, stdout, stderr, seconds = run(tmp_path, num_steps=0)
    assert (code, stdout) == (0, "")
    assert "SIGTERM" in stderr.splitlines()[-1]
    assert seconds < 5, "the main thread sleeps for 100"


def test_a_shutdown_that_takes_longer_than_the_grace_ends_immediately_and_prints_the_loss(tmp_path):
    (tmp_path / "checkpoints/2/master").mkdir(parents=True)
    (tmp_path / "checkpoints/2/meta").mkdir()
    (tmp_path / "checkpoints/2/meta/metadata").write_text("{}")
    code, stdout, stderr, _ = run(tmp_path, step_s=100.0)
    assert (code, stdout) == (0, "")
    assert re.search(r"\b(99|100) s\b", stderr)
    assert re.search(messages.containing("run.shutdown_grace", 25, "1 step", "step 2"), stderr)


def test_without_a_checkpoint_all_steps_are_lost(tmp_path):
    _, _, stderr, _ = run(tmp_path, step_s=100.0)
    assert re.search(messages.containing("run.shutdown_grace", 25, "3 steps"), stderr)


def test_a_second_signal_ends_the_process_immediately(tmp_path):
    code, _, stderr, seconds = run(tmp_path, final_sleep_s=100.0, repeat_after_s=1.5)
    assert code == 128 + signal.SIGTERM
    assert "SIGTERM" in stderr.splitlines()[-1]
    assert seconds < 10


def test_signals_within_a_second_count_as_one(tmp_path):
    code, stdout, _, _ = run(tmp_path, final_sleep_s=1.0, repeat_after_s=0.2)
    assert (code, stdout) == (0, "next step: False\n")


def test_a_run_stops_after_its_time_even_if_the_step_takes_long(tmp_path):
    code, stdout, stderr, _ = run(tmp_path, stop_after_s=0.6, step_s=100.0)
    assert (code, stdout) == (0, "next step: False\n")
    assert re.search(messages.containing("run.stop_after = 0.6s", "step 3"), stderr)


@pytest.mark.parametrize("number", preemption.SIGNALS)
def test_signals_that_nohup_or_a_shell_ignores_stay_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    others = {*preemption.SIGNALS} - {number}
    handlers = {other: signal.getsignal(other) for other in others}
    try:
        with Preemption(RunStatus()).listen():
            assert signal.getsignal(number) is signal.SIG_IGN
            assert all(signal.getsignal(other) is not handlers[other] for other in others)
        assert {other: signal.getsignal(other) for other in others} == handlers
    finally:
        signal.signal(number, before)


def test_a_terminal_that_closes_may_send_several_signals(monkeypatch):
    monkeypatch.setattr(preemption.distributed, "log", lambda text: pytest.fail(text))
    stop = Preemption(RunStatus())
    stop._handle_signal(signal.SIGTERM)
    stop._signal_time -= 2
    stop._handle_signal(signal.SIGHUP)
    assert stop.reason == "SIGTERM"


def test_child_processes_do_not_inherit_the_signal_handlers():
    program = """
import signal, subprocess, sys, time
from jaxsp.system import preemption, watchdog
stop = preemption.Preemption(watchdog.RunStatus())
with stop.listen():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    time.sleep(0.5)
    child.send_signal(signal.SIGTERM)
    print(child.wait(), stop.reason)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == f"{-signal.SIGTERM} None\n"


@pytest.mark.parametrize(
    ("reason", "remaining_s", "parts"),
    [
        ("SIGINT", 0.2, ["step 74", "Ctrl-C"]),
        ("SIGTERM to process 1", 9.7, ["SIGTERM to process 1", "step 74", "10 s", "SIGTERM"]),
        ("SIGHUP", 0.2, ["SIGHUP", "step 74", "SIGTERM"]),
        ("run.stop_after = 30m", 0.2, ["run.stop_after = 30m", "step 74", "Ctrl-C"]),
    ],
)
def test_the_stop_message_names_the_last_step_and_how_to_end_immediately(
    reason, remaining_s, parts
):
    message = preemption.stop_message(reason, stop_step=74, remaining_s=remaining_s)
    assert re.match(".*" + messages.containing(*parts), message)
    assert "SIGINT" not in message, "the user who pressed Ctrl-C knows it"
    assert bool(re.search(r"\d s\b", message)) == (remaining_s > 1)
