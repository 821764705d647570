"""The device mesh, replica x data x seq, and its config."""

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import pydantic

from jaxsp.config.fields import (
    HERE,
    MAX_COUNT,
    ConfigSection,
    CountOrAuto,
    PositiveCount,
    with_examples,
)
from jaxsp.core import axes, errors
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_count

if TYPE_CHECKING:  # jax is imported in functions, because the config is read without it
    import jax


class MeshConfig(ConfigSection):
    """Device mesh of replica x data x seq devices."""

    replica: PositiveCount = 1
    """Number of replicas. Weights are sharded over data x seq and repeated over replica."""
    data: Annotated[int, pydantic.Field(ge=-1, le=MAX_COUNT)] = -1
    """Number of sequence-parallel groups in a replica, each with its own rows. -1: as many as the
    devices allow."""
    seq: Annotated[CountOrAuto, with_examples(4)] = 1
    """Number of devices that share each row (degree of sequence parallelism). auto: the number with
    which a step recomputes least (memory.remat) by the memory formula, of several the smallest;
    groups larger than a node of 8 only to save attention. It requires mesh.data=-1."""
    virtual_cpu_devices: Annotated[PositiveCount | None, with_examples(8)] = None
    """Number of devices to split the CPU into, for trying a mesh without GPUs. It has no effect
    with an accelerator."""

    def find_problems(self) -> Iterator[str]:
        if self.data == 0:
            yield f"{HERE}.data = 0: must be -1 or at least 1. Use {HERE}.data=-1."
        if self.seq == "auto" and self.data != -1:
            yield f"{HERE}.seq = auto: {HERE}.data follows from it. Use {HERE}.data=-1."

    @property
    def degree(self) -> int:
        """Number of devices that share each row, after `auto` is resolved."""
        assert isinstance(self.seq, int), "planning/candidates.py resolves it"
        return self.seq


def resolve_axis_sizes(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """Size of each axis, with data = -1 filled in.
    Raises: UserError if the mesh does not fit the devices."""
    inner = mesh.replica * mesh.degree
    data = num_devices // inner if mesh.data == -1 else mesh.data
    if data < 1 or data * inner != num_devices:
        needed = f"a multiple of {inner}" if mesh.data == -1 else f"{mesh.data * inner}"
        replica = mesh.replica if num_devices % mesh.replica == 0 else 1
        per_replica = num_devices // replica
        divisors = (size for size in range(1, per_replica + 1) if per_replica % size == 0)
        raise UserError(
            f"mesh.replica = {mesh.replica}, mesh.data = {mesh.data}, mesh.seq = {mesh.degree}: "
            f"uses {needed} devices, and JAX sees {num_devices}. "
            f"Use mesh.replica={replica} mesh.data=-1 and "
            f"mesh.seq={errors.format_choices(divisors)}, "
            "or, with virtual CPU devices (where there is no accelerator, or with "
            f"JAX_PLATFORMS=cpu), mesh.virtual_cpu_devices={inner * max(mesh.data, 1)}."
        )
    return {axes.REPLICA: mesh.replica, axes.DATA: data, axes.SEQ: mesh.degree}


def make_mesh(sizes: dict[str, int], devices: Any = None) -> "jax.sharding.Mesh":
    """Builds a mesh with these axis sizes, of these devices or of all.

    Devices of a sequence-parallel group are neighbors. So `seq` stays within a node if it divides
    the node's devices, and spans as few nodes as possible if not.
    """
    import jax

    devices = jax.devices() if devices is None else devices
    if devices[0].platform == "gpu":
        # jax.devices() has the order of processes, which SLURM may deal to the nodes in turn. XLA
        # numbers GPUs by node. From 0.12 on, jax.make_mesh sorts GPUs by these numbers too
        devices = sorted(devices, key=lambda device: device.id)
    lengths = tuple(sizes[axis] for axis in axes.ALL)
    # The default of jax.make_mesh is Explicit
    types = (jax.sharding.AxisType.Auto,) * len(axes.ALL)
    return jax.make_mesh(lengths, axes.ALL, axis_types=types, devices=devices)


def num_groups(mesh: "jax.sharding.Mesh") -> int:
    """Number of sequence-parallel groups."""
    return mesh.shape[axes.REPLICA] * mesh.shape[axes.DATA]


def num_shards(mesh: "jax.sharding.Mesh") -> int:
    """Number of shards that a sharded weight has."""
    return mesh.shape[axes.DATA] * mesh.shape[axes.SEQ]


def describe(mesh: "jax.sharding.Mesh") -> tuple[str, str]:
    """Describes the devices of a mesh, with the versions of JAX and Python; and its axes, with what
    its groups do."""
    import jax

    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    if jax.process_count() > 1:
        devices += f" in {jax.process_count()} processes"
    devices += f", jax {jax.__version__}, Python {platform.python_version()}"
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    seq = mesh.shape[axes.SEQ]
    if seq == 1:
        return devices, f"{shape}: every device works on whole rows"
    groups = format_count(num_groups(mesh), "sequence-parallel group")
    groups += f" of {seq} devices; the devices of a group split each of its rows"
    return devices, f"{shape}: {groups}"
