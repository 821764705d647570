"""Sizes of the mesh's axes, and where its devices stand."""

import math
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxsp.config.schema import MeshConfig
from jaxsp.core.errors import UserError
from jaxsp.runtime import device_mesh
from tests import batches
from tests.messages import assert_names, numbers


@pytest.mark.parametrize(
    ("asked", "num_devices", "sizes"),
    [
        ({}, 8, (1, 8, 1)),
        ({"seq": 4}, 8, (1, 2, 4)),
        ({"seq": 8}, 8, (1, 1, 8)),
        ({"replica": 2, "seq": 2}, 8, (2, 2, 2)),
        ({"data": 3}, 3, (1, 3, 1)),
        ({}, 1, (1, 1, 1)),
    ],
)
def test_data_takes_the_devices_that_are_left(asked, num_devices, sizes):
    assert tuple(device_mesh.resolve_axis_sizes(MeshConfig(**asked), num_devices).values()) == sizes


@pytest.mark.parametrize(
    ("asked", "num_devices", "start", "counts"),
    [
        ({"seq": 3}, 8, "mesh.replica = 1, mesh.data = -1, mesh.seq = 3: ", {3, 8}),
        ({"seq": 16}, 8, "mesh.replica = 1, mesh.data = -1, mesh.seq = 16: ", {16, 8}),
        ({"data": 2, "seq": 2}, 8, "mesh.replica = 1, mesh.data = 2, mesh.seq = 2: ", {4, 8}),
        (
            {"replica": 2, "data": 2, "seq": 4},
            8,
            "mesh.replica = 2, mesh.data = 2, mesh.seq = 4: ",
            {16, 8},
        ),
        ({"replica": 3}, 8, "mesh.replica = 3, mesh.data = -1, mesh.seq = 1: ", {3, 8}),
        ({"seq": 4}, 1, "mesh.replica = 1, mesh.data = -1, mesh.seq = 4: ", {4, 1}),
    ],
)
def test_a_mesh_that_does_not_fit_is_answered_with_ones_that_do(asked, num_devices, start, counts):
    with pytest.raises(UserError) as caught:
        device_mesh.resolve_axis_sizes(MeshConfig(**asked), num_devices)
    (said,) = caught.value.problems
    assert said.startswith(start)
    assert set(numbers(said.removeprefix(start))[:2]) == counts, "devices needed and seen"
    replica, degrees, virtual = re.search(
        r"mesh\.replica=(\d+) .*mesh\.data=-1 .*mesh\.seq=([\d, or]+), .*virtual_cpu_devices=(\d+)",
        said,
    ).groups()
    for seq in re.findall(r"\d+", degrees):
        device_mesh.resolve_axis_sizes(MeshConfig(replica=int(replica), seq=int(seq)), num_devices)
    device_mesh.resolve_axis_sizes(MeshConfig(**asked), int(virtual))


@pytest.mark.parametrize(
    ("platform", "total", "num_processes", "own"),
    [("cpu", 8, 1, 8), ("cpu", 8, 2, 4), ("cpu", 9, 3, 3), ("cuda", 8, 3, 2), ("cuda", 2, 3, 1)],
)
def test_virtual_devices_are_those_of_all_processes_together(
    monkeypatch, platform, total, num_processes, own
):
    chosen = {}
    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    monkeypatch.setattr(device_mesh.cluster, "count_gpus", lambda _: 8 if platform == "cuda" else 0)
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    device_mesh.choose_platform(virtual_cpu_devices=total, num_processes=num_processes)
    assert chosen == {"jax_num_cpu_devices": own}


@pytest.mark.parametrize(("total", "num_processes", "near"), [(8, 3, "6 or 9"), (1, 2, "2")])
def test_virtual_devices_that_processes_cannot_share_are_refused(total, num_processes, near):
    if jax.default_backend() != "cpu":
        pytest.skip("needs to run on the CPU")
    with pytest.raises(UserError) as caught:
        device_mesh.choose_platform(virtual_cpu_devices=total, num_processes=num_processes)
    assert_names(
        caught.value,
        str(num_processes),
        f"Use {near}",
        start=f"mesh.virtual_cpu_devices = {total}: ",
    )


def test_devices_that_share_rows_are_neighbours():
    if jax.device_count() != 8:
        pytest.skip("needs 8 devices")
    made = device_mesh.make_mesh({"replica": 2, "data": 2, "seq": 2})
    assert made.axis_names == ("replica", "data", "seq")
    assert set(made.axis_types) == {jax.sharding.AxisType.Auto}
    ids = np.vectorize(lambda device: device.id)(made.devices)
    assert (ids == np.arange(8).reshape(2, 2, 2)).all()
    assert (device_mesh.num_groups(made), device_mesh.num_shards(made)) == (4, 4)


OWN_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=7"


def test_collectives_on_cpu_devices_wait_for_a_day_unless_the_user_set_a_limit(tmp_path):
    ours = device_mesh.collective_timeout_flags()
    environ = {"XLA_FLAGS": OWN_TIMEOUT}
    device_mesh._raise_collective_timeouts(environ)
    assert environ["XLA_FLAGS"].split() == [OWN_TIMEOUT, *ours[1:]]
    environ = {}
    device_mesh._raise_collective_timeouts(environ)
    assert environ["XLA_FLAGS"].split() == ours
    device_mesh._raise_collective_timeouts(environ)
    assert environ["XLA_FLAGS"].split() == ours, "a second call adds nothing"
    environ = {"XLA_FLAGS": str(tmp_path / "flags")}
    device_mesh._raise_collective_timeouts(environ)
    assert environ == {"XLA_FLAGS": str(tmp_path / "flags")}, "a file of flags cannot be extended"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_only_cpu_devices_get_flags_for_their_collectives(monkeypatch, platform):
    environ = {"JAX_PLATFORMS": platform}
    monkeypatch.setattr(device_mesh.os, "environ", environ)
    monkeypatch.setattr(device_mesh.cluster, "count_gpus", lambda _: 8 if platform == "cuda" else 0)
    device_mesh.choose_platform(virtual_cpu_devices=None)
    assert ("XLA_FLAGS" in environ) == (platform == "cpu")


