"""Where each weight lies, and how it becomes whole and its gradient a shard again."""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32

from jaxsp.core import axes
from jaxsp.core import mesh as meshes
from jaxsp.model import layers

Read = Callable[[layers.Parameter, int | None, tuple[slice, ...]], np.ndarray]
"""A slice of one layer of a weight (None: it exists once), float32, without the zeros that it is stored with."""

_Spans = tuple[tuple[int, int], ...]
"""First and last place in each dim; the last is not in it."""

REPLICATED_BELOW = 64 * 1024
"""Elements of one layer under which a weight is not worth a collective of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How one layer of a weight is cut into shards."""

    dim: int | None
    """The dim that is cut; None: every device holds the whole."""
    stored: tuple[int, ...]
    """Shape of one layer as stored: the last part of a dim that does not divide is filled with zeros."""


def place(row: layers.Parameter, num_shards: int) -> Placement:
    """The first dim that divides, else the largest, zero-padded; small weights stay whole.

    Example: [257, 300] on 8 shards is stored as [257, 304] and cut along dim 1.
    """
    if num_shards == 1 or row.size < REPLICATED_BELOW:
        return Placement(dim=None, stored=row.shape)
    for dim, size in enumerate(row.shape):
        if size % num_shards == 0:
            return Placement(dim=dim, stored=row.shape)
    dim = max(range(len(row.shape)), key=lambda d: row.shape[d])
    padded = -(-row.shape[dim] // num_shards) * num_shards
    return Placement(dim=dim, stored=(*row.shape[:dim], padded, *row.shape[dim + 1 :]))


def spec(row: layers.Parameter, num_shards: int) -> PartitionSpec:
    """How the stacked array of a weight, its gradient and its optimizer state are split over the mesh."""
    dim = place(row, num_shards).dim
    if dim is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * (dim + (row.num_layers is not None)), axes.SHARDS)


def specs(table: layers.Weights, num_shards: int) -> Any:
    """`spec` of every weight."""
    return jax.tree.map(lambda row: spec(row, num_shards), table)


def shardings(table: layers.Weights, mesh: Mesh) -> Any:
    """`spec` of every weight, on a mesh."""
    return jax.tree.map(lambda row: NamedSharding(mesh, spec(row, meshes.num_shards(mesh))), table)


def padding(row: layers.Parameter, ndim: int, num_shards: int) -> list[tuple[int, int]]:
    """Zeros to put before and behind each dim of a whole weight (or of one layer of it) to store it."""
    stored = place(row, num_shards).stored
    added = [(0, size - own) for size, own in zip(stored, row.shape, strict=True)]
    return [(0, 0)] * (ndim - len(added)) + added


def cut(row: layers.Parameter, stored: Any) -> Any:
    """The whole weight, or one layer of it, without the zeros it is stored with."""
    return stored[(..., *(slice(size) for size in row.shape))]


def random_weights(table: layers.Weights, *, seed: int, mesh: Mesh) -> layers.Weights:
    """Random master weights, float32, each on its devices; the same numbers on every mesh."""
    num_shards = meshes.num_shards(mesh)

    def draw(row: layers.Parameter) -> Array:
        # A name's checksum, so that a weight does not change when another is added
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(row.hf_name.encode()))
        values = (
            row.mean + row.std * jax.random.normal(key, row.stacked_shape) if row.std else jnp.full(row.stacked_shape, row.mean)
        )
        return jnp.pad(values, padding(row, values.ndim, num_shards))

    return jax.jit(lambda: jax.tree.map(draw, table), out_shardings=shardings(table, mesh))()


def put(table: layers.Weights, whole: layers.Weights, mesh: Mesh) -> layers.Weights:
    """Master weights made of whole arrays in host memory, each on its devices."""
    num_shards = meshes.num_shards(mesh)

    def one(row: layers.Parameter, whole: Any) -> Array:
        stored = np.pad(np.asarray(whole, np.float32), padding(row, whole.ndim, num_shards))
        return jax.device_put(stored, NamedSharding(mesh, spec(row, num_shards)))

    return jax.tree.map(one, table, whole)


