"""Where each weight lies, and how it becomes whole and its gradient a shard again."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float

from jaxsp.core import axes
from jaxsp.model import layers
from jaxsp.model.layers import Parameter
from jaxsp.runtime import device_mesh
from jaxsp.training import host_offload

ReadSlice = Callable[[Parameter, int | None, tuple[slice, ...]], np.ndarray]
"""A slice of one layer of a weight (None: it exists once), float32, without the zeros that it is stored with."""

_Spans = tuple[tuple[int, int], ...]
"""First and last place in each dim; the last is not in it."""

MIN_SHARDED_SIZE = 64 * 1024
"""Elements of one layer under which a weight is not worth a collective of its own."""


WEIGHTS_SCOPE = "weights"
"""Every operation that makes weights whole, or sums their gradients into shards, carries this word in the compiled program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How one layer of a weight is cut into shards."""

    dim: int | None
    """The dim that is cut; None: every device holds the whole."""
    stored_shape: tuple[int, ...]
    """Shape of one layer as stored: the last part of a dim that does not divide is filled with zeros."""


def choose_placement(param: Parameter, num_shards: int) -> Placement:
    """The first dim that divides, else the largest, zero-padded; small weights stay whole.

    Example: [257, 300] on 8 shards is stored as [257, 304] and cut along dim 1.
    """
    if num_shards == 1 or param.size < MIN_SHARDED_SIZE:
        return Placement(dim=None, stored_shape=param.shape)
    for dim, size in enumerate(param.shape):
        if size % num_shards == 0:
            return Placement(dim=dim, stored_shape=param.shape)
    dim = max(range(len(param.shape)), key=lambda d: param.shape[d])
    padded = -(-param.shape[dim] // num_shards) * num_shards
    return Placement(dim=dim, stored_shape=(*param.shape[:dim], padded, *param.shape[dim + 1 :]))


def shard_size(param: Parameter, num_shards: int) -> int:
    """Elements of a weight that a device holds, all layers together."""
    placed = choose_placement(param, num_shards)
    return (
        (param.num_layers or 1)
        * math.prod(placed.stored_shape)
        // (1 if placed.dim is None else num_shards)
    )


def partition_spec(param: Parameter, num_shards: int) -> PartitionSpec:
    """How the stacked array of a weight, its gradient and its optimizer state are split over the mesh."""
    dim = choose_placement(param, num_shards).dim
    if dim is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * (dim + (param.num_layers is not None)), axes.SHARDS)


def partition_specs(table: layers.Weights, num_shards: int) -> Any:
    """`spec` of every weight."""
    return jax.tree.map(lambda row: partition_spec(row, num_shards), table)


def named_sharding(param: Parameter, mesh: Mesh, *, is_offloaded: bool = False) -> NamedSharding:
    """Where the stacked array of a weight is between steps, and what the optimizer keeps of the same shape."""
    place = NamedSharding(mesh, partition_spec(param, device_mesh.num_shards(mesh)))
    return (
        place.with_memory_kind(host_offload.MEMORY_KIND)
        if is_offloaded and host_offload.should_offload(param)
        else place
    )


def padding(param: Parameter, ndim: int, num_shards: int) -> list[tuple[int, int]]:
    """Zeros to put before and behind each dim of a whole weight (or of one layer of it) to store it."""
    stored = choose_placement(param, num_shards).stored_shape
    added = [(0, size - own) for size, own in zip(stored, param.shape, strict=True)]
    return [(0, 0)] * (ndim - len(added)) + added


def remove_padding(param: Parameter, stored: Any) -> Any:
    """The whole weight, or one layer of it, without the zeros it is stored with."""
    return stored[(..., *(slice(size) for size in param.shape))]


def random_weights(
    table: layers.Weights, *, seed: int, mesh: Mesh, is_offloaded: bool = False
) -> layers.Weights:
    """Random master weights, float32, each on its devices; the same numbers on every mesh."""
    num_shards = device_mesh.num_shards(mesh)

    def one(row: Parameter) -> Array:
        # A name's checksum, so that a weight does not change when another is added
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(row.hf_name.encode()))
        added = tuple(padding(row, len(row.stacked_shape), num_shards))
        return _build_draw(
            row.stacked_shape,
            row.mean,
            row.std,
            added,
            named_sharding(row, mesh, is_offloaded=is_offloaded),
        )(key)

    # one after another: those of a large model need not fit a device together
    return jax.tree.map(one, table)


@functools.cache  # most weights of a model look like another one of it
def _build_draw(
    shape: tuple[int, ...],
    mean: float,
    std: float,
    added: tuple[tuple[int, int], ...],
    home: NamedSharding,
) -> Callable[[Array], Array]:
    """Draws a weight with a key."""

    def draw(key: Array) -> Array:
        return jnp.pad(
            mean + std * jax.random.normal(key, shape) if std else jnp.full(shape, mean), added
        )

    return jax.jit(draw, out_shardings=home)


def put_weights(
    table: layers.Weights, whole: layers.Weights, mesh: Mesh, *, is_offloaded: bool = False
) -> layers.Weights:
    """Master weights made of whole arrays in host memory, each on its devices."""
    num_shards = device_mesh.num_shards(mesh)

    def one(row: Parameter, whole: Any) -> Array:
        stored = np.pad(np.asarray(whole, np.float32), padding(row, whole.ndim, num_shards))
        return jax.device_put(stored, named_sharding(row, mesh, is_offloaded=is_offloaded))

    return jax.tree.map(one, table, whole)


def load_weights(
    table: layers.Weights, mesh: Mesh, read_slice: ReadSlice, *, is_offloaded: bool = False
) -> layers.Weights:
    """Master weights made of slices that `read` returns, each on its devices.

    A process reads what its own devices hold and nothing else, and each part once, however many devices hold it.

    Memory: in the host's, beside the shards of its CPU devices, one shard of one stacked weight and the slice of a layer.
    """
    num_shards = device_mesh.num_shards(mesh)

    def one(row: Parameter) -> Array:
        stored = choose_placement(row, num_shards).stored_shape
        shape = stored if row.num_layers is None else (row.num_layers, *stored)
        over = named_sharding(row, mesh, is_offloaded=is_offloaded)
        owners: dict[_Spans, list[jax.Device]] = {}
        for device, index in over.addressable_devices_indices_map(shape).items():
            assert index is not None, "it is addressable"
            spans = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            owners.setdefault(spans, []).append(device)
        shards = []
        # a callback of make_array_from_callback would hold the shards of all devices at a time
        for spans, devices in owners.items():
            shard = _read_shard(row, spans, read_slice)
            # a copy may read its source after the call has returned
            places = [
                SingleDeviceSharding(device, memory_kind=over.memory_kind) for device in devices
            ]
            shards += jax.block_until_ready([jax.device_put(shard, place) for place in places])
        return jax.make_array_from_single_device_arrays(shape, over, shards)

    return jax.tree.map(one, table)


def _read_shard(row: Parameter, spans: _Spans, read: ReadSlice) -> np.ndarray:
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """What a device holds of a weight, and where the gradient goes: the two need not have one dtype, nor be in one memory."""

    value: Any
    """Of any float dtype."""
    grad_slot: Any
    """Float32 zeros that nobody reads. They are what is differentiated: the gradient has their shape, dtype and memory."""


def make_shards(values: layers.Weights, slots: layers.Weights) -> layers.Weights:
    """A tree of Shards."""
    return jax.tree.map(lambda value, slot: Shard(value=value, grad_slot=slot), values, slots)


@jax.custom_jvp
def _without_gradient(whole: Array, shard: Shard) -> Array:
    """The weight, unchanged. The shard is an argument because its slot is what is differentiated:
    without it, a joined weight would count as a constant, and its gradient would be zero."""
    return whole


@_without_gradient.defjvp
def _no_gradient(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "Gather.join cannot be differentiated: it has no gradient, and the weight would never "
        "learn. Use gather(row, shard), which returns the same weight and sums its gradient."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gather:
    """Joins shards into whole weights, and sums whole gradients into shards; inside shard_map.

    Moves: per weight of `size` elements a device sends size * itemsize * (1 - 1/shards) bytes to join it, in the compute
        dtype, and as many in the reduce dtype to split its gradient.
    """

    num_shards: int
    compute_dtype: jnp.dtype
    reduce_dtype: jnp.dtype
    gradients_on_host: bool = False

    def make_grad_slots(self, table: layers.Weights, values: layers.Weights) -> layers.Weights:
        """Where the gradients of these values go."""
        return jax.tree.map(
            lambda row, value: self._move_gradient(row, jnp.zeros(value.shape, jnp.float32)),
            table,
            values,
        )

    def make_working_copy(self, table: layers.Weights, master: layers.Weights) -> layers.Weights:
        """Shards in the compute dtype on the device, of those in host memory; each layer's float32 is there for a moment."""

        def one(row: Parameter, value: Array) -> Array:
            def cast(value: Array) -> Array:
                return host_offload.to_device(value).astype(self.compute_dtype)

            if not host_offload.is_on_host(value):
                return value
            return cast(value) if row.num_layers is None else jax.lax.map(cast, value)

        return jax.tree.map(one, table, master)

    def all_gather(self, param: Parameter, shard: Shard) -> Float[Array, "..."]:
        """The whole of one layer's weight in the compute dtype: cast, then all-gathered.

        For forward passes, and for the rules of a custom_vjp, which calls `split` itself.
        Raises: TypeError when it is differentiated; `gather(row, shard)` is differentiable.
        """
        dim = choose_placement(param, self.num_shards).dim
        whole = host_offload.to_device(shard.value).astype(self.compute_dtype)
        if dim is not None:
            with jax.named_scope(WEIGHTS_SCOPE):
                whole = jax.lax.all_gather(whole, axes.SHARDS, axis=dim, tiled=True)
        return _without_gradient(remove_padding(param, whole), shard)

    def reduce_scatter(self, param: Parameter, gradient: Float[Array, "..."]) -> Shard:
        """This device's shard of the gradient's sum over all shards; of a whole weight, this device's own gradient."""
        dim = choose_placement(param, self.num_shards).dim
        if dim is None:
            return Shard(
                value=None, grad_slot=self._move_gradient(param, gradient.astype(jnp.float32))
            )
        stored = jnp.pad(
            gradient.astype(self.reduce_dtype), padding(param, gradient.ndim, self.num_shards)
        )
        with jax.named_scope(WEIGHTS_SCOPE):
            own = jax.lax.psum_scatter(
                stored, axes.SHARDS, scatter_dimension=dim, tiled=True
            ).astype(jnp.float32)
        return Shard(value=None, grad_slot=self._move_gradient(param, own))

    def __call__(self, params: Any, shards: Any) -> Any:
        """Whole weights of a tree, or of one parameter. Gradients come back in the shards' slots."""
        return jax.tree.map(self._gather_param, params, shards)

    def _gather_param(self, row: Parameter, shard: Shard) -> Array:
        join = jax.custom_vjp(functools.partial(self.all_gather, row))
        join.defvjp(
            lambda shard: (self.all_gather(row, shard), None),
            lambda _, gradient: (self.reduce_scatter(row, gradient),),
        )
        return join(shard)

    def _move_gradient(self, row: Parameter, gradient: Array) -> Array:
        # a tied embedding has two gradients in a turn, and sums are made on the device
        there = (
            self.gradients_on_host
            and row.num_layers is not None
            and host_offload.should_offload(row)
        )
        return host_offload.to_host(gradient) if there else gradient

    def accumulate(
        self, params: list[Parameter], sums: list[Array], gradients: list[Array]
    ) -> list[Array]:
        """Adds gradients to `sums` in host memory, in place. Devices hold one layer at a time."""
        return [
            host_offload.update_each_layer(row, jnp.add, total, gradient)
            for row, total, gradient in zip(params, sums, gradients, strict=True)
        ]

    def reduce(
        self, table: layers.Weights, gradients: layers.Weights, divisor: Array
    ) -> layers.Weights:
        """The gradients of the whole mesh, divided: each summed once over every axis that its weight is not sharded on."""

        def one(row: Parameter, gradient: Array) -> Array:
            cut_over = () if choose_placement(row, self.num_shards).dim is None else axes.SHARDS

            def finished(gradient: Array) -> Array:
                with jax.named_scope(WEIGHTS_SCOPE):
                    return (
                        jax.lax.psum(
                            gradient, tuple(axis for axis in axes.ALL if axis not in cut_over)
                        )
                        / divisor
                    )

            return (
                host_offload.update_each_layer(row, finished, gradient)
                if host_offload.is_on_host(gradient)
                else finished(gradient)
            )

        return jax.tree.map(one, table, gradients)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTraffic:
    """Bytes that a device sends in a step for the weights."""

    all_gathers: float
    """Of shards, to make weights whole."""
    reduce_scatters: float
    """Of gradients of sharded weights, in each turn."""
    all_reduces: float
    """Of gradients over what their weights are not sharded on, once a step."""


