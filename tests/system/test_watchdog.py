"""Watchdog: which activities count as hung, and what it prints and writes."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from jaxsp.core import exit_codes
from jaxsp.system.watchdog import Activity, RunStatus, Watchdog
from tests import messages

HANG = """

from jaxsp.run.run_config import RunConfig
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
        (None, activity(estimated_s=90.0), 900),
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
    start_s = time.monotonic()
    command = [sys.executable, "-c", HANG, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == exit_codes.HUNG
    assert re.search(messages.containing("step 8", "run.step_timeout"), result.stderr)
    assert "in hang_here" in result.stderr
    assert time.monotonic() - start_s < 30
    heartbeat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert heartbeat["step"] == 7
    assert heartbeat["activity"] == "step 8"
    assert abs(heartbeat["written_at"] - time.time()) < 60


@pytest.mark.e2e
def test_heartbeats_keep_a_run_alive(tmp_path):
    status = RunStatus()
    file = tmp_path / "heartbeat.json"
    with Watchdog(status, step_timeout=timedelta(seconds=1.2), heartbeat_file=file):
        status.waiting_for_step(0)
        for _ in range(10):
            time.sleep(0.3)
            status.heartbeat()
    assert json.loads((tmp_path / "heartbeat.json").read_text())["activity"] == "ended"


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


def test_the_expected_time_of_a_step_is_the_median_of_the_last_ones():
    status = RunStatus()
    for step, seconds in enumerate([9.0, 30.0, 10.0], 1):
        status.dispatched()
        status.finished(step, seconds)
    assert (status.activity.description, status.activity.expected_s) == ("step 4", 10.0)
    status.dispatched()
    assert status.activity.expected_s == 10.0
    status.dispatched()
    assert 19.0 < status.remaining_s() <= 20.0
