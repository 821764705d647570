"""The watchdog: what counts as hung, and what it leaves behind."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxsp.config.schema import RunConfig
from jaxsp.runtime import distributed, run_status, watchdog
from jaxsp.runtime.run_status import Activity, RunStatus
from jaxsp.runtime.watchdog import Watchdog
from tests import messages

HANGS = """
import sys, threading, time
from jaxsp.config import schema
from jaxsp.runtime import run_status, watchdog
now = run_status.RunStatus()
with watchdog.Watchdog(schema.RunConfig(directory=sys.argv[1], step_timeout="0.6s"), now, has_heartbeat=True):
    now.waiting_for_step(7)
    def sits_here(): time.sleep(100)
    sits_here()
"""


def doing(**fields):
    return Activity(description="step 1", **fields)


@pytest.mark.parametrize(
    ("step_timeout", "now", "seconds"),
    [
        (None, doing(expected_s=1.0), 600),
        (None, doing(expected_s=200.0), 2000),
        (None, doing(), math.inf),  # the first step: nobody knows how long it takes
        ("30m", doing(), 1800),
        ("30m", doing(expected_s=1.0), 1800),
        ("30m", doing(is_watched=False), math.inf),  # compiling
    ],
)
def test_ten_times_the_usual_and_ten_minutes_are_too_long_unless_the_config_says_otherwise(
    tmp_path, step_timeout, now, seconds
):
    config = RunConfig(directory=str(tmp_path), step_timeout=step_timeout)
    dog = Watchdog(config, RunStatus(), has_heartbeat=False)
    assert dog.timeout_s(now) == seconds


@pytest.mark.e2e
def test_what_hangs_is_ended_with_its_stacks_and_the_heartbeat_stays(tmp_path):
    began = time.monotonic()
    hanging = subprocess.run(
        [sys.executable, "-c", HANGS, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert hanging.returncode == distributed.EXIT_HUNG
    assert re.search(messages.holding("step 8", "run.step_timeout"), hanging.stderr)
    assert "in sits_here" in hanging.stderr
    assert time.monotonic() - began < 30
    heartbeat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert heartbeat["step"] == 7
    assert heartbeat["doing"] == "step 8"
    assert abs(heartbeat["written_at"] - time.time()) < 60


@pytest.mark.e2e
@pytest.mark.parametrize("stuck", ["yaml_io.write_atomic", "distributed.log"])
def test_a_disk_that_does_not_answer_does_not_hold_the_watchdog(tmp_path, stuck):
    before = (
        "import time\nfrom jaxsp.config import yaml_io\nfrom jaxsp.runtime import distributed\n"
    )
    before += f"{stuck} = lambda *_: time.sleep(100)\n"
    before += "from jaxsp.runtime import watchdog\nwatchdog.MESSAGE_TIMEOUT_S = 0.5\n"
    began = time.monotonic()
    hanging = subprocess.run(
        [sys.executable, "-c", before + HANGS, tmp_path], timeout=60, check=False
    )
    assert hanging.returncode == distributed.EXIT_HUNG
    assert time.monotonic() - began < 30


@pytest.mark.e2e
def test_a_process_that_was_stopped_and_goes_on_has_not_hung(tmp_path):
    lives = HANGS.replace(
        "time.sleep(100)", "[now.heartbeat() or time.sleep(0.05) for _ in range(60)]"
    )
    lives = lives.replace("    sits_here()", "    print('ready', flush=True)\n    sits_here()")
    with subprocess.Popen(
        [sys.executable, "-c", lives, tmp_path], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(watchdog.HEARTBEAT_INTERVAL_S + 2)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0


def test_a_progress_bar_is_no_sign_of_life_of_a_write(tmp_path, monkeypatch):
    now = RunStatus()
    dog = Watchdog(RunConfig(directory=str(tmp_path), steps=9), now, has_heartbeat=False)
    now.begin("the checkpoint of step 2", is_writing=True)
    began = now.activity
    for quarters in range(9):
        monkeypatch.setattr(
            run_status, "read_bytes_written", lambda quarters=quarters: quarters * 2**18
        )
        dog._check_activity()
    assert now.activity == began
    monkeypatch.setattr(run_status, "read_bytes_written", lambda: 2**22)
    dog._check_activity()
    assert now.activity.last_progress > began.last_progress


@pytest.mark.e2e
def test_signs_of_life_keep_a_run_alive(tmp_path):
    now, config = RunStatus(), RunConfig(directory=str(tmp_path), step_timeout="1.2s")
    with Watchdog(config, now, has_heartbeat=True):
        now.waiting_for_step(0)
        for _ in range(10):
            time.sleep(0.3)
            now.heartbeat()
    assert json.loads((tmp_path / "heartbeat.json").read_text())["doing"] == "ended"


def test_compiling_is_not_watched_whatever_the_config_says():
    now = RunStatus()
    now.begin("the checkpoint of step 2", expected_s=3.0, is_writing=True)
    began = now.activity
    with now.compiling("digests"):
        assert (now.activity.description, now.activity.is_watched) == ("compiling digests", False)
        time.sleep(0.01)
    assert now.activity == dataclasses.replace(began, last_progress=now.activity.last_progress)
    assert now.activity.last_progress > began.last_progress + 0.005


@pytest.mark.e2e
def test_a_checkpoint_that_is_written_slowly_is_a_sign_of_life(tmp_path):
    now, config = RunStatus(), RunConfig(directory=str(tmp_path), step_timeout="1.2s")
    with Watchdog(config, now, has_heartbeat=False):
        now.begin("the checkpoint of step 1", is_writing=True)
        with (tmp_path / "state").open("wb") as file:
            for _ in range(10):
                file.write(bytes(2**22))
                file.flush()
                time.sleep(0.25)


def test_a_disk_that_is_full_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "HEARTBEAT_INTERVAL_S", 0.05)
    config = RunConfig(directory=str(tmp_path / "not there"))
    with Watchdog(config, RunStatus(), has_heartbeat=True):
        time.sleep(0.5)
    said = capfd.readouterr().err
    says = messages.holding("heartbeat.json", "No such file or directory")
    assert len(re.findall(says, said)) == 1


def test_the_usual_time_of_a_step_is_that_of_steps_with_rows_as_long():
    now = RunStatus()
    for step, (row_tokens, seconds) in enumerate(
        [(64, 1.0), (512, 9.0), (64, 2.0), (64, 3.0), (512, 30.0), (512, 10.0)], 1
    ):
        now.dispatched(step, row_tokens)
        now.finished(step, seconds)
    assert now.step_s == 10.0
    assert now.activity.description == "step 7"
    assert now.activity.expected_s == 10.0, "of a step that was not sent yet, nobody knows the rows"
    now.dispatched(7, 64)
    assert now.activity.expected_s == 2.0
    now.dispatched(8, 512)
    assert 11.0 < now.remaining_s() <= 12.0


def test_a_watchdog_does_not_end_a_process_that_has_left_it(tmp_path):
    now = RunStatus()
    with Watchdog(
        RunConfig(directory=str(tmp_path), step_timeout="0.3s"), now, has_heartbeat=False
    ):
        pass
    now.waiting_for_step(1)
    time.sleep(0.6)
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
