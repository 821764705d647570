"""The quickstart on one GPU gives the losses of the CPU."""

import glob
import json
import os
import pathlib
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from tests import tolerances

pytestmark = pytest.mark.gpu

REPO = pathlib.Path(__file__).parent.parent.parent

NUM_COMPARED_STEPS = 20
"""Steps whose losses are compared with those on the CPU, which takes half a minute."""


def train(directory: pathlib.Path, platform: str, *changes: str) -> list[dict]:
    """Runs the quickstart on one device. Returns the lines of metrics.jsonl.

    The schedule is constant, so that the first steps of a short and a long run are equal.
    """
    words = [
        "mesh.data=1",
        "mesh.seq=1",
        "mesh.virtual_cpu_devices=null",
        "optimizer.schedule=constant",
        *changes,
    ]
    command = [
        sys.executable,
        "-m",
        "jaxsp.train",
        "configs/quickstart.yaml",
        f"run.directory={directory}",
        *words,
    ]
    environment = {**os.environ, "JAX_PLATFORMS": platform, "XLA_FLAGS": ""}
    process = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def float32(gpu, tmp_path_factory):
    """Directory and metrics of the complete run on the GPU in float32."""
    directory = tmp_path_factory.mktemp("gpu") / "float32"
    return directory, train(directory, "cuda", "model.compute_dtype=float32")


@pytest.fixture(scope="module")
def bfloat16(gpu, tmp_path_factory):
    """Directory and metrics of the complete run on the GPU in bfloat16."""
    directory = tmp_path_factory.mktemp("gpu") / "bfloat16"
    return directory, train(directory, "cuda", "model.compute_dtype=bfloat16")


@pytest.fixture(scope="module")
def bigram_entropy():
    """Entropy of a byte of the training text given the byte before, in nats.

    2.4 for the standard library of Python 3.12.
    """
    counts = np.zeros((257, 257))
    for file in glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"):
        tokens = np.array([*pathlib.Path(file).read_bytes(), 256])
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    given_first = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return -np.sum(counts[counts > 0] * np.log(given_first[counts > 0])) / counts.sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls_below_the_bigram_entropy(request, dtype, bigram_entropy):
    _, lines = request.getfixturevalue(dtype)
    losses = [line["loss"] for line in lines]
    assert len(losses) == 400
    assert losses[0] > 5 > 3 > bigram_entropy > 2
    assert np.mean(losses[-20:]) < bigram_entropy


def test_float32_losses_are_those_of_the_cpu(float32, tmp_path):
    cpu_lines = train(
        tmp_path / "cpu", "cpu", "model.compute_dtype=float32", f"run.steps={NUM_COMPARED_STEPS}"
    )
    assert len(cpu_lines) == NUM_COMPARED_STEPS
    _, lines = float32
    for gpu_line, cpu_line in zip(lines, cpu_lines, strict=False):
        counts = ("step", "num_rows", "num_tokens", "num_loss_tokens")
        assert [gpu_line[name] for name in counts] == [cpu_line[name] for name in counts]
        assert gpu_line["loss"] == pytest.approx(cpu_line["loss"], rel=tolerances.GPU_RUN), (
            f"step {cpu_line['step']}"
        )


def test_the_banner_names_the_gpu_and_metrics_have_its_peak_memory(gpu, float32, bfloat16):
    for directory, lines in (float32, bfloat16):
        assert f"1 x {gpu.device_kind}" in (directory / "banner.txt").read_text()
        peaks = [line["device_peak_gib"] for line in lines]
        assert peaks == sorted(peaks)
        assert 0 < peaks[0] < 100