def weight_traffic(
    table: layers.Weights,
    *,
    num_shards: int,
    num_replicas: int,
    compute_dtype: Any,
    reduce_dtype: Any,
    num_microbatches: int,
) -> WeightTraffic:
    """What `Gather` sends in a step: stacked weights are joined forward and again backward, whatever is computed again.

    A weight that exists once is joined and its gradient split once a turn, even a tied embedding: XLA makes one of joins of the
    same shard, and splits the sum of two gradients.
    """
    gathers, scatters, sums = 0.0, 0.0, 0.0
    for row in jax.tree.leaves(table):
        placed, layer_count = choose_placement(row, num_shards), row.num_layers or 1
        size = layer_count * math.prod(placed.stored_shape)
        if placed.dim is None:
            sums += 4 * size * 2 * (1 - 1 / (num_shards * num_replicas))
            continue
        received = num_microbatches * size * (1 - 1 / num_shards)
        gathers += (
            received * jnp.dtype(compute_dtype).itemsize * (1 if row.num_layers is None else 2)
        )
        scatters += received * jnp.dtype(reduce_dtype).itemsize
        sums += 4 * size / num_shards * 2 * (1 - 1 / num_replicas)
    return WeightTraffic(all_gathers=gathers, reduce_scatters=scatters, all_reduces=sums)
