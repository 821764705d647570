"""Arrays that wait in host memory and visit their device a layer at a time; inside jit.

Where an array is, is part of its type: jax.typeof(x).memory_space.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.model import layers

FROM_SIZE = 64 * 1024
"""Elements of one layer from which on a weight is worth the way: small ones stay on the device."""

KIND = "pinned_host"
"""The memory kind of a sharding whose arrays are here."""

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def reserve(devices: Sequence[jax.Device], num_bytes: int) -> None:
    """Makes XLA's pool of pinned host memory one region of at least `num_bytes` for each device.

    Call it before weights are loaded. The pool grows by regions that double and are never joined. A
    step's temporaries in host memory need one contiguous block. No region would have it once
    weights and moments are scattered over several (8B on one H100 with 250 GiB: fails).
    """
    for device in devices:
        jax.block_until_ready(empty(device, num_bytes)()).delete()


def empty(device: jax.Device, num_bytes: int) -> jax.stages.Wrapped:
    """Jitted function that returns an array of at least `num_bytes` in host memory, and uses none
    of the device."""
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=KIND)
    shape = (-(-num_bytes // 2**20), 2**20)
    return jax.jit(lambda: on_host(jax.lax.empty(shape, jnp.uint8)), out_shardings=place)


def worth_it(row: layers.Parameter) -> bool:
    """Whether what belongs to a weight waits in host memory, where such things are offloaded."""
    return row.size >= FROM_SIZE


def holds(x: Array) -> bool:
    """Whether an array is in host memory."""
    return jax.typeof(x).memory_space == _HOST


def on_device(tree: Any) -> Any:
    """The same arrays in the device's memory."""
    return jax.tree.map(lambda x: jax.device_put(x, _DEVICE) if holds(x) else x, tree)


def on_host(tree: Any) -> Any:
    """The same arrays in host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, _HOST), tree)


def each_layer(row: layers.Parameter, function: Callable[..., Any], written: Any, *read: Any) -> Any:
    """`written` after function(written, *read) for each layer of a weight, one after another, in place.

    Shapes: leaves are stacked, [N, ...], where the weight is; the function sees one layer, on the device, and what it returns
        goes where `written` is.
    Memory: on the device, what is in host memory is there for one layer at a time.
    """

    def back(new: Array, old: Array) -> Array:
        return on_host(new) if holds(old) else new

    if row.num_layers is None:
        return jax.tree.map(back, function(*on_device((written, *read))), written)

    def at(i: Array, written: Any) -> Any:
        of_layer = on_device(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), (written, *read)))
        return jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_index_in_dim(old, back(new, old), i, 0), written, function(*of_layer)
        )

    return jax.lax.fori_loop(0, row.num_layers, at, written)


def total(row: layers.Parameter, function: Callable[[Array], Array], read: Array) -> Array:
    """The sum of function(layer) over a weight's layers, which visit the device one at a time where they are in host memory."""
    if row.num_layers is None or not holds(read):
        return function(on_device(read))
    return jax.lax.map(lambda x: function(on_device(x)), read).sum()
