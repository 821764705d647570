"""Axis sizes of the mesh, and its order of devices."""

import re
import types

import jax
import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.system import device_mesh
from jaxsp.system.device_mesh import MeshConfig
from tests.messages import numbers


@pytest.mark.parametrize(
    ("fields", "num_devices", "sizes"),
    [
        ({}, 8, (1, 8, 1)),
        ({"seq": 4}, 8, (1, 2, 4)),
        ({"replica": 2, "seq": 2}, 8, (2, 2, 2)),
        ({"data": 3}, 3, (1, 3, 1)),
    ],
)
def test_data_gets_the_remaining_devices(fields, num_devices, sizes):
    resolved = device_mesh.resolve_axis_sizes(MeshConfig(**fields), num_devices)
    assert tuple(resolved.values()) == sizes


@pytest.mark.parametrize(
    ("replica", "data", "seq", "num_devices", "counts"),
    [
        (1, -1, 3, 8, {3, 8}),
        (1, 2, 2, 8, {4, 8}),
        (2, 2, 4, 8, {16, 8}),
        (3, -1, 1, 8, {3, 8}),
        (1, -1, 4, 1, {4, 1}),
    ],
)
def test_the_error_for_a_mesh_that_does_not_fit_suggests_meshes_that_do(
    replica, data, seq, num_devices, counts
):
    config = MeshConfig(replica=replica, data=data, seq=seq)
    with pytest.raises(UserError) as error:
        device_mesh.resolve_axis_sizes(config, num_devices)
    (problem,) = error.value.problems
    start = f"mesh.replica = {replica}, mesh.data = {data}, mesh.seq = {seq}: "
    assert problem.startswith(start)
    assert set(numbers(problem.removeprefix(start))[:2]) == counts, "devices needed and seen"
    replica, degrees, virtual = re.search(
        r"mesh\.replica=(\d+) .*mesh\.data=-1 .*mesh\.seq=([\d, or]+), .*virtual_cpu_devices=(\d+)",
        problem,
    ).groups()
    for seq in re.findall(r"\d+", degrees):
        device_mesh.resolve_axis_sizes(MeshConfig(replica=int(replica), seq=int(seq)), num_devices)
    device_mesh.resolve_axis_sizes(config, int(virtual))


def test_devices_of_a_group_are_neighbors(monkeypatch):
    """XLA numbers the GPUs of a node 0 and 1, although their processes are 0 and 2."""
    if jax.device_count() != 8:
        pytest.skip("needs 8 devices")
    mesh = device_mesh.make_mesh({"replica": 2, "data": 2, "seq": 2})
    assert mesh.axis_names == ("replica", "data", "seq")
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert (ids == np.arange(8).reshape(2, 2, 2)).all()
    assert (device_mesh.num_groups(mesh), device_mesh.num_shards(mesh)) == (4, 4)
    by_process = [0, 2, 1, 3]
    monkeypatch.setattr(jax, "make_mesh", lambda *_, devices, **__: [each.id for each in devices])
    for platform, order in (("gpu", [0, 1, 2, 3]), ("cpu", by_process)):
        devices = [types.SimpleNamespace(platform=platform, id=number) for number in by_process]
        assert device_mesh.make_mesh({"replica": 1, "data": 4, "seq": 1}, devices) == order
