"""The device mesh: replica x data x seq."""

import os

import jax

from jaxsp.core import axes, config, errors, processes


def choose_platform(*, virtual_cpu_devices: int | None, num_processes: int = 1) -> None:
    """Where there is no NVIDIA GPU, takes the CPU, split into so many devices. Call before JAX counts devices.

    Args:   virtual_cpu_devices: of all processes together, so that a config means the same mesh however it is launched.
    Raises: UserError if the processes cannot share them.
    """
    no_gpu = processes.num_gpus(os.environ) == 0
    if no_gpu and not os.environ.get("JAX_PLATFORMS"):
        # an installed CUDA plugin would look for a GPU, and print a traceback when it finds none
        jax.config.update("jax_platforms", "cpu")
    if virtual_cpu_devices is None:
        return
    own, rest = divmod(virtual_cpu_devices, num_processes)
    if no_gpu and rest:
        above = (own + 1) * num_processes
        near = errors.choices([above - num_processes, above] if own else [above])
        raise errors.UserError(
            f"mesh.virtual_cpu_devices = {virtual_cpu_devices}: cannot be shared equally by {num_processes} processes. "
            f"Use {near}."
        )
    jax.config.update("jax_num_cpu_devices", max(own, 1))


def shape(mesh: config.Mesh, num_devices: int) -> dict[str, int]:
    """Size of each axis, with data = -1 filled in. Raises: UserError if the mesh does not fit the devices."""
    inner = mesh.replica * mesh.seq
    data = num_devices // inner if mesh.data == -1 else mesh.data
    if data < 1 or data * inner != num_devices:
        asked = f"mesh.replica = {mesh.replica}, mesh.data = {mesh.data}, mesh.seq = {mesh.seq}"
        needed = f"a multiple of {inner}" if mesh.data == -1 else f"{mesh.data * inner}"
        replica = mesh.replica if num_devices % mesh.replica == 0 else 1
        left = num_devices // replica
        degrees = errors.choices(seq for seq in range(1, left + 1) if left % seq == 0)
        raise errors.UserError(
            f"{asked}: uses {needed} devices, and JAX sees {num_devices}. "
            f"Use mesh.replica={replica} mesh.data=-1 and mesh.seq={degrees}, or, with virtual CPU devices (where there is no "
            f"accelerator, or with JAX_PLATFORMS=cpu), mesh.virtual_cpu_devices={inner * max(mesh.data, 1)}."
        )
    return {axes.REPLICA: mesh.replica, axes.DATA: data, axes.SEQ: mesh.seq}


def make(sizes: dict[str, int], devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh of these axis sizes; devices that share rows are neighbours, so that `seq` stays within a node."""
    lengths = tuple(sizes[axis] for axis in axes.ALL)
    # jax.make_mesh makes Explicit axes unless told otherwise
    types = (jax.sharding.AxisType.Auto,) * len(axes.ALL)
    return jax.make_mesh(lengths, axes.ALL, axis_types=types, devices=devices)


def num_groups(mesh: jax.sharding.Mesh) -> int:
    """Groups of devices that each work on rows of their own."""
    return mesh.shape[axes.REPLICA] * mesh.shape[axes.DATA]


def num_shards(mesh: jax.sharding.Mesh) -> int:
    """Parts that a sharded weight is cut into."""
    return mesh.shape[axes.DATA] * mesh.shape[axes.SEQ]