ONE_DEVICE_IS_LATE = """
import sys, time
import jax, numpy as np
from jaxsp.runtime import device_mesh
device_mesh.COLLECTIVE_TIMEOUT_S = int(sys.argv[1])
device_mesh.choose_platform(virtual_cpu_devices=2)

def late(device):
    time.sleep(3 * int(device == 0))
    return np.float32(2)

def total(x):
    device = jax.lax.axis_index("seq")
    factor = jax.pure_callback(late, jax.ShapeDtypeStruct((), "float32"), device)
    return jax.lax.psum(x * factor, "seq")

devices = device_mesh.make_mesh({"replica": 1, "data": 1, "seq": 2})
specs = {"in_specs": jax.P("seq"), "out_specs": jax.P(), "check_vma": False}
print(jax.jit(jax.shard_map(total, mesh=devices, **specs))(np.ones(2, "float32")))
"""


@pytest.mark.e2e
def test_a_device_that_is_late_does_not_abort_the_process():
    """With a limit of one second it does, as it did after 40 s with XLA's default."""
    environ = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ONE_DEVICE_IS_LATE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    limits = (1, device_mesh.COLLECTIVE_TIMEOUT_S)
    jobs = [subprocess.Popen([*command, str(limit)], env=environ, **pipes) for limit in limits]
    printed = [job.communicate() for job in jobs]
    assert [job.returncode for job in jobs] == [-signal.SIGABRT, 0], printed
    assert printed[1][0].strip() == "[4.]"


GIB = 2**30


@pytest.fixture
def node(monkeypatch):
    """2,000 GiB of host memory and 8 GPUs."""
    monkeypatch.setattr(device_mesh.cluster, "host_memory_bytes", lambda: 2000 * GIB)
    monkeypatch.setattr(device_mesh.cluster, "count_gpus", lambda _: 8)


@pytest.mark.parametrize(
    ("num_local", "pool_bytes", "limit"),
    [
        (8, None, "243"),  # (2000 - 8 - 8 * 6) / 8, a process for each GPU
        (1, None, "248"),  # (2000 - 8 - 6) / 8
        (8, 100 * GIB + 1, "101"),
        (8, 500 * GIB, "243"),
        (8, 1, "1"),
    ],
)
def test_jax_may_use_most_of_a_gpu_and_the_pinned_memory_that_is_needed(
    node, num_local, pool_bytes, limit
):
    found = {}
    device_mesh._raise_memory_limits(
        found, num_local_processes=num_local, max_pool_bytes=pool_bytes
    )
    assert found == {
        "XLA_CLIENT_MEM_FRACTION": "0.92",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": limit,
        "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "false",
    }


def test_memory_limits_that_the_user_has_set_stay(node):
    given = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "7"}
    found = dict(given)
    device_mesh._raise_memory_limits(found, num_local_processes=8, max_pool_bytes=100 * GIB)
    assert found == given | {"XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "false"}


def test_processes_and_the_operating_system_take_host_memory_first():
    assert device_mesh.usable_host_bytes(100 * GIB, num_processes=4) == (100 - 8 - 4 * 6) * GIB
    assert device_mesh.usable_host_bytes(10 * GIB, num_processes=4) == 0


def test_the_limit_of_the_pool_does_not_change_the_room_of_the_host(node, monkeypatch):
    """jaxsp sets the limit, to what is offloaded; copies for checkpoints are not in the pool."""
    share = device_mesh.host_bytes_per_device(num_processes=8, num_devices=1)
    assert share == 243 * GIB
    assert device_mesh.pinned_pool_limit({}) == math.inf
    limits = {}
    device_mesh._raise_memory_limits(limits, num_local_processes=8, max_pool_bytes=10 * GIB)
    monkeypatch.setattr(device_mesh.os, "environ", limits)
    assert device_mesh.pinned_pool_limit(limits) == 10 * GIB
    assert device_mesh.host_bytes_per_device(num_processes=8, num_devices=1) == share


@pytest.mark.parametrize(
    ("needed", "limit", "expected"),
    [
        (100 * GIB, math.inf, 128 * GIB),
        (128 * GIB, math.inf, 128 * GIB),
        (100 * GIB, 112 * GIB, 112 * GIB),
        (1, 2**30, 2**21),
    ],
)
def test_the_pool_of_pinned_memory_is_a_power_of_two_up_to_its_limit(needed, limit, expected):
    assert device_mesh.pinned_pool_size(needed, limit) == expected


def test_the_nodes_memory_is_between_a_laptops_and_the_largest():
    assert 2**30 < device_mesh.cluster.host_memory_bytes() < 2**46


@pytest.mark.parametrize(("degree", "use"), [(1, "63 or 66"), (3, "60 or 66"), (None, "60 or 66")])
def test_rows_get_values_that_their_layout_can_have_and_all_if_it_is_not_known(degree, use):
    (problem,) = device_mesh.find_division_problems(
        batches.settings(), {"replica": 1, "data": 1, "seq": 3}, degree=degree
    )
    assert_names(problem, f"Use {use}", start="data.row_tokens = 64: ")
