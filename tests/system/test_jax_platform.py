"""Platform that JAX runs on, time limits of its collectives, and its compiled programs."""

import os
import signal
import subprocess
import sys

import jax
import pytest

from jaxsp.system import hardware, jax_platform
from tests import commands
from tests.messages import assert_refused


@pytest.fixture
def updates(monkeypatch, tmp_path):
    """Values that are set in JAX's config."""
    values = {}
    monkeypatch.setattr(jax.config, "update", values.__setitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return values


def set_gpus(monkeypatch, num_gpus):
    monkeypatch.setattr(hardware, "count_gpus", lambda _: num_gpus)


@pytest.mark.parametrize(
    ("num_gpus", "total", "num_processes", "per_process"),
    [(0, 8, 1, 8), (0, 8, 2, 4), (0, 9, 3, 3), (8, 8, 3, 2), (8, 2, 3, 1)],
)
def test_virtual_devices_are_divided_among_all_processes(
    monkeypatch, updates, num_gpus, total, num_processes, per_process
):
    set_gpus(monkeypatch, num_gpus)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda" if num_gpus else "cpu")
    jax_platform.choose_platform(virtual_cpu_devices=total, num_processes=num_processes)
    assert updates == {"jax_num_cpu_devices": per_process}


@pytest.mark.parametrize(("total", "num_processes", "suggestion"), [(8, 3, "6 or 9"), (1, 2, "2")])
def test_virtual_devices_must_be_a_multiple_of_the_processes(total, num_processes, suggestion):
    if jax.default_backend() != "cpu":
        pytest.skip("needs to run on the CPU")
    start = f"mesh.virtual_cpu_devices = {total}: "
    with assert_refused(str(num_processes), f"Use {suggestion}", start=start):
        jax_platform.choose_platform(virtual_cpu_devices=total, num_processes=num_processes)


def test_flags_that_the_user_has_set_stay(tmp_path):
    ours = list(jax_platform.CPU_FLAGS)
    own_timeout = "--xla_cpu_collective_call_terminate_timeout_seconds=7"
    for before, after in (
        (own_timeout, [own_timeout, *ours[1:]]),
        ("", ours),
        (" ".join(ours), ours),
        (str(tmp_path / "flags"), [str(tmp_path / "flags")]),  # a file cannot be extended
    ):
        environ = {"XLA_FLAGS": before}
        jax_platform.add_flags(environ, ours)
        assert environ["XLA_FLAGS"].split() == after


@pytest.mark.parametrize(
    ("num_gpus", "num_processes", "num_local", "flags"),
    [
        (0, 1, 1, jax_platform.CPU_FLAGS),
        (8, 8, 8, ()),
        (8, 16, 8, jax_platform.GPU_FLAGS),
        (8, 128, 1, jax_platform.GPU_FLAGS),
        (8, 129, 1, (*jax_platform.GPU_FLAGS, jax_platform.OWN_AUTOTUNING_FLAG)),
    ],
)
def test_flags_are_added_on_cpus_and_on_gpus_of_several_nodes(
    monkeypatch, num_gpus, num_processes, num_local, flags
):
    environ = {"JAX_PLATFORMS": "cuda" if num_gpus else "cpu"}
    monkeypatch.setattr("os.environ", environ)
    set_gpus(monkeypatch, num_gpus)
    jax_platform.choose_platform(
        virtual_cpu_devices=None, num_processes=num_processes, num_local_processes=num_local
    )
    assert environ.get("XLA_FLAGS", "").split() == list(flags)


@pytest.mark.e2e
def test_xla_of_this_release_knows_all_flags():
    """It aborts the process if it does not know one."""
    flags = [*jax_platform.CPU_FLAGS, *jax_platform.GPU_FLAGS, jax_platform.OWN_AUTOTUNING_FLAG]
    environ = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    assert commands.run_python("-c", "import jax; jax.devices()", env=environ).returncode == 0


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
    jobs = [subprocess.Popen([*command, limit], env=environ, **pipes) for limit in ("1", "3600")]
    outputs = [job.communicate() for job in jobs]
    assert [job.returncode for job in jobs] == [-signal.SIGABRT, 0], outputs
    assert outputs[1][0].strip() == "[4.]"


def test_without_a_gpu_jax_starts_without_messages():
    """With the extra `plan`, `import jax` and the first use of a device print 8 lines."""
    program = "import jaxsp, jax; jax.config.update('jax_platforms', 'cpu'); print(jax.devices())"
    done = commands.run_python("-c", program, env={"JAX_PLATFORMS": ""})
    assert (done.stdout, done.stderr) == ("[CpuDevice(id=0)]\n", "")


OLD = (0, 10, 1)
NEW = (0, 12, 0)


@pytest.mark.parametrize(
    ("release", "num_gpus", "num_processes", "is_used"),
    [
        (OLD, 0, 1, False),
        (NEW, 0, 1, True),
        (OLD, 8, 1, True),
        (NEW, 8, 128, False),
        (NEW, 0, 2, False),
        (NEW, 8, 129, True),
        (NEW, 0, 129, False),
    ],
)
def test_auto_keeps_programs_where_that_is_safe(
    monkeypatch, updates, tmp_path, release, num_gpus, num_processes, is_used
):
    monkeypatch.setattr(jax, "__version_info__", release)
    set_gpus(monkeypatch, num_gpus)
    jax_platform.enable_cache("auto", num_processes=num_processes)
    folder = tmp_path / "home/jaxsp/programs"
    expected = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": jax_platform.MAX_CACHE_BYTES,
    }
    assert updates == (expected if is_used else {})
    assert folder.is_dir() == is_used


def test_a_named_folder_is_used_or_refused(updates, tmp_path):
    (tmp_path / "file").touch()
    for setting in (str(tmp_path / "file"), "gs://bucket/programs"):
        with assert_refused(f"run.compilation_cache = {setting}"):
            jax_platform.enable_cache(setting)
    assert updates == {}
    jax_platform.enable_cache(str(tmp_path / "programs"), num_processes=2)
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / "programs")
