"""scripts/bench/first_checks.py checks assumptions on GPUs; its parts that need none."""

import json

import datasets
import pytest

from jaxsp.attention.kernels import cudnn_limits
from jaxsp.planning import absent
from jaxsp.system import hardware
from scripts import gpu_stages
from scripts.bench import first_checks, kernel_trace
from scripts.bench.first_checks import Number
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


@pytest.mark.parametrize(
    ("values", "code"), [([1.0, 1.1], 0), ([1.0, 1.2], 1), ([], 1)], ids=["in", "out", "none"]
)
def test_numbers_are_kept_and_those_out_of_range_fail(monkeypatch, tmp_path, capsys, values, code):
    monkeypatch.setattr(first_checks, "count_gpus", lambda: 2)
    numbers = [Number("a ratio", value, "", 0.9, 1.1) for value in values]
    monkeypatch.setitem(first_checks.CHECKS, "offload", ("a topic", lambda folder: iter(numbers)))
    out = tmp_path / "first.json"
    assert first_checks.main(["offload", "--out", str(out)]) == code
    printed = capsys.readouterr().out
    assert printed.count("a ratio") == len(values)
    assert printed.count("NOT AS ASSUMED") == sum(value > 1.1 for value in values)
    if values:
        cases = json.loads(out.read_text())["cases"]
        assert [case["value"] for case in cases] == values


def test_the_first_stage_has_every_check():
    assert tuple(first_checks.CHECKS) == gpu_stages.CHECKS


@pytest.mark.e2e
def test_arrays_are_restored_as_they_were_before_the_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    wrong, seconds = first_checks.measure_checkpoint(tmp_path, mib=1)
    assert wrong.value == 0
    assert seconds.value > 0


KERNELS = [
    Kernel("gemm_a", 0, 10),
    Kernel("nccl_all_gather", 20, 60),
    Kernel("gemm_a", 30, 42),
    Kernel("softmax", 42, 50),
    Kernel("gemm_b", 70, 80),
]


def test_cudnn_attention_compiles_for_the_workspace_check():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    work = first_checks.make_workload(num_heads=4, num_kv_heads=2, max_segments=8, row_tokens=1024)
    (device,) = absent.make_devices("h100-80gb", 1)
    split = cudnn_limits.choose_split(work)
    assert "__cudnn$fmha" in first_checks.compile_attention(work, split, device).as_text()


def test_idle_time_is_that_without_any_kernel():
    assert kernel_trace.idle_fraction(KERNELS) == pytest.approx((10 + 10) / 80)
    assert kernel_trace.idle_fraction(KERNELS[2:4]) == 0


def test_slowdown_compares_kernels_of_one_name_beside_a_collective_and_alone():
    assert kernel_trace.collective_slowdown(KERNELS) == pytest.approx(1.2)
    assert kernel_trace.collective_slowdown(KERNELS[1:]) is None
