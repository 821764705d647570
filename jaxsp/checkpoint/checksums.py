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
from jaxsp.optimizers import optimizer
from jaxsp.sharding import quantization
from jaxsp.system import device_memory
from jaxsp.training import train_state

_SEEDS = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0xB5297A4D, 0x7FEB352D, 0x846CA68B))
"""Multipliers of each of the two sums: one for indices, two for bits. Odd, hence invertible.
Source: the finalizers of MurmurHash3 and of C. Wellons' lowbias32; the first ones are primes like
those of xxHash."""

_BLOCK_ELEMENTS = 4 * 1024 * 1024


def unpadded_shapes(
    table: layers.Weights, items: Mapping[str, Any], *, like: str = "master"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes without padding, by path.
    Args: items: trees of arrays, such as "master" and "opt". like: name of that of the weights."""

    def shapes_like(param: Parameter, weight: Any, tree: Any) -> Any:
        if quantization.is_quantized(param):
            return quantization.describe(param, param.stacked_shape)

        unpad = functools.partial(optimizer.unpadded_shape, param, weight.shape)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(unpad(x.shape), x.dtype), tree)

    return name_leaves(
        {name: jax.tree.map(shapes_like, table, items[like], item) for name, item in items.items()}
    )


def compute_frozen(table: layers.Weights, weights: layers.Weights) -> dict[str, str]:
    """Returns the checksum of each frozen weight by its path; empty without any."""
    frozen = train_state.select_frozen(table, table)
    items = {"base": train_state.select_frozen(table, weights)}
    return compute_on_devices(name_leaves(items), unpadded_shapes(frozen, items, like="base"))


def name_leaves(tree: Any) -> dict[str, Any]:
    """Returns leaves by path. Example of a path: `master/layers/q`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def compute_on_devices(arrays: Mapping[str, Array], unpadded: Mapping[str, Any]) -> dict[str, str]:
    """Returns the checksum of each array: 16 hexadecimal digits, the same in all processes.

    Memory: an array in host memory is copied to its devices one layer at a time, or whole if it has
        no layers.
    """
    programs = compile_programs(arrays, unpadded)
    # One program at a time: with several in flight, CPU devices can wait for each other forever
    # (jax 0.10.1, 2 cores: 6 of 8 devices reach the all-reduce)
    return {name: _format_hex(jax.device_get(programs[name](x))) for name, x in arrays.items()}


def compile_programs(
    arrays: Mapping[str, Array], unpadded: Mapping[str, Any]
) -> dict[str, jax.stages.Compiled]:
    """Compiles the programs of `compute_on_devices`. Arrays of one shape, dtype and sharding share
    a program, as a weight does with its moments."""
    return {
        name: _compile(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), unpadded[name].shape
        )
        for name, x in arrays.items()
    }


def compute_on_host(array: np.ndarray) -> str:
    """Returns the checksum of a whole array in host memory, computed with NumPy."""
    array = np.atleast_1d(array)
    block_size = max(1, _BLOCK_ELEMENTS // max(1, math.prod(array.shape[1:])))
    total = np.zeros(2, np.uint32)
    for start in range(0, len(array), block_size):
        block = np.ascontiguousarray(array[start : start + block_size])
        bits = block.view(f"u{block.itemsize}").astype(np.uint32)
        total += _sum_block(bits, array.shape, np.uint32(start))
    return _format_hex(total)


def _format_hex(sums: np.ndarray) -> str:
    return "".join(f"{total:08x}" for total in sums.tolist())


@functools.cache
def _compile(like: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.stages.Compiled:
    def sum_block(block: Array, start: UInt32[Array, ""] | np.uint32) -> UInt32[Array, "two"]:
        bits = jax.lax.bitcast_convert_type(block, f"uint{8 * block.dtype.itemsize}")
        return _sum_block(bits.astype(jnp.uint32), shape or (1,), start)

    def sum_layer(layer: tuple[Array, Array]) -> UInt32[Array, "two"]:
        start, x_layer = layer
        return sum_block(device_memory.to_device(x_layer)[None], start)

    def sum_bits(x: Array) -> UInt32[Array, "two"]:
        if not device_memory.is_on_host(x) or len(shape) < 3:  # without layers: copied whole
            return sum_block(jnp.atleast_1d(device_memory.to_device(x)), np.uint32(0))
        sums = jax.lax.map(sum_layer, (jnp.arange(shape[0], dtype=jnp.uint32), x))
        return sums.sum(0, dtype=jnp.uint32)

    sharding: Any = like.sharding
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(sum_bits, out_shardings=replicated).lower(like).compile()


def _sum_block(bits: Any, shape: tuple[int, ...], start: Any) -> Any:
    """Returns both sums of a block of an array, in uint32; NumPy's or JAX's.
    Args: shape: that of the whole array, without padding. start: index in its first dim."""
    xp: Any = np if isinstance(bits, np.ndarray) else jnp
    first, *others = xp.indices(bits.shape, dtype=np.uint32, sparse=True)
    dim_indices = (first + start, *others)
    sums = []
    for spread, *factors in _SEEDS:
        index = dim_indices[0]
        for dim_index in dim_indices[1:]:
            index = index * np.uint32(spread) + dim_index
        # an invertible function of the bits at each index
        mixed = (bits ^ index) * np.uint32(factors[0])
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(factors[1])
        mixed = mixed ^ (mixed >> np.uint32(13))
        for dim_index, size, stored_size in zip(dim_indices, shape, bits.shape, strict=True):
            if size < stored_size:  # padding
                mixed = xp.where(dim_index < np.uint32(size), mixed, np.uint32(0))
        sums.append(xp.sum(mixed, dtype=np.uint32))
    return xp.stack(sums)
