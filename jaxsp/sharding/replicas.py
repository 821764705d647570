"""Arrays that one replica reads from storage and the others receive over the devices.

Otherwise each of 128 replicas would read the whole model, and the whole state, at the same time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from jaxsp.core import axes


def find_readers(mesh: Mesh) -> set[jax.Device]:
    """Devices whose shards are read: those of replica 0, or all if no process would read less."""
    first = {*mesh.devices[0].flat}  # the replica axis is the first
    every = {*mesh.devices.flat}
    is_shared = {x.process_index for x in first} != {x.process_index for x in every}
    return first if is_shared else every


def is_broadcast(mesh: Mesh) -> bool:
    """True if only replica 0 reads; all processes must then call `broadcast` together."""
    return len(find_readers(mesh)) < mesh.size


def on_first_replica(place: NamedSharding) -> NamedSharding:
    """The same sharding on the devices of replica 0 only."""
    mesh = place.mesh
    assert isinstance(mesh, Mesh), "of devices"
    first = Mesh(mesh.devices[:1], mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(first, place.spec, memory_kind=place.memory_kind)


def broadcast(like: Any, place: NamedSharding, shards: Sequence[Array]) -> Array:
    """An array from the shards of replica 0.

    Args:
        like: its shape and dtype.
        shards: those of this process's devices in replica 0, in the memory of the device or host;
            empty if it has none there.
    Memory: on each device, twice its shard in addition to the result.
    """
    mesh = place.mesh
    assert isinstance(mesh, Mesh), "of devices"
    shape = like.shape or (1,)
    # Each replica has an array of its own, below each other
    dims: list[Any] = [*place.spec, *[None] * (len(shape) - len(place.spec))]
    first, *others = dims
    first_axes = first if isinstance(first, tuple) else (first,)
    inner = [axis for axis in first_axes if axis is not None]
    spread = NamedSharding(mesh, PartitionSpec((axes.REPLICA, *inner), *others))
    global_shape = (mesh.shape[axes.REPLICA] * shape[0], *shape[1:])
    by_device = {}
    for shard in shards:
        device: Any = shard.device
        memory = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
        by_device[device] = jax.device_put(shard, memory).reshape(shard.shape or (1,))
    for device in spread.addressable_devices - by_device.keys():
        shape_on_device = spread.shard_shape(global_shape)
        by_device[device] = jnp.zeros(shape_on_device, like.dtype, device=device)
    arrays = [by_device[d] for d in spread.addressable_devices_indices_map(global_shape)]
    given = jax.make_array_from_single_device_arrays(global_shape, spread, arrays)
    result = jax.block_until_ready(_build_broadcast(spread, place, like.shape)(given))
    given.delete()
    return result


@functools.cache  # most arrays of a model have the shape of another one
def _build_broadcast(
    spread: NamedSharding, place: NamedSharding, shape: tuple[int, ...]
) -> Callable[[Array], Array]:
    """Jitted function that returns the array of replica 0, where those of the others are zeros."""

    def add(x: Array) -> Array:
        # Bits, because a sum of numbers turns -0.0 into 0.0. NCCL does not add 16 bits
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        wide = bits.astype(jnp.uint32) if x.dtype.itemsize == 2 else bits
        total = jax.lax.psum(wide, axes.REPLICA).astype(bits.dtype)
        return jax.lax.bitcast_convert_type(total, x.dtype)

    out_spec = place.spec if shape else PartitionSpec(None)
    on_mesh = jax.shard_map(add, mesh=spread.mesh, in_specs=spread.spec, out_specs=out_spec)
    return jax.jit(lambda x: on_mesh(x).reshape(shape), out_shardings=place)
