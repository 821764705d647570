"""A run in an object store that is killed, cut off, and exported on another machine."""

import pathlib
import shutil
import signal
import subprocess
import time

import pytest
import safetensors.numpy

from jaxsp import export
from jaxsp.checkpoint import run_paths, run_storage
from jaxsp.core.errors import ExitCode
from jaxsp.system.object_store import ObjectStore
from tests import commands, two_processes
from tests.checkpoint import store_server
from tests.faults import kills

pytestmark = pytest.mark.e2e

NUM_STEPS = 24

URL = f"s3://{store_server.BUCKET}/runs/first"


class StoreRun(kills.Run):
    """A run whose directory is URL, on one of several machines."""

    def start_on(self, machine: str, *, patience_s: float = 1800) -> subprocess.Popen:
        """Starts or resumes the run; its output is read from stdout."""
        cache = self.config.parent / machine
        self.directory = cache / "jaxsp/runs" / run_paths.name_local(URL)
        changes = ("mesh.data=1", "mesh.seq=2", "mesh.virtual_cpu_devices=2")
        return commands.start_python(
            "-c",
            "from jaxsp import cli, train\n"
            "from jaxsp.checkpoint import run_storage\n"
            f"run_storage.PATIENCE_S = {patience_s}\n"
            "cli.run_command(train.main)",
            self.config,
            f"run.directory={URL}",
            *changes,
            env={"XDG_CACHE_HOME": str(cache)},
            stderr=subprocess.STDOUT,
        )

    def signal_after(self, process: subprocess.Popen, num_lines: int, number: int) -> str:
        """Sends a signal when metrics.jsonl has this many lines, and returns the output."""
        deadline = time.monotonic() + 120
        while self.num_lines() < num_lines:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        return process.communicate(timeout=120)[0]


def stored_steps() -> set[int]:
    """Steps of the complete checkpoints in the store."""
    return run_storage.find_steps(ObjectStore(URL).list())


def read_until(process: subprocess.Popen, text: str) -> str:
    """Reads the output of a process until a line contains a text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


JOB = """
from jaxsp import cli, train
from jaxsp.sharding import sharding
sharding.MIN_SHARDED_SIZE = 100  # so that each process has shards
cli.run_command(train.main)
"""


def test_two_processes_upload_their_shards_and_resume_from_them(tmp_path, monkeypatch):
    config, _ = two_processes.write_config(tmp_path, name="run", data=2, seq=4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = run_paths.name_local(URL)
    first, second = (tmp_path / "cache/jaxsp/runs" / f"{name}{suffix}" for suffix in ("", "-1"))
    with store_server.run_server():
        for steps in (2, 4):
            changes = (f"run.directory={URL}", f"run.steps={steps}")
            processes = two_processes.start("-c", JOB, config, *changes)
            outputs = two_processes.wait(processes)
            assert [process.returncode for process in processes] == [0, 0], outputs
            assert steps in stored_steps()
            names = [
                {path.relative_to(folder) for path in folder.rglob(f"checkpoints/{steps}/**/*.*")}
                for folder in (first, second)
            ]
            assert names[1] - names[0], "process 1 wrote shards that process 0 does not have"
            if steps == 2:  # another machine
                shutil.rmtree(second)
                shutil.rmtree(first)
        assert run_storage.make_local(URL)


@pytest.mark.slow
def test_a_run_in_a_store_is_bitwise_equal_to_a_local_one(tmp_path, monkeypatch):
    case = kills.Case(tmp_path, num_steps=NUM_STEPS, save_every=5, eval_every=10)
    kills.run_undisturbed(case, "1x2", timeout_s=300)
    with store_server.run_server() as server:
        run = StoreRun(case.faulty.config, "first")
        run.signal_after(run.start_on("machine-a"), 8, signal.SIGKILL)
        assert 8 <= run.num_lines() < NUM_STEPS

        process = run.start_on("machine-a", patience_s=1)
        output = read_until(process, "was compiled")
        server.stop()
        output += process.communicate(timeout=120)[0]
        assert process.returncode == ExitCode.NEEDS_ATTENTION, output
        assert f"The latest checkpoint is in {run.directory}/checkpoints" in output
        assert run.num_lines() < NUM_STEPS
        server.start()
        latest = run_paths.find_latest(run.directory)
        assert latest is not None
        assert int(latest.name) > max(stored_steps())

        process = run.start_on("machine-a")
        output += read_until(process, "was compiled")
        assert int(latest.name) in stored_steps()
        server.stop()
        output += read_until(process, "Trying again")
        server.start()
        output += process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
        assert stored_steps() == {*run_paths.list_steps(run.directory / "checkpoints")}
        assert server.env["AWS_SECRET_ACCESS_KEY"] not in output

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
        local = run_storage.make_local(URL)
        case.faulty.directory = pathlib.Path(local)
        assert list(kills.differences(case, is_exact=True)) == []
        export.main([URL, str(tmp_path / "hf")])
    export.main([str(case.undisturbed.directory), str(tmp_path / "expected")])
    weights, expected = (
        safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        for name in ("hf", "expected")
    )
    assert weights.keys() == expected.keys()
    assert all(weights[name].tobytes() == expected[name].tobytes() for name in expected)
