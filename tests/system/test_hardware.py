"""GPUs and memory of a node."""

import pathlib

import pytest

from jaxsp.system import hardware


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


def test_host_memory_is_between_that_of_a_laptop_and_the_largest_node():
    assert 2**30 < hardware.host_memory_bytes() < 2**46


def test_memory_of_gpus_is_no_host_memory(tmp_path):
    """A node of GB200: two CPUs, and NUMA nodes of GPUs, some of which are empty."""
    for node, cpus, kilobytes in (
        (0, "0-71", 500_000_000),
        (1, "72-143", 490_000_000),
        (2, "", 193_000_000),
        (10, "", 0),
    ):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       {kilobytes} kB\n")
    assert hardware._cpu_memory_bytes(tmp_path) == [990_000_000 * 1024]
    (tmp_path / "node1/meminfo").unlink()
    assert hardware._cpu_memory_bytes(tmp_path) == []
    assert hardware._cpu_memory_bytes(tmp_path / "none") == []
