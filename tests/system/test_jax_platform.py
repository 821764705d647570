"""Platform that JAX runs on, and time limits of its collectives."""

import os
import subprocess
import sys

import jax
import pytest

from jaxsp.system import hardware, jax_platform


def set_platform(monkeypatch, platform):
    """Simulates a node without GPUs, or with 8."""
    monkeypatch.setattr(hardware, "count_gpus", lambda _: 8 if platform == "cuda" else 0)


@pytest.mark.parametrize(
    ("platform", "total", "num_processes", "per_process"),
    [("cpu", 8, 1, 8), ("cpu", 8, 2, 4), ("cpu", 9, 3, 3), ("cuda", 8, 3, 2), ("cuda", 2, 3, 1)],
)
def test_virtual_devices_are_divided_among_all_processes(
    monkeypatch, platform, total, num_processes, per_process
):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    set_platform(monkeypatch, platform)
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    jax_platform.choose_platform(virtual_cpu_devices=total, num_processes=num_processes)
    assert updates == {"jax_num_cpu_devices": per_process}


@pytest.mark.parametrize(
    ("platform", "num_processes", "num_local", "flags"),
    [
        ("cpu", 1, 1, jax_platform.CPU_FLAGS),
        ("cuda", 1, 1, ()),
        ("cuda", 8, 8, ()),
        ("cuda", 16, 8, jax_platform.GPU_FLAGS),
        ("cuda", 2, 1, jax_platform.GPU_FLAGS),
        ("cuda", 128, 1, jax_platform.GPU_FLAGS),
        ("cuda", 129, 1, (*jax_platform.GPU_FLAGS, jax_platform.OWN_AUTOTUNING_FLAG)),
    ],
)
def test_flags_are_added_on_cpus_and_on_gpus_of_several_nodes(
    monkeypatch, platform, num_processes, num_local, flags
):
    environ = {"JAX_PLATFORMS": platform}
    monkeypatch.setattr("os.environ", environ)
    set_platform(monkeypatch, platform)
    jax_platform.choose_platform(
        virtual_cpu_devices=None, num_processes=num_processes, num_local_processes=num_local
    )
    assert environ.get("XLA_FLAGS", "").split() == list(flags)


@pytest.mark.e2e
def test_xla_of_this_release_knows_all_flags():
    """It aborts the process if it does not know one."""
    flags = [
        *jax_platform.CPU_FLAGS,
        *jax_platform.GPU_FLAGS,
        jax_platform.OWN_AUTOTUNING_FLAG,
    ]
    environ = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environ, check=True)
