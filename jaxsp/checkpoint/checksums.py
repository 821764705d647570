"""Digests of weights and optimizer state: the same on every mesh, and another when a bit flips.

A digest is two sums, modulo 2**32, over the elements of an array. What an element adds is its bits, mixed with its place by a
function that has an inverse: another value of one element is another sum for certain. Places beyond the logical shape, the
zeros that some meshes store, add nothing.
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

from jaxsp.model import layers
from jaxsp.model.layers import Parameter
from jaxsp.training import host_offload

_SEEDS = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0xB5297A4D, 0x7FEB352D, 0x846CA68B))
"""Of each of the two sums: what places are multiplied by, and what bits are, twice. Odd, so that all of it can be undone.
Source: the finishing steps of MurmurHash3 and of C. Wellons' lowbias32; the first ones are primes of xxHash's kind."""

_BLOCK_ELEMENTS = 4 * 1024 * 1024
"""Elements of an array in host memory that are mixed at a time."""


def unpadded_shapes(table: layers.Weights, master: layers.Weights, opt: Any) -> dict[str, Any]:
    """{"master": ..., "opt": ...} with shapes and dtypes as they are without the zeros that some meshes store."""

    def of_state(row: Parameter, weight: Any, state: Any) -> Any:
        own = lambda x: row.stacked_shape if x.shape == weight.shape else x.shape
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(own(x), x.dtype), state)

    weights = jax.tree.map(
        lambda row, weight: jax.ShapeDtypeStruct(row.stacked_shape, weight.dtype), table, master
    )
    return {"master": weights, "opt": jax.tree.map(of_state, table, master, opt)}


def name_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, as `master/layers/q`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def compute_on_devices(
    arrays: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """The digest of each array as 16 hexadecimal digits, the same in all processes.

    Args:   shapes: the logical ones.
    Memory: an array in host memory visits its device a part of a layer at a time, or whole where it has no layers.
    """
    programs = compile_programs(arrays, shapes)
    # One program at a time: with several in flight, CPU devices can wait for each other forever
    # (jax 0.10.1, 2 cores: 6 of 8 devices reach the all-reduce)
    sums = {name: jax.device_get(programs[name](array)) for name, array in arrays.items()}
    return {name: _format_hex(of_array.tolist()) for name, of_array in sums.items()}


def compile_programs(
    arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.stages.Compiled]:
    """Compiles what `on_devices` runs. Arrays of one shape, dtype and sharding share a program.

    A weight shares it with its moments: a third of the time of a program for all arrays at once.
    Args: arrays: the arrays, or jax.ShapeDtypeStructs with shardings.
    """
    to_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return {name: _compile(to_shape(array), tuple(shapes[name])) for name, array in arrays.items()}


def compute_on_host(array: np.ndarray) -> str:
    """The digest of a whole array in host memory, by numpy."""
    array = array.reshape(1) if array.ndim == 0 else array
    rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(array.shape[1:])))
    sums = [0, 0]
    for start in range(0, len(array), rows):
        part = np.ascontiguousarray(array[start : start + rows])
        bits = part.view(f"u{part.itemsize}").astype(np.uint32)
        for number, (spread, *factors) in enumerate(_SEEDS):
            place: np.ndarray = np.arange(start, start + len(part), dtype=np.uint32)
            for size in part.shape[1:]:
                place = place[..., None] * np.uint32(spread) + np.arange(size, dtype=np.uint32)
            sums[number] += int(np.sum(_mix_bits(bits, place, factors), dtype=np.uint32))
    return _format_hex([total % 2**32 for total in sums])


def _format_hex(sums: list[int]) -> str:
    return "".join(f"{one:08x}" for one in sums)


@functools.cache
def _compile(like: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.stages.Compiled:
    place: Any = like.sharding
    everywhere = NamedSharding(place.mesh, PartitionSpec())
    return (
        jax.jit(_sum_bits, static_argnums=1, out_shardings=everywhere).lower(like, shape).compile()
    )


def _sum_bits(x: Array, shape: tuple[int, ...]) -> UInt32[Array, "two"]:
    first = jnp.zeros((), jnp.uint32)
    if not host_offload.is_on_host(x):
        return _sum_part(x, shape, first)
    if len(shape) < 3:  # no layers: the whole visits
        return _sum_part(host_offload.to_device(x), shape, first)
    of_layer = lambda number, layer: _sum_part(host_offload.to_device(layer), shape[1:], number)
    return jax.lax.map(lambda one: of_layer(*one), (jnp.arange(shape[0], dtype=jnp.uint32), x)).sum(
        0, dtype=jnp.uint32
    )


def _sum_part(
    x: Array, shape: tuple[int, ...], first_index: UInt32[Array, ""]
) -> UInt32[Array, "two"]:
    """Both sums; `first` is the place along the dims before those of `x`."""
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    along = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) for dim in range(x.ndim)]
    counts = functools.reduce(
        jnp.logical_and,
        [
            place < np.uint32(own)
            for place, own, stored in zip(along, shape, x.shape, strict=True)
            if own < stored
        ],
        jnp.ones(x.shape, bool),
    )
    both = []
    for spread, *factors in _SEEDS:
        place = jnp.broadcast_to(first_index, x.shape)
        for one in along:
            place = place * np.uint32(spread) + one
        both.append(
            jnp.sum(
                jnp.where(counts, _mix_bits(bits, place, factors), np.uint32(0)), dtype=jnp.uint32
            )
        )
    return jnp.stack(both)


def _mix_bits(bits: Any, place: Any, factors: list[int]) -> Any:
    """Of numpy's or JAX's arrays: for each place, another value for each value of the bits."""
    value = (bits ^ place) * np.uint32(factors[0])
    value = (value ^ (value >> np.uint32(15))) * np.uint32(factors[1])
    return value ^ (value >> np.uint32(13))
