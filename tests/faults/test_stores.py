"""A run in an object store that is killed, stopped, moved to another machine and cut off."""

import pathlib
import signal
import subprocess
import time

import pytest
import safetensors.numpy

from jaxsp import export
from jaxsp.core import urls
from jaxsp.runtime import run_paths
from jaxsp.storage import copies
from tests import commands
from tests.faults import kills
from tests.storage import store_server

pytestmark = pytest.mark.e2e

NUM_STEPS = 150

URL = f"s3://{store_server.BUCKET}/runs/first"


class StoreRun(kills.Run):
    """A run whose directory is URL, on one of several machines."""

    def start_on(self, machine: str) -> subprocess.Popen:
        """Starts or resumes the run; its output is read from stdout."""
        cache = self.config.parent / machine
        self.directory = cache / "jaxsp/runs" / urls.name_local(URL)
        changes = ("mesh.data=1", "mesh.seq=2", "mesh.virtual_cpu_devices=2")
        return commands.start_python(
            "-m",
            "jaxsp.train",
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


def read_until(process: subprocess.Popen, text: str) -> str:
    """Reads the output of a process until a line contains a text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def test_a_run_in_a_store_is_bitwise_equal_to_a_local_one(tmp_path, monkeypatch):
    case = kills.Case(tmp_path, num_steps=NUM_STEPS, save_every=10, eval_every=50)
    kills.run_undisturbed(case, "1x2", timeout_s=300)
    with store_server.run_server() as server:
        run = StoreRun(case.faulty.config, "first")
        run.signal_after(run.start_on("machine-a"), 40, signal.SIGKILL)
        assert 40 <= run.num_lines() < NUM_STEPS
        output = run.signal_after(run.start_on("machine-a"), 80, signal.SIGTERM)
        assert 80 <= run.num_lines() < NUM_STEPS, output

        process = run.start_on("machine-b")
        output = read_until(process, "was compiled")
        server.stop()
        output += read_until(process, "CANNOT BE WRITTEN")
        server.start()
        output += process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
        assert server.env["AWS_SECRET_ACCESS_KEY"] not in output

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-c"))
        local = copies.make_local(URL, field="RUN")
        checkpoint = run_paths.find_latest(local)
        assert checkpoint is not None
        copies.fetch(checkpoint)
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
