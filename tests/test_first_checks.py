"""scripts/bench/first_checks.py checks assumptions on GPUs; its parts that need none."""

import datasets
import pytest

from jaxsp.system import hardware
from scripts import gpu_stages
from scripts.bench import first_checks
from scripts.bench.kernel_trace import Kernel


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """Restores the cache that a check replaces for its process."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", datasets.config.HF_DATASETS_CACHE)


@pytest.mark.skipif(hardware.count_gpus({}) > 0, reason="needs a machine without an NVIDIA GPU")
def test_without_a_gpu_it_exits_2_and_names_what_is_missing(tmp_path, capsys):
    out = tmp_path / "first.json"
    assert first_checks.main(["offload", "--out", str(out)]) == 2
    assert "There is no NVIDIA GPU here" in capsys.readouterr().err
    assert not out.exists()


def test_the_first_stage_has_every_check():
    assert tuple(first_checks.CHECKS) == gpu_stages.CHECKS


KERNELS = [
    Kernel("gemm_a", 0, 10),
    Kernel("nccl_all_gather", 20, 60),
    Kernel("gemm_a", 30, 42),
    Kernel("softmax", 42, 50),
    Kernel("gemm_b", 70, 80),
]
