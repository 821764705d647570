"""Layout of the optimizer's state: shapes with and without padding, and shardings.

An array of the state that has the rank of its weight and the same size along the dim that is
sharded is sharded like the weight, with the same padding. Others, such as counts and adafactor's
averages of rows, are the same on all devices.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxsp.blocks.layers import Parameter
from jaxsp.sharding import sharding
from jaxsp.system import device_mesh


def is_sharded(param: Parameter, shape: Sequence[int], num_shards: int) -> bool:
    """True if an array of one layer's state, of this unpadded shape, is sharded like its weight."""
    dim = sharding.choose_placement(param, num_shards).dim
    return dim is not None and len(shape) == len(param.shape) and shape[dim] == param.shape[dim]


def _layer_shape(param: Parameter, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of one layer of an array that stacks all layers, if the weight is stacked."""
    return tuple(shape if param.num_layers is None else shape[1:])


def _stored_shape(param: Parameter, layer: Sequence[int], num_shards: int) -> tuple[int, ...]:
    """Shape as stored, all layers together, of an array that is sharded like the weight."""
    stored = sharding.choose_placement(param, num_shards).stored_shape
    shape = _replace_sizes(layer, param.shape, stored)
    return dataclasses.replace(param, shape=shape).stacked_shape


def describe(param: Parameter, x: jax.ShapeDtypeStruct, mesh: Mesh, *, is_on_host: bool) -> Any:
    """Shape as stored and sharding of an array of the state, from that without padding.
    Args: is_on_host: True if the weight is in host memory, and with it arrays of its shape."""
    num_shards = device_mesh.num_shards(mesh)
    layer = _layer_shape(param, x.shape)
    if layer == param.shape:  # such as moments
        placement = sharding.named_sharding(param, mesh, is_on_host=is_on_host)
        shape = sharding.stored_shape(param, num_shards)
    elif is_sharded(param, layer, num_shards):  # such as scales of 8-bit moments: [rows, blocks]
        placement = sharding.named_sharding(param, mesh)
        shape = _stored_shape(param, layer, num_shards)
    else:  # such as counts
        placement = NamedSharding(mesh, PartitionSpec())
        shape = x.shape
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=placement)


def unpadded_shape(
    param: Parameter, stored_weight: Sequence[int], stored: Sequence[int]
) -> tuple[int, ...]:
    """Shape without padding of an array of the state. Args: stored_weight, stored: shapes as stored
    of the weight and of the array, all layers together, or both of one layer."""
    own = (*stored_weight[: len(stored_weight) - len(param.shape)], *param.shape)
    return _replace_sizes(stored, stored_weight, own)


def _replace_sizes(
    shape: Sequence[int], before: Sequence[int], after: Sequence[int]
) -> tuple[int, ...]:
    """Replaces the sizes that a shape of the same rank has in common with `before`."""
    if len(shape) != len(before):
        return tuple(shape)
    return tuple(
        new if size == old else size for size, old, new in zip(shape, before, after, strict=True)
    )


def remove_padding(param: Parameter, stored_weight: Sequence[int], tree: Any) -> Any:
    """One layer of a weight, its gradient or its state, without padding."""

    def remove(x: Array) -> Array:
        shape = unpadded_shape(param, stored_weight, x.shape)
        return x if shape == x.shape else x[tuple(slice(size) for size in shape)]

    return jax.tree.map(remove, tree)


def add_padding(tree: Any, like: Any) -> Any:
    """Adds zeros to arrays up to the shapes of `like`."""

    def add(x: Array, target: Any) -> Array:
        if x.shape == target.shape:
            return x
        return jnp.pad(x, [(0, big - own) for own, big in zip(x.shape, target.shape, strict=True)])

    return jax.tree.map(add, tree, like)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of the optimizer's state of a weight that a device holds."""

    like_weight: int
    """Arrays in the shape of the weight, which are offloaded with it."""
    others: int

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return self.like_weight + self.others


def held_bytes(param: Parameter, state: Any, num_shards: int) -> StateBytes:
    """Bytes of a state that a device holds. Args: state: shapes without padding, all layers."""
    like_weight = 0
    others = 0
    for x in jax.tree.leaves(state):
        layer = _layer_shape(param, x.shape)
        if layer == param.shape:
            like_weight += sharding.shard_size(param, num_shards) * x.dtype.itemsize
        elif is_sharded(param, layer, num_shards):
            size = math.prod(_stored_shape(param, layer, num_shards)) // num_shards
            others += size * x.dtype.itemsize
        else:
            others += x.size * x.dtype.itemsize
    return StateBytes(like_weight=like_weight, others=others)
