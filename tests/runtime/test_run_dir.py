"""A run's folder has one writer; who it is, is known, and a dead one is in nobody's way."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxsp.core.errors import UserError
from jaxsp.runtime import run_dir
from tests import messages

HOLDS = """
import pathlib, sys, time
from jaxsp.runtime import run_dir
with run_dir.lock(pathlib.Path(sys.argv[1]), config_path="configs/a.yaml"):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def another_holds(folder, **environment):
    """Another process that holds the folder."""
    words = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def holder(folder, **fields):
    """Writes who holds a folder, as a process that died without a word has left it."""
    told = {
        "host": platform.node(),
        "pid": 123,
        "began": "2026-03-01T13:05:00+01:00",
        "job": None,
        "config": None,
    }
    (folder / run_dir.HOLDER_FILE).write_text(json.dumps(told | fields))


def test_the_holder_is_named_while_it_lives_and_recognised_as_dead(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    with another_holds(tmp_path, SLURM_JOB_ID="77", HF_TOKEN="canary") as process:
        told = json.loads((tmp_path / run_dir.HOLDER_FILE).read_text())
        assert set(told) == {"host", "pid", "began", "job", "config"}
        assert "canary" not in str(told)
        named = (process.pid, platform.node(), told["began"][:10], 77, "configs/a.yaml")
        asked = f"run.directory = {tmp_path}"
        with pytest.raises(UserError, match=messages.holding(asked, *named)):
            run_dir.lock(tmp_path).__enter__()
        assert json.loads((tmp_path / run_dir.HOLDER_FILE).read_text()) == told, (
            "nothing was touched"
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
    with run_dir.lock(tmp_path):
        assert json.loads((tmp_path / run_dir.HOLDER_FILE).read_text())["pid"] == os.getpid()
        assert re.search(messages.holding(process.pid, platform.node()), capsys.readouterr().out)
    assert not (tmp_path / run_dir.HOLDER_FILE).exists()
    with run_dir.lock(tmp_path):
        assert capsys.readouterr().out == "", "the run before ended by itself"


def test_a_holder_of_whom_nothing_is_known_is_one_all_the_same(tmp_path):
    with (tmp_path / run_dir.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for text in ("", '{"host": "a', "[]"):
            (tmp_path / run_dir.HOLDER_FILE).write_text(text)
            asked = messages.holding(f"run.directory = {tmp_path}", "process")
            with pytest.raises(UserError, match=asked) as found:
                run_dir.lock(tmp_path).__enter__()
            assert "None" not in str(found.value)


def test_a_holder_on_another_node_lives_as_long_as_its_heart_beats(tmp_path, monkeypatch, capsys):
    """As on a file system whose locks other nodes do not see."""
    monkeypatch.setattr(run_dir, "HEARTBEAT_TIMEOUT_S", 0.5)
    holder(tmp_path, host="node-7")
    named = (123, "node-7", "2026-03-01 13:05:00")
    (tmp_path / run_dir.HEARTBEAT_FILE).write_text('{"step": 4}')

    def beat():
        time.sleep(0.1)
        (tmp_path / run_dir.HEARTBEAT_FILE).write_text('{"step": 5}')

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(UserError, match=messages.holding(*named)):
        run_dir.lock(tmp_path).__enter__()
    beating.join()
    assert re.search(messages.holding("0.5 s", *named), capsys.readouterr().out)
    with run_dir.lock(tmp_path):
        *_, last = capsys.readouterr().out.splitlines()
        assert re.search(messages.holding(*named), last)
        assert "0.5 s" not in last


def test_a_file_system_without_locks_is_refused_with_a_way_out(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    says = messages.holding(f"run.directory = {tmp_path}/run", "No locks available", "-o flock")
    with pytest.raises(UserError, match=says):
        run_dir.lock(tmp_path / "run").__enter__()


def test_what_was_made_for_the_lock_goes_where_no_run_began(tmp_path):
    with run_dir.lock(tmp_path / "a/b"), run_dir.lock(tmp_path / "a/b"):
        assert (tmp_path / "a/b" / run_dir.HOLDER_FILE).exists()
    assert not any(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    with pytest.raises(ZeroDivisionError), run_dir.lock(tmp_path / "mine"):
        raise ZeroDivisionError
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]
    with run_dir.lock(tmp_path / "mine"):
        (tmp_path / "mine/config.yaml").touch()
    assert (tmp_path / "mine" / run_dir.LOCK_FILE).exists(), (
        "of a run, which others may be waiting for"
    )


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    says = messages.holding(f"run.directory = {tmp_path}/file/run", "Not a directory")
    with pytest.raises(UserError, match=says):
        run_dir.lock(tmp_path / "file/run").__enter__()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", ["loop", "file"])
def test_what_cannot_be_a_folder_is_refused_by_every_process(tmp_path, monkeypatch, name, index):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setattr("jax.process_index", lambda: index)
    with pytest.raises(UserError) as caught:
        run_dir.lock(tmp_path / name).__enter__()
    (line,) = caught.value.problems
    assert line.startswith(f"run.directory = {tmp_path / name}: ")


def test_a_process_of_several_that_is_not_the_first_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with run_dir.lock(tmp_path / "run"):
        assert not pathlib.Path(tmp_path / "run").exists()
