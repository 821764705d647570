"""GPUs and memory of a node, and the limits that jaxsp sets for JAX's memory."""

import pathlib

import pytest

from jaxsp.system import hardware

GIB = 2**30


@pytest.mark.parametrize(
    ("environ", "num_gpus"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": "2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937, 3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,4,1"}, 1),
        ({"JAX_PLATFORMS": "cpu"}, 0),
        ({"JAX_PLATFORMS": "cuda,cpu"}, 4),
    ],
)
def test_only_gpus_that_jax_would_use_are_counted(monkeypatch, environ, num_gpus):
    devices = [pathlib.Path(f"/dev/nvidia{index}") for index in range(4)]
    monkeypatch.setattr(pathlib.Path, "glob", lambda *_: iter(devices))
    assert hardware.count_gpus(environ) == num_gpus
    devices.clear()
    monkeypatch.setattr(pathlib.Path, "exists", lambda _: False)
    assert hardware.count_gpus(environ) == 0


def test_gpus_under_wsl_are_counted_by_the_variable_or_as_one(monkeypatch):
    monkeypatch.setattr(pathlib.Path, "glob", lambda *_: iter([]))
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: path.name == "dxg")
    assert hardware.count_gpus({}) == 1
    assert hardware.count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 2


def test_memory_of_gpus_is_no_host_memory(tmp_path):
    """A node of GB200: two CPUs, and NUMA nodes of GPUs, some of which are empty."""
    assert 2**30 < hardware.host_memory_bytes() < 2**46
    nodes = {0: ("0-71", 500_000_000), 1: ("72-143", 490_000_000), 2: ("", 193_000_000)}
    for node, (cpus, kilobytes) in nodes.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(f"{cpus}\n")
        (tmp_path / f"node{node}/meminfo").write_text(f"Node 0 MemTotal:       {kilobytes} kB\n")
    assert hardware._cpu_memory_bytes(tmp_path) == [990_000_000 * 1024]
    (tmp_path / "node1/meminfo").unlink()
    assert hardware._cpu_memory_bytes(tmp_path) == []


EMPTY = {"XLA_CLIENT_MEM_FRACTION": "", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": ""}
USER = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "7"}


@pytest.mark.parametrize(
    ("environ", "num_local", "pool_bytes", "limit"),
    [
        ({}, 8, None, "243"),  # (2000 - 8 - 8 * 6) / 8, one process per GPU
        (EMPTY, 1, None, "248"),  # (2000 - 8 - 6) / 8
        ({}, 8, 100 * GIB + 1, "101"),
        ({}, 8, 500 * GIB, "243"),
        ({}, 8, 1, "1"),
        (USER, 8, 100 * GIB, "7"),
    ],
)
def test_jax_may_use_most_of_a_gpu_and_the_pinned_memory_that_is_needed(
    monkeypatch, environ, num_local, pool_bytes, limit
):
    """2,000 GiB of host memory and 8 GPUs. Limits that the user has set stay."""
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 2000 * GIB)
    monkeypatch.setattr(hardware, "count_gpus", lambda _: 8)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: None)
    limits = dict(environ)
    hardware.raise_limits(limits, num_local_processes=num_local, max_pool_bytes=pool_bytes)
    fraction = {} if environ == USER else {"XLA_CLIENT_MEM_FRACTION": "0.92"}
    assert limits == environ | fraction | {
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": limit,
        "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "false",
    }