def load(table: layers.Weights, mesh: Mesh, read: Read) -> layers.Weights:
    """Master weights made of slices that `read` returns, each on its devices.

    A process reads what its own devices hold and nothing else, and each part once, however many devices hold it.

    Memory: in the host's, beside the shards of its CPU devices, one shard of one stacked weight and the slice of a layer.
    """
    num_shards = meshes.num_shards(mesh)

    def one(row: layers.Parameter) -> Array:
        stored = place(row, num_shards).stored
        shape = stored if row.num_layers is None else (row.num_layers, *stored)
        over = NamedSharding(mesh, spec(row, num_shards))
        owners: dict[_Spans, list[jax.Device]] = {}
        for device, index in over.addressable_devices_indices_map(shape).items():
            assert index is not None, "it is addressable"
            spans = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            owners.setdefault(spans, []).append(device)
        shards = []
        # a callback of make_array_from_callback would hold the shards of all devices at a time
        for spans, devices in owners.items():
            shard = _shard(row, spans, read)
            # a copy may read its source after the call has returned
            shards += jax.block_until_ready([jax.device_put(shard, device) for device in devices])
        return jax.make_array_from_single_device_arrays(shape, over, shards)

    return jax.tree.map(one, table)


def _shard(row: layers.Parameter, spans: _Spans, read: Read) -> np.ndarray:
    """The part of a stored weight between these places; zeros where it is only filled up."""
    shard = np.zeros([stop - start for start, stop in spans], np.float32)
    ends = zip(spans[-len(row.shape) :], row.shape, strict=True)
    own = tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in ends)
    filled = tuple(slice(part.stop - part.start) for part in own)
    if row.num_layers is None:
        shard[filled] = read(row, None, own)
        return shard
    for layer, of_layer in enumerate(shard):
        of_layer[filled] = read(row, layer, own)
    return shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gather:
    """Joins shards into whole weights, and sums whole gradients into shards; inside shard_map.

    Moves: per weight of `size` elements a device sends size * itemsize * (1 - 1/shards) bytes to join it, in the compute
        dtype, and as many in the reduce dtype to split its gradient.
    """

    num_shards: int
    compute_dtype: jnp.dtype
    reduce_dtype: jnp.dtype

    def join(self, row: layers.Parameter, shard: Float32[Array, "..."]) -> Float[Array, "..."]:
        """The whole of one layer's weight in the compute dtype: cast, then all-gathered."""
        dim = place(row, self.num_shards).dim
        whole = shard.astype(self.compute_dtype)
        if dim is not None:
            whole = jax.lax.all_gather(whole, axes.SHARDS, axis=dim, tiled=True)
        return cut(row, whole)

    def split(self, row: layers.Parameter, gradient: Float[Array, "..."]) -> Float32[Array, "..."]:
        """This device's shard of the gradient's sum over all shards; of a whole weight, this device's own gradient."""
        dim = place(row, self.num_shards).dim
        if dim is None:
            return gradient.astype(jnp.float32)
        stored = jnp.pad(gradient.astype(self.reduce_dtype), padding(row, gradient.ndim, self.num_shards))
        return jax.lax.psum_scatter(stored, axes.SHARDS, scatter_dimension=dim, tiled=True).astype(jnp.float32)

    def __call__(self, rows: layers.Weights, shards: layers.Weights) -> layers.Weights:
        """Whole weights of a tree; their gradients come back as float32 shards."""
        return jax.tree.map(self._differentiable, rows, shards)

    def _differentiable(self, row: layers.Parameter, shard: Array) -> Array:
        join = jax.custom_vjp(functools.partial(self.join, row))
        join.defvjp(lambda shard: (self.join(row, shard), None), lambda _, gradient: (self.split(row, gradient),))
        return join(shard)

    def finish(self, table: layers.Weights, gradients: layers.Weights) -> layers.Weights:
        """The gradients of the whole mesh: each summed once over every axis that its weight is not sharded on."""

        def one(row: layers.Parameter, gradient: Array) -> Array:
            cut_over = () if place(row, self.num_shards).dim is None else axes.SHARDS
            return jax.lax.psum(gradient, tuple(axis for axis in axes.ALL if axis not in cut_over))

        return jax.tree.map(one, table, gradients)
