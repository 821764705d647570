"""Checksums of weights and optimizer state: the same on every mesh, different if any bit flips.

A checksum is two sums, modulo 2**32, over the elements of an array. Each element adds its bits
mixed with its index by an invertible function: a different value always gives a different sum.
Indices outside the unpadded shape (zeros that some meshes store) add nothing.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.core import host_memory
from jaxsp.optimizers import optimizer_state
from jaxsp.sharding import quantization

_SEEDS = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0xB5297A4D, 0x7FEB352D, 0x846CA68B))
"""Multipliers of each of the two sums: one for indices, two for bits. Odd, hence invertible.

Source: the finalizers of MurmurHash3 and of C. Wellons' lowbias32; the first ones are primes like
those of xxHash.
"""

_BLOCK_ELEMENTS = 4 * 1024 * 1024


def unpadded_shapes(
    table: layers.Weights, items: Mapping[str, Any], *, like: str = "master"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes without padding, by path.

    Args:
        items: trees of arrays, such as "master" and "opt".
        like: name of the item with the weights.
    """

    def shapes_like(param: Parameter, weight: Any, tree: Any) -> Any:
        if quantization.is_quantized(param):
            return quantization.describe(param, param.stacked_shape)

        def to_unpadded(x: Any) -> jax.ShapeDtypeStruct:
            shape = optimizer_state.unpadded_shape(param, weight.shape, x.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return jax.tree.map(to_unpadded, tree)

    return name_leaves(
        {name: jax.tree.map(shapes_like, table, items[like], item) for name, item in items.items()}
    )


def name_leaves(tree: Any) -> dict[str, Any]:
    """Returns leaves by path. Example of a path: `master/layers/q`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def to_shape(x: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def compute_on_devices(arrays: Mapping[str, Array], unpadded: Mapping[str, Any]) -> dict[str, str]:
    """Returns the checksum of each array: 16 hexadecimal digits, the same in all processes.

    Args:   unpadded: values with the shapes without padding, such as `unpadded_shapes`.
    Memory: an array in host memory is copied to its devices one layer at a time, or whole if it has
            no layers.
    """
    programs = compile_programs(arrays, unpadded)
    # One program at a time: with several in flight, CPU devices can wait for each other forever
    # (jax 0.10.1, 2 cores: 6 of 8 devices reach the all-reduce)
    sums = {name: jax.device_get(programs[name](array)) for name, array in arrays.items()}
    return {name: _format_hex(array_sums.tolist()) for name, array_sums in sums.items()}


def compile_programs(
    arrays: Mapping[str, Any], unpadded: Mapping[str, Any]
) -> dict[str, jax.stages.Compiled]:
    """Compiles the programs of `compute_on_devices`.

    Arrays of one shape, dtype and sharding share a program, as a weight does with its moments. This
    takes a third of the time of one program for all arrays.

    Args: arrays: arrays, or jax.ShapeDtypeStructs with shardings.
    """
    return {name: _compile(to_shape(array), unpadded[name].shape) for name, array in arrays.items()}


def compute_on_host(array: np.ndarray) -> str:
    """Returns the checksum of a whole array in host memory, computed with NumPy."""
    if array.ndim == 0:
        array = array.reshape(1)
    block_size = max(1, _BLOCK_ELEMENTS // max(1, math.prod(array.shape[1:])))
    sums = [0, 0]
    for start in range(0, len(array), block_size):
        block = np.ascontiguousarray(array[start : start + block_size])
        bits = block.view(f"u{block.itemsize}").astype(np.uint32)
        for number, (spread, *factors) in enumerate(_SEEDS):
            index: np.ndarray = np.arange(start, start + len(block), dtype=np.uint32)
            for size in block.shape[1:]:
                index = index[..., None] * np.uint32(spread) + np.arange(size, dtype=np.uint32)
            sums[number] += int(np.sum(_mix_bits(bits, index, factors), dtype=np.uint32))
    return _format_hex([total % 2**32 for total in sums])


def _format_hex(sums: list[int]) -> str:
    return "".join(f"{total:08x}" for total in sums)


@functools.cache
def _compile(like: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.stages.Compiled:
    sharding: Any = like.sharding
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    program = jax.jit(_sum_bits, static_argnums=1, out_shardings=replicated)
    return program.lower(like, shape).compile()


def _sum_bits(x: Array, shape: tuple[int, ...]) -> UInt32[Array, "two"]:
    first = jnp.zeros((), jnp.uint32)
    if not host_memory.is_on_host(x):
        return _sum_part(x, shape, first)
    if len(shape) < 3:  # an array without layers
        return _sum_part(host_memory.to_device(x), shape, first)

    def sum_layer(layer: tuple[Array, Array]) -> UInt32[Array, "two"]:
        index, x_layer = layer
        return _sum_part(host_memory.to_device(x_layer), shape[1:], index)

    sums = jax.lax.map(sum_layer, (jnp.arange(shape[0], dtype=jnp.uint32), x))
    return sums.sum(0, dtype=jnp.uint32)


def _sum_part(
    x: Array, shape: tuple[int, ...], first_index: UInt32[Array, ""]
) -> UInt32[Array, "two"]:
    """Returns both sums. Args: first_index: index along the dims before those of `x`."""
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    dim_indices = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) for dim in range(x.ndim)]
    is_counted = jnp.ones(x.shape, bool)
    for dim_index, size, stored_size in zip(dim_indices, shape, x.shape, strict=True):
        if size < stored_size:
            is_counted = jnp.logical_and(is_counted, dim_index < np.uint32(size))
    sums = []
    for spread, *factors in _SEEDS:
        index = jnp.broadcast_to(first_index, x.shape)
        for dim_index in dim_indices:
            index = index * np.uint32(spread) + dim_index
        mixed = jnp.where(is_counted, _mix_bits(bits, index, factors), np.uint32(0))
        sums.append(jnp.sum(mixed, dtype=jnp.uint32))
    return jnp.stack(sums)


def _mix_bits(bits: Any, index: Any, factors: list[int]) -> Any:
    """Mixes NumPy or JAX arrays: at each index, different bits give a different value."""
    value = (bits ^ index) * np.uint32(factors[0])
    value = (value ^ (value >> np.uint32(15))) * np.uint32(factors[1])
    return value ^ (value >> np.uint32(13))
