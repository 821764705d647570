"""Arrays that wait in host memory and visit their device a layer at a time; inside jit.

Where an array is, is part of its type: jax.typeof(x).memory_space.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.model.layers import Parameter

MIN_OFFLOAD_SIZE = 64 * 1024
"""Elements of one layer from which on a weight is worth the way: small ones stay on the device."""

MEMORY_KIND = "pinned_host"
"""The memory kind of a sharding whose arrays are here."""

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def reserve_pool(devices: Sequence[jax.Device], num_bytes: int) -> None:
    """Makes XLA's pool of pinned host memory one region of at least `num_bytes` for each device.

    Call it before weights are loaded. The pool grows by regions that double and are never joined. A
    step's temporaries in host memory need one contiguous block. No region would have it once
    weights and moments are scattered over several (8B on one H100 with 250 GiB: fails).
    """
    for device in devices:
        jax.block_until_ready(build_allocator(device, num_bytes)()).delete()


def build_allocator(device: jax.Device, num_bytes: int) -> jax.stages.Wrapped:
    """Jitted function that returns an array of at least `num_bytes` in host memory, and uses none
    of the device."""
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=MEMORY_KIND)
    shape = (-(-num_bytes // 2**20), 2**20)
    return jax.jit(lambda: to_host(jax.lax.empty(shape, jnp.uint8)), out_shardings=place)


def should_offload(param: Parameter) -> bool:
    """Whether what belongs to a weight waits in host memory, where such things are offloaded."""
    return param.size >= MIN_OFFLOAD_SIZE


def is_on_host(x: Array) -> bool:
    """Whether an array is in host memory."""
    return jax.typeof(x).memory_space == _HOST


def to_device(tree: Any) -> Any:
    """The same arrays in the device's memory."""
    return jax.tree.map(lambda x: jax.device_put(x, _DEVICE) if is_on_host(x) else x, tree)


def to_host(tree: Any) -> Any:
    """The same arrays in host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, _HOST), tree)


def update_each_layer(
    param: Parameter, function: Callable[..., Any], target: Any, *read: Any
) -> Any:
    """`written` after function(written, *read) for each layer of a weight, one after another, in place.

    Shapes: leaves are stacked, [N, ...], where the weight is; the function sees one layer, on the device, and what it returns
        goes where `written` is.
    Memory: on the device, what is in host memory is there for one layer at a time.
    """

    def back(new: Array, old: Array) -> Array:
        return to_host(new) if is_on_host(old) else new

    if param.num_layers is None:
        return jax.tree.map(back, function(*to_device((target, *read))), target)

    def at(i: Array, written: Any) -> Any:
        of_layer = to_device(
            jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), (written, *read)
            )
        )
        return jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_index_in_dim(old, back(new, old), i, 0),
            written,
            function(*of_layer),
        )

    return jax.lax.fori_loop(0, param.num_layers, at, target)


def sum_layers(param: Parameter, function: Callable[[Array], Array], read: Array) -> Array:
    """The sum of function(layer) over a weight's layers, which visit the device one at a time where they are in host memory."""
    if param.num_layers is None or not is_on_host(read):
        return function(to_device(read))
    return jax.lax.map(lambda x: function(to_device(x)), read).sum()
