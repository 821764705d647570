"""Lock of a run directory: one writer at a time, which is named, and a dead one does not block."""

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxsp.core.errors import UserError
from jaxsp.system import run_lock
from tests import messages

LOCK = """
import pathlib, sys, time
from jaxsp.system import run_lock
with run_lock.lock(pathlib.Path(sys.argv[1]), config_path="configs/a.yaml"):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def locked_by_another(folder, **environment):
    """Context in which another process holds the lock of a folder."""
    command = [sys.executable, "-c", LOCK, str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def write_holder(folder, **fields):
    """Writes the file that a process leaves when it is killed."""
    holder = {
        "host": platform.node(),
        "pid": 123,
        "began": "2026-03-01T13:05:00+01:00",
        "job": None,
        "config": None,
    }
    (folder / run_lock.HOLDER_FILE).write_text(json.dumps(holder | fields))


def test_a_living_holder_is_named_and_a_dead_one_is_replaced(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    with locked_by_another(tmp_path, SLURM_JOB_ID="77", HF_TOKEN="canary") as process:
        holder = json.loads((tmp_path / run_lock.HOLDER_FILE).read_text())
        assert set(holder) == {"host", "pid", "began", "job", "config"}
        assert "canary" not in str(holder)
        named = (process.pid, platform.node(), holder["began"][:10], 77, "configs/a.yaml")
        start = f"run.directory = {tmp_path}"
        with pytest.raises(UserError, match=messages.containing(start, *named)):
            run_lock.lock(tmp_path).__enter__()
        assert json.loads((tmp_path / run_lock.HOLDER_FILE).read_text()) == holder
        process.send_signal(signal.SIGKILL)
        process.wait()
    with run_lock.lock(tmp_path):
        assert json.loads((tmp_path / run_lock.HOLDER_FILE).read_text())["pid"] == os.getpid()
        assert re.search(messages.containing(process.pid, platform.node()), capsys.readouterr().out)
    assert not (tmp_path / run_lock.HOLDER_FILE).exists()
    with run_lock.lock(tmp_path):
        assert capsys.readouterr().out == "", "the previous run has removed its file"


def test_a_holder_without_a_readable_description_still_holds_the_lock(tmp_path):
    with (tmp_path / run_lock.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for text in ("", '{"host": "a', "[]"):
            (tmp_path / run_lock.HOLDER_FILE).write_text(text)
            parts = messages.containing(f"run.directory = {tmp_path}", "process")
            with pytest.raises(UserError, match=parts) as error:
                run_lock.lock(tmp_path).__enter__()
            assert "None" not in str(error.value)


def test_a_holder_on_another_node_is_alive_while_its_heartbeat_changes(
    tmp_path, monkeypatch, capsys
):
    """For example on a file system that locks within a node only."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_TIMEOUT_S", 0.5)
    write_holder(tmp_path, host="node-7")
    named = (123, "node-7", "2026-03-01 13:05:00")
    (tmp_path / run_lock.HEARTBEAT_FILE).write_text('{"step": 4}')

    def write_heartbeat():
        time.sleep(0.1)
        (tmp_path / run_lock.HEARTBEAT_FILE).write_text('{"step": 5}')

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
    parts = messages.containing(f"run.directory = {tmp_path}/run", "No locks available", "-o flock")
    with pytest.raises(UserError, match=parts):
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
    with pytest.raises(UserError) as error:
        run_lock.lock(tmp_path / name).__enter__()
    (problem,) = error.value.problems
    assert problem.startswith(f"run.directory = {tmp_path / name}: ")
