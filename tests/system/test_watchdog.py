"""Watchdog: which activities count as hung, and what it prints and writes."""

import dataclasses
import json
import math
import re
import signal
import threading
import time
from datetime import timedelta

import pytest

from jaxsp.core.errors import ExitCode
from jaxsp.system import watchdog
from jaxsp.system.watchdog import Activity, RunStatus, Watchdog
from tests import commands, messages

HANG = """
from jaxsp.run.config_file import RunConfig
import pathlib, sys, time
from datetime import timedelta
from jaxsp.system import watchdog
status = watchdog.RunStatus()
file = pathlib.Path(sys.argv[1], "heartbeat.json")
def hang_here():
    time.sleep(100)
with watchdog.Watchdog(status, step_timeout=timedelta(seconds=0.6), heartbeat_file=file):
    status.waiting_for_step(7)
    hang_here()
"""
"""Run that hangs in step 8."""


def activity(**fields):
    return Activity(description="step 1", **fields)


@pytest.mark.parametrize(
    ("step_timeout", "activity", "seconds"),
    [
        (None, activity(expected_s=1.0), 600),
        (None, activity(expected_s=200.0), 2000),
        (None, activity(), 86_400),  # the first step, whose duration is unknown
        (timedelta(minutes=30), activity(), 1800),
        (timedelta(minutes=30), activity(expected_s=1.0), 1800),
        (timedelta(minutes=30), activity(is_watched=False), math.inf),  # compiling
    ],
)
def test_the_limit_is_10_times_the_expected_time_and_10_minutes_or_that_of_the_config(
    step_timeout, activity, seconds
):
    dog = Watchdog(RunStatus(), step_timeout=step_timeout)
    assert dog.choose_timeout(activity)[0] == seconds


@pytest.mark.e2e
def test_a_process_that_hangs_prints_its_stacks_and_keeps_its_heartbeat_file(tmp_path):
    result = commands.run_python("-c", HANG, tmp_path, timeout=30)
    assert result.returncode == ExitCode.HUNG
    assert re.search(messages.containing("step 8", "run.step_timeout"), result.stderr)
    assert "in hang_here" in result.stderr
    heartbeat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert heartbeat["step"] == 7
    assert heartbeat["activity"] == "step 8"
    assert abs(heartbeat["written_at"] - time.time()) < 60


BLOCK = """
import time
from jaxsp.core import files
from jaxsp.system import distributed, watchdog
watchdog.MESSAGE_TIMEOUT_S = 0.5
files.write_atomic = distributed.log = lambda *_, **__: time.sleep(100)
"""


@pytest.mark.e2e
def test_a_disk_that_does_not_answer_does_not_block_the_watchdog(tmp_path):
    assert commands.run_python("-c", BLOCK + HANG, tmp_path, timeout=30).returncode == ExitCode.HUNG


@pytest.mark.e2e
def test_a_process_that_was_suspended_does_not_count_as_hung(tmp_path):
    progress = """
    print("ready", flush=True)
    for _ in range(60):
        status.heartbeat()
        time.sleep(0.05)
"""
    program = HANG.replace("    time.sleep(100)\n", progress)
    with commands.start_python("-c", program, tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(watchdog.HEARTBEAT_INTERVAL_S + 2)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0


def test_a_progress_bar_does_not_count_as_progress_of_a_write(monkeypatch):
    status = RunStatus()
    dog = Watchdog(status)
    status.activity = Activity(description="the checkpoint of step 2", is_writing=True)
    start = dataclasses.replace(status.activity)
    num_bytes = 0
    monkeypatch.setattr(watchdog, "read_bytes_written", lambda: num_bytes)
    for num_bytes in range(0, 9 * 2**18, 2**18):  # noqa: B007 - read by the lambda
        dog._check_activity()
    assert status.activity == start
    num_bytes = 2**22
    dog._check_activity()
    assert status.activity.last_progress > start.last_progress


@pytest.mark.parametrize("fails", [False, True])
def test_compiling_is_not_watched_and_the_activity_continues_after_it(fails):
    status = RunStatus()
    status.activity = Activity(
        description="the checkpoint of step 2", expected_s=3.0, is_writing=True
    )
    start = dataclasses.replace(status.activity)
    try:
        with status.compiling("checksums"):
            assert status.activity.description == "compiling checksums"
            assert not status.activity.is_watched
            time.sleep(0.01)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    last_progress = status.activity.last_progress
    assert status.activity == dataclasses.replace(start, last_progress=last_progress)
    assert last_progress > start.last_progress + 0.005


@pytest.mark.e2e
@pytest.mark.parametrize("is_writing", [False, True])
def test_heartbeats_and_a_slow_write_of_a_checkpoint_keep_a_run_alive(tmp_path, is_writing):
    status = RunStatus()
    file = tmp_path / "heartbeat.json"
    with Watchdog(status, step_timeout=timedelta(seconds=1.2), heartbeat_file=file):
        status.activity = activity(is_writing=is_writing)
        for _ in range(10):
            time.sleep(0.25)
            if is_writing:
                (tmp_path / "state").write_bytes(bytes(2**22))
            else:
                status.heartbeat()
    assert json.loads(file.read_text())["activity"] == "ended"
    status.waiting_for_step(1)
    time.sleep(1.5)
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_heartbeat_that_cannot_be_written_is_reported_once_and_ends_nothing(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(watchdog, "HEARTBEAT_INTERVAL_S", 0.05)
    with Watchdog(RunStatus(), heartbeat_file=tmp_path / "not there/heartbeat.json"):
        time.sleep(0.5)
    report = messages.containing("heartbeat.json", "No such file or directory")
    assert len(re.findall(report, capfd.readouterr().err)) == 1


def test_the_expected_time_of_a_step_is_the_median_of_the_last_ones():
    status = RunStatus()
    status.waiting_for_step(0)
    status.dispatched(estimated_s=90.0)
    assert status.activity.expected_s == 90.0
    status = RunStatus()
    for step, seconds in enumerate([9.0, 30.0, 10.0], 1):
        status.dispatched()
        status.finished(step, seconds)
    assert (status.activity.description, status.activity.expected_s) == ("step 4", 10.0)
    status.dispatched()
    assert status.activity.expected_s == 10.0
    status.dispatched()
    assert 19.0 < status.remaining_s() <= 20.0
