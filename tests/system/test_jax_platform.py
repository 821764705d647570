"""Platform that JAX runs on, and time limits of its collectives."""

import os
import signal
import subprocess
import sys

import jax
import pytest

from jaxsp.core.errors import UserError
from jaxsp.system import hardware, jax_platform
from tests.messages import assert_names


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


@pytest.mark.parametrize(("total", "num_processes", "suggestion"), [(8, 3, "6 or 9"), (1, 2, "2")])
def test_virtual_devices_must_be_a_multiple_of_the_processes(total, num_processes, suggestion):
    if jax.default_backend() != "cpu":
        pytest.skip("needs to run on the CPU")
    with pytest.raises(UserError) as error:
        jax_platform.choose_platform(virtual_cpu_devices=total, num_processes=num_processes)
    start = f"mesh.virtual_cpu_devices = {total}: "
    assert_names(error.value, str(num_processes), f"Use {suggestion}", start=start)


OWN_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=7"


def test_collectives_on_cpu_devices_wait_for_a_day_unless_the_user_set_a_limit(tmp_path):
    ours = list(jax_platform.CPU_FLAGS)
    environ = {"XLA_FLAGS": OWN_TIMEOUT}
    jax_platform.add_flags(environ, ours)
    assert environ["XLA_FLAGS"].split() == [OWN_TIMEOUT, *ours[1:]]
    environ = {}
    jax_platform.add_flags(environ, ours)
    assert environ["XLA_FLAGS"].split() == ours
    jax_platform.add_flags(environ, ours)
    assert environ["XLA_FLAGS"].split() == ours, "a second call adds nothing"
    environ = {"XLA_FLAGS": str(tmp_path / "flags")}
    jax_platform.add_flags(environ, ours)
    assert environ == {"XLA_FLAGS": str(tmp_path / "flags")}, "a file of flags cannot be extended"


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


ONE_DEVICE_IS_LATE = """
import sys, time
import jax, numpy as np
from jaxsp.system import device_mesh, jax_platform
jax_platform.CPU_FLAGS = [flag.replace("3600", sys.argv[1]) for flag in jax_platform.CPU_FLAGS]
jax_platform.choose_platform(virtual_cpu_devices=2)

def late(device):
    time.sleep(3 * int(device == 0))
    return np.float32(2)

def total(x):
    device = jax.lax.axis_index("seq")
    factor = jax.pure_callback(late, jax.ShapeDtypeStruct((), "float32"), device)
    return jax.lax.psum(x * factor, "seq")

mesh = device_mesh.make_mesh({"replica": 1, "data": 1, "seq": 2})
specs = {"in_specs": jax.P("seq"), "out_specs": jax.P(), "check_vma": False}
print(jax.jit(jax.shard_map(total, mesh=mesh, **specs))(np.ones(2, "float32")))
"""


@pytest.mark.e2e
def test_a_device_that_is_late_does_not_abort_the_process():
    """With a limit of one second it does, as it did after 40 s with XLA's default."""
    environ = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ONE_DEVICE_IS_LATE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    limits = (1, 3600)
    jobs = [subprocess.Popen([*command, str(limit)], env=environ, **pipes) for limit in limits]
    outputs = [job.communicate() for job in jobs]
    assert [job.returncode for job in jobs] == [-signal.SIGABRT, 0], outputs
    assert outputs[1][0].strip() == "[4.]"
