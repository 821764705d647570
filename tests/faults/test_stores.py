"""A run in an object store that is killed, stopped, moved to another machine and cut off."""

import pathlib
import signal
import subprocess
import time

import pytest
import safetensors.numpy

from jaxsp import export
from jaxsp.runtime import run_paths
from jaxsp.storage import copies
from tests import commands
from tests.faults import kills
from tests.storage import store_server

pytestmark = pytest.mark.e2e

NUM_STEPS = 400
SAVE_EVERY = 40

URL = f"s3://{store_server.BUCKET}/runs/first"


class StoreRun:
    """A run whose directory is URL, on one of several machines."""

    def __init__(self, config: pathlib.Path):
        self._config = config
        self._files = store_server.open_filesystem()

    def start(self, machine: str) -> subprocess.Popen:
        words = (f"run.directory={URL}", "mesh.data=1", "mesh.seq=2", "mesh.virtual_cpu_devices=2")
        env = {"XDG_CACHE_HOME": str(self._config.parent / machine)}
        return commands.start_python("-m", "jaxsp.train", self._config, *words, env=env)

    def wait_for_step(self, process: subprocess.Popen, step: int) -> int:
        """Waits until the store has a checkpoint of this step or a later one, and returns it."""
        deadline = time.monotonic() + 120
        while True:
            found = self._files.glob(f"{URL}/checkpoints/*/meta/metadata")
            latest = max((int(name.split("/")[-3]) for name in found), default=0)
            if latest >= step:
                return latest
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_run_in_a_store_is_bitwise_equal_to_a_local_one(tmp_path, monkeypatch):
    case = kills.Case(tmp_path, num_steps=NUM_STEPS, save_every=SAVE_EVERY, eval_every=100)
    kills.run_undisturbed(case, "1x2", timeout_s=300)
    with store_server.run_server() as server:
        run = StoreRun(tmp_path / "config.yaml")
        process = run.start("machine-a")
        killed_at = run.wait_for_step(process, SAVE_EVERY)
        process.kill()
        process.communicate()
        assert killed_at < NUM_STEPS

        process = run.start("machine-a")
        stopped_at = run.wait_for_step(process, killed_at + 1)
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert stopped_at < NUM_STEPS, output

        process = run.start("machine-b")
        assert process.stdout is not None
        for line in process.stdout:
            if "was compiled" in line:
                break
        server.stop()
        time.sleep(5)
        server.start()
        output, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert server.env["AWS_SECRET_ACCESS_KEY"] not in output + error

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
