"""Lock of a run directory: one writer at a time, which is named, and a dead one does not block."""

import errno
import fcntl
import json
import os
import platform
import re
import signal
import threading
import time

import pytest

from jaxsp.core.errors import UserError
from jaxsp.system import run_lock
from tests import commands, messages
from tests.messages import assert_refused

LOCK = """
import pathlib, sys, time
from jaxsp.system import run_lock
with run_lock.lock(pathlib.Path(sys.argv[1]), config_path="configs/a.yaml"):
    print("locked", flush=True)
    time.sleep(600)
"""


def read_holder(folder):
    return json.loads((folder / run_lock.HOLDER_FILE).read_text())


def test_a_living_holder_is_named_and_a_dead_one_is_replaced(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    environment = {"SLURM_JOB_ID": "77", "HF_TOKEN": "canary"}
    with commands.start_python("-c", LOCK, tmp_path, env=environment) as process:
        assert process.stdout.readline() == "locked\n"
        holder = read_holder(tmp_path)
        assert set(holder) == {"host", "pid", "began", "job", "config"}
        assert "canary" not in str(holder)
        named = (process.pid, platform.node(), holder["began"][:10], 77, "configs/a.yaml")
        with pytest.raises(
            UserError, match=messages.containing(f"run.directory = {tmp_path}", *named)
        ):
            run_lock.lock(tmp_path).__enter__()
        assert read_holder(tmp_path) == holder
        process.send_signal(signal.SIGKILL)
    with run_lock.lock(tmp_path):
        assert read_holder(tmp_path)["pid"] == os.getpid()
        assert re.search(messages.containing(process.pid, platform.node()), capsys.readouterr().out)
    assert not (tmp_path / run_lock.HOLDER_FILE).exists()
    with run_lock.lock(tmp_path):
        assert capsys.readouterr().out == "", "the previous run has removed its file"


@pytest.mark.parametrize("text", ["", '{"host": "a', "[]"])
def test_a_holder_without_a_readable_description_still_holds_the_lock(tmp_path, text):
    with (tmp_path / run_lock.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / run_lock.HOLDER_FILE).write_text(text)
        with assert_refused("another process", start=f"run.directory = {tmp_path}"):
            run_lock.lock(tmp_path).__enter__()


def test_a_holder_on_another_node_is_alive_while_its_heartbeat_changes(
    tmp_path, monkeypatch, capsys
):
    """For example on a file system that locks within a node only."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_TIMEOUT_S", 0.5)
    holder = {"host": "node-7", "pid": 123, "began": "2026-03-01T13:05:00+01:00"}
    (tmp_path / run_lock.HOLDER_FILE).write_text(json.dumps(holder))
    named = (123, "node-7", "2026-03-01 13:05:00")
    heartbeat = tmp_path / run_lock.HEARTBEAT_FILE
    heartbeat.write_text('{"step": 4}')

    def write_heartbeat():
        time.sleep(0.1)
        heartbeat.write_text('{"step": 5}')

    writer = threading.Thread(target=write_heartbeat)
    writer.start()
    with pytest.raises(UserError, match=messages.containing(*named)):
        run_lock.lock(tmp_path).__enter__()
    writer.join()
    assert re.search(messages.containing("0.5 s", *named), capsys.readouterr().out)
    with run_lock.lock(tmp_path):
        *_, last = capsys.readouterr().out.splitlines()
        assert re.search(messages.containing(*named), last)
        assert "0.5 s" not in last


def test_a_file_system_without_locks_is_refused_with_a_suggestion(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with assert_refused("No locks available", "-o flock", start=f"run.directory = {tmp_path}/run"):
        run_lock.lock(tmp_path / "run").__enter__()


def test_files_created_for_the_lock_are_removed_if_no_run_starts(tmp_path):
    with run_lock.lock(tmp_path / "a/b"), run_lock.lock(tmp_path / "a/b"):
        assert (tmp_path / "a/b" / run_lock.HOLDER_FILE).exists()
    assert not any(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    with pytest.raises(ZeroDivisionError), run_lock.lock(tmp_path / "mine"):
        raise ZeroDivisionError
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]
    with run_lock.lock(tmp_path / "mine"):
        (tmp_path / "mine/config.yaml").touch()
    lock = tmp_path / "mine" / run_lock.LOCK_FILE
    assert lock.exists(), "the lock of a run that has started stays"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", ["loop", "file"])
def test_every_process_refuses_a_path_that_cannot_be_a_folder(tmp_path, monkeypatch, name, index):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setattr("jax.process_index", lambda: index)
    with assert_refused(start=f"run.directory = {tmp_path / name}: "):
        run_lock.lock(tmp_path / name).__enter__()
