"""Effects of a signal on one process: before training, during a step, and twice."""

import json
import re
import signal
import time

import pytest

from jaxsp.system import preemption
from jaxsp.system.preemption import Preemption
from jaxsp.system.watchdog import RunStatus
from tests import commands, messages

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("default_signals")]

PROGRAM = """
import functools, json, pathlib, subprocess, sys, time
from datetime import timedelta
from jaxsp.system import preemption, watchdog
from jaxsp.checkpoint import run_paths
options = json.loads(sys.argv[1])
num_steps = options.get("num_steps", 3)
status = watchdog.RunStatus()
stop = preemption.Preemption(
    status,
    shutdown_grace=timedelta(seconds=25),
    stop_after=timedelta(seconds=options["stop_after_s"]) if "stop_after_s" in options else None,
    describe_loss=functools.partial(run_paths.describe_lost_steps, pathlib.Path(sys.argv[2])),
)
with stop.listen():
    for step in range(1, num_steps + 1):
        assert stop.should_dispatch(step)
        status.dispatched()
        if step < num_steps:
            status.finished(step, options.get("step_s", 0.1))
    print("ready", flush=True)
    # Waits as for a device: inside one call of C
    while num_steps and stop.reason is None:
        time.sleep(0.1)
    time.sleep(0.3 if num_steps else 100)
    print("next step:", stop.should_dispatch(num_steps + 1), flush=True)
    time.sleep(options.get("final_sleep_s", 0))
"""
"""Run that has dispatched some steps, of which the last one is running."""


def run(folder, number=signal.SIGTERM, *, repeat_after_s=None, **options):
    """Sends a signal, or waits for the end. Returns: exit code, stdout and stderr."""
    with commands.start_python("-c", PROGRAM, json.dumps(options), folder) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            began = time.monotonic()
            if number is not None:
                process.send_signal(number)
            if repeat_after_s is not None:
                time.sleep(repeat_after_s)
                process.send_signal(number)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert time.monotonic() - began < 15, "the main thread sleeps for 100"
    return process.returncode, stdout, stderr


STOPPED = (0, "next step: False\n")
ENDED = (0, "")
SLOW = {"step_s": 100.0}


@pytest.mark.parametrize(
    ("options", "outcome", "parts"),
    [
        ({}, STOPPED, ["SIGTERM", "step 3"]),
        ({"number": signal.SIGINT}, STOPPED, ["SIGINT", "step 3"]),
        ({"number": signal.SIGHUP, **SLOW}, STOPPED, ["SIGHUP", "step 3"]),
        ({"number": None, "stop_after_s": 0.6, **SLOW}, STOPPED, ["stop_after = 0.6s", "step 3"]),
        ({"num_steps": 0}, ENDED, ["SIGTERM"]),
        (SLOW, ENDED, ["run.shutdown_grace", 25, "3 steps"]),
        # signals within a second count as one
        ({"final_sleep_s": 1.0, "repeat_after_s": 0.2}, STOPPED, ["SIGTERM"]),
        ({"final_sleep_s": 100.0, "repeat_after_s": 1.5}, (143, STOPPED[1]), ["second SIGTERM"]),
    ],
)
def test_a_signal_stops_after_the_running_step_or_ends_the_process(
    tmp_path, options, outcome, parts
):
    code, stdout, stderr = run(tmp_path, **options)
    assert (code, stdout) == outcome
    assert re.search(messages.containing(*parts), stderr)


def test_a_shutdown_that_takes_longer_than_the_grace_names_the_steps_that_are_lost(tmp_path):
    (tmp_path / "checkpoints/2/master").mkdir(parents=True)
    (tmp_path / "checkpoints/2/meta").mkdir()
    (tmp_path / "checkpoints/2/meta/metadata").write_text("{}")
    code, stdout, stderr = run(tmp_path, **SLOW)
    assert (code, stdout) == ENDED
    assert re.search(r"\b(99|100) s\b", stderr)
    assert re.search(messages.containing("run.shutdown_grace", 25, "1 step", "step 2"), stderr)


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
