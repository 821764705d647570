"""Arrays in host memory that are copied to their device one layer at a time, inside jit."""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.blocks.layers import Parameter
from jaxsp.core.units import MIB
from jaxsp.system import device_memory

MIN_OFFLOAD_SIZE = 64 * 1024
"""Minimum elements per layer for a weight to be offloaded; smaller ones stay on the device."""

MIN_RELEASE = (0, 11, 1)
"""First jax release that supports arrays in host memory inside shard_map and loops."""


def reserve_pool(devices: Sequence[jax.Device], num_bytes: int) -> None:
    """Makes XLA's pool of pinned host memory one region of at least `num_bytes` per device.

    Call it before weights are loaded. The pool grows by regions that double in size and are never
    joined, but a step's temporaries in host memory need one contiguous block. Once weights and
    moments are scattered over several regions, none has room for it (8B on one H100 with 250 GiB:
    fails).

    Pinning pages takes 0.25 to 0.6 s per GiB (rapidsai/cudf issue 23477, ik_llama.cpp issue 1517,
    pegaflow issue 274), so each device has a thread.
    """

    def reserve(device: jax.Device) -> None:
        jax.block_until_ready(build_allocator(device, num_bytes)()).delete()

    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        for _ in pool.map(reserve, devices):
            pass


def build_allocator(device: jax.Device, num_bytes: int) -> jax.stages.Wrapped:
    """Jitted function that allocates `num_bytes` or more in host memory, none of the device."""
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=device_memory.MEMORY_KIND)
    shape = (-(-num_bytes // MIB), MIB)
    return jax.jit(
        lambda: device_memory.to_host(jax.lax.empty(shape, jnp.uint8)), out_shardings=sharding
    )


def should_offload(param: Parameter) -> bool:
    """True if a weight is large enough for its arrays to be offloaded."""
    return param.size >= MIN_OFFLOAD_SIZE


def should_offload_gradient(param: Parameter) -> bool:
    """True if a weight's gradient is offloaded too: only of stacked weights, because the two
    gradients that a tied embedding has in a microbatch are added on the device."""
    return param.num_layers is not None and should_offload(param)


def update_each_layer(
    param: Parameter,
    function: Callable[..., Any],
    target: Any,
    *inputs: Any,
    group_size: int | None = None,
) -> Any:
    """Replaces each layer of `target` by function(target, *inputs), one after another, in place.

    Shapes: leaves are stacked, [N, ...], if the weight is. The function receives one layer, on the
        device. Its result goes to the memory of `target`.
    Memory: arrays in host memory take one layer of the device at a time.

    Args: group_size: number of layers that the function receives at a time, [n, ...]; the last
        group may have fewer. None: one layer, without the layer dim.
    """

    def move_back(new: Array, old: Array) -> Array:
        return device_memory.to_host(new) if device_memory.is_on_host(old) else new

    if param.num_layers is None:
        return jax.tree.map(
            move_back, function(*device_memory.to_device((target, *inputs))), target
        )

    def update_layers(first: Any, target: Any, num_layers: int) -> Any:
        def read(x: Array) -> Array:
            layers = jax.lax.dynamic_slice_in_dim(x, first, num_layers)
            return layers[0] if group_size is None else layers

        def write(old: Array, new: Array) -> Array:
            new = move_back(new, old)
            layers = new[None] if group_size is None else new
            return jax.lax.dynamic_update_slice_in_dim(old, layers, first, 0)

        layer_inputs = device_memory.to_device(jax.tree.map(read, (target, *inputs)))
        return jax.tree.map(write, target, function(*layer_inputs))

    size = group_size or 1
    num_groups, num_remaining = divmod(param.num_layers, size)
    if num_groups:
        target = jax.lax.fori_loop(
            0, num_groups, lambda group, target: update_layers(group * size, target, size), target
        )
    if num_remaining:
        target = update_layers(num_groups * size, target, num_remaining)
    return target


def sum_layers(param: Parameter, function: Callable[[Array], Array], x: Array) -> Array:
    """Sum of function(layer) over a weight's layers; those in host memory are copied one by one."""
    if param.num_layers is None or not device_memory.is_on_host(x):
        return function(device_memory.to_device(x))
    return jax.lax.map(lambda layer: function(device_memory.to_device(layer)), x).sum()
