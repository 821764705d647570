"""Sharding of weights, their all-gather, the reduce-scatter of their gradients, and broadcasts to
replicas."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from jaxsp.blocks import float8, layers
from jaxsp.blocks.layers import Parameter
from jaxsp.core import axes
from jaxsp.sharding import host_offload, quantization
from jaxsp.sharding.quantization import QuantizedMatrix
from jaxsp.system import device_memory, device_mesh

MIN_SHARDED_SIZE = 64 * 1024
"""Minimum elements per layer for a weight to be sharded: others are not worth a collective."""

WEIGHTS_SCOPE = "weights"
"""Scope name, in the compiled program, of all operations that gather weights or sum gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Division of one layer of a weight into shards."""

    dim: int | None
    """Dim that is sharded; None: every device holds the whole weight."""
    stored_shape: tuple[int, ...]
    """Shape of one layer as stored: a dim that does not divide is padded with zeros."""


def choose_placement(param: Parameter, num_shards: int) -> Placement:
    """Shards the first dim that divides, else the largest, zero-padded; small weights stay whole.

    Quantized matrices are sharded along their rows, which are quantized each for itself. Matrices
    of experts are mostly whole on a device: a gather along rows would transpose all of them.

    Example: [257, 300] on 8 shards is stored as [257, 304] and sharded along dim 1.
    """
    if num_shards == 1 or param.size < MIN_SHARDED_SIZE:
        return Placement(dim=None, stored_shape=param.shape)
    dims = range(len(param.shape) - quantization.is_quantized(param))
    for dim in dims:
        if param.shape[dim] % num_shards == 0:
            return Placement(dim=dim, stored_shape=param.shape)
    dim = max(dims, key=lambda d: param.shape[d])
    padded = -(-param.shape[dim] // num_shards) * num_shards
    return Placement(dim=dim, stored_shape=(*param.shape[:dim], padded, *param.shape[dim + 1 :]))


def stored_shape(param: Parameter, num_shards: int) -> tuple[int, ...]:
    """Shape of a weight as stored, all layers together."""
    shape = choose_placement(param, num_shards).stored_shape
    return dataclasses.replace(param, shape=shape).stacked_shape


def shard_size(param: Parameter, num_shards: int) -> int:
    """Elements of a weight that a device holds, all layers together."""
    size = math.prod(stored_shape(param, num_shards))
    return size if choose_placement(param, num_shards).dim is None else size // num_shards


def shard_bytes(param: Parameter, num_shards: int) -> int:
    """Bytes of a device's shard of a weight between steps, all layers together."""
    size = quantization.stored_bytes(param, stored_shape(param, num_shards))
    return size if choose_placement(param, num_shards).dim is None else size // num_shards


def partition_spec(param: Parameter, num_shards: int) -> PartitionSpec:
    """PartitionSpec of a stacked weight, its gradient and its optimizer state."""
    dim = choose_placement(param, num_shards).dim
    if dim is None:
        return PartitionSpec()
    if param.num_layers is not None:
        dim += 1
    return PartitionSpec(*[None] * dim, axes.SHARDS)


def named_sharding(param: Parameter, mesh: Mesh, *, is_on_host: bool = False) -> NamedSharding:
    """Sharding, between steps, of a stacked weight and of optimizer state of its shape."""
    sharding = NamedSharding(mesh, partition_spec(param, device_mesh.num_shards(mesh)))
    return sharding.with_memory_kind(device_memory.MEMORY_KIND) if is_on_host else sharding


def padding(param: Parameter, ndim: int, num_shards: int) -> list[tuple[int, int]]:
    """Numbers of zeros before and after each dim of a weight, or of one layer of it."""
    stored = choose_placement(param, num_shards).stored_shape
    widths = [(0, size - own) for size, own in zip(stored, param.shape, strict=True)]
    return [(0, 0)] * (ndim - len(widths)) + widths


def remove_padding(param: Parameter, stored: Any) -> Any:
    """Weight, or one layer of it, without the zeros that it is stored with."""
    return stored[(..., *(slice(size) for size in param.shape))]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A device's shard of a weight, and the holder of its gradient: see `layers.Gather`."""

    value: Any
    """Shard of the weight, in any float dtype or quantized, or a `float8.ScaledMatrix`."""
    grad_holder: Any
    """Float32 array that the loss is differentiated with respect to, but does not depend on; None
    for a frozen weight. The gradient has its shape, dtype and memory. The holder contains zeros,
    or sums of gradients to which `layer_stack.OffloadedStack` adds."""


@jax.custom_jvp
def _forbid_gradient(whole: Any, shard: Shard) -> Any:
    """The weight, unchanged; its differentiation raises a TypeError.

    The shard is an argument because its holder is what is differentiated. Without it, a gathered
    weight would count as a constant, and its gradient would be zero.
    """
    return whole


@_forbid_gradient.defjvp
def _raise_no_gradient(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "Gather.all_gather cannot be differentiated: it has no gradient, and the weight would "
        "never learn. Use gather(param, shard), which returns the same weight and sums its "
        "gradient."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gather:
    """All-gathers weights from shards, and reduce-scatters their gradients; inside shard_map.

    Moves: for a weight of `size` elements, a device sends size * itemsize * (1 - 1/shards) bytes
        for the all-gather, in the compute dtype, and the same number of elements for the
        reduce-scatter of the gradient, in the reduce dtype. Codes of `add_scales` have one byte.
    """

    num_shards: int
    compute_dtype: jnp.dtype
    reduce_dtype: jnp.dtype
    gradients_on_host: bool = False
    sums_replicas_early: bool = False
    """True if `reduce_scatter` sums the gradients of layers over replicas: see
    `StepSpec.sums_replicas_early`."""

    def make_grad_holders(self, table: layers.Weights, values: layers.Weights) -> layers.Weights:
        """Zeros in the shape and memory of the gradients of these values; None if frozen."""

        def make_holder(param: Parameter, value: Any) -> Array | None:
            if not param.is_trainable:
                return None
            return self._move_gradient(param, jnp.zeros(value.shape, jnp.float32))

        return jax.tree.map(make_holder, table, values)

    def make_working_copy(self, table: layers.Weights, master: layers.Weights) -> layers.Weights:
        """Replaces shards in host memory by copies on the device, in the compute dtype. Of their
        float32 values, the device holds one layer at a time."""

        def copy(param: Parameter, value: Any) -> Any:
            if not param.is_trainable or not device_memory.is_on_host(value):
                return value
            cast = lambda x: device_memory.to_device(x).astype(self._dtype(param))
            return cast(value) if param.num_layers is None else jax.lax.map(cast, value)

        return jax.tree.map(copy, table, master)

    def add_scales(self, table: layers.Weights, values: layers.Weights) -> layers.Weights:
        """Shards of a step, with the scales of matrices that are then gathered in 8 bits; inside
        shard_map. Maxima are exact, so that no scale depends on the number of shards."""

        def add_scale(param: Parameter, value: Any) -> Any:
            if not param.is_float8 or isinstance(value, QuantizedMatrix):
                return value
            find = lambda x: jnp.max(jnp.abs(device_memory.to_device(x).astype(self._dtype(param))))
            # In host memory, one layer at a time
            find_all = (
                jax.lax.map if device_memory.is_on_host(value) else lambda f, x: jax.vmap(f)(x)
            )
            largest_N = find_all(find, value)
            if choose_placement(param, self.num_shards).dim is not None:
                largest_N = jax.lax.pmax(largest_N, axes.SHARDS)
            scale_N = float8.choose_scale(largest_N.astype(jnp.float32))
            return float8.ScaledMatrix(values=value, scale=scale_N)

        return jax.tree.map(add_scale, table, values)

    def cast_once(self, table: layers.Weights, master: layers.Weights) -> layers.Weights:
        """Copies shards to the device in the dtypes that `all_gather` casts them to, to be gathered
        many times; outside shard_map. Quantized shards, and those that need no copy, stay."""
        return jax.tree.map(self._cast, table, master)

    def _cast(self, param: Parameter, value: Any) -> Any:
        if isinstance(value, QuantizedMatrix):
            return value
        on_device = device_memory.to_device(value)
        dtype = self._dtype(param)
        return on_device if on_device.dtype == dtype else on_device.astype(dtype)

    def gather_once(
        self, table: layers.Weights, master: layers.Weights, mesh: Mesh
    ) -> layers.Weights:
        """Copies weights as `cast_once` does, whole to every device, for the Gather `for_whole`;
        none may be quantized. Memory: see `whole_bytes`."""
        whole = NamedSharding(mesh, PartitionSpec())
        gather = jax.jit(remove_padding, static_argnums=0, out_shardings=whole)
        # one after another, so that few cast shards are in memory
        return jax.tree.map(
            lambda param, value: gather(param, self._cast(param, value)), table, master
        )

    def for_whole(self) -> "Gather":
        """The Gather for weights that every device holds whole, which moves nothing."""
        return dataclasses.replace(self, num_shards=1)

    def whole_bytes(self, table: layers.Weights) -> int:
        """Bytes of all weights in the dtypes that the model gets them in."""
        return sum(map(self._gathered_bytes, jax.tree.leaves(table)))

    def all_gather(self, param: Parameter, shard: Shard) -> Any:
        """Casts one layer's shard to the compute dtype, and all-gathers it; of a quantized matrix
        gathers codes and scales, and dequantizes them. With a scale of `add_scales`, gathers codes,
        and returns a `float8.ScaledMatrix` of them.

        For forward passes, and for the rules of a custom_vjp that calls `reduce_scatter`.

        Raises: TypeError when it is differentiated; `gather(param, shard)` is differentiable.
        """
        stored = device_memory.to_device(shard.value)
        dtype = self._dtype(param)
        scale = None
        if isinstance(stored, float8.ScaledMatrix):
            scale = stored.scale
            codes = float8.encode(stored.values.astype(dtype), scale)
            dtype = codes.dtype
            # As bytes, which are gathered whatever XLA does with 8-bit floats
            stored = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        elif not isinstance(stored, QuantizedMatrix):
            stored = stored.astype(dtype)
        else:  # `param` may be the model's, without the format
            param = dataclasses.replace(param, frozen_as=stored.name)
        dim = choose_placement(param, self.num_shards).dim
        if dim is not None:
            with jax.named_scope(WEIGHTS_SCOPE):
                gather = functools.partial(
                    jax.lax.all_gather, axis_name=axes.SHARDS, axis=dim, tiled=True
                )
                stored = jax.tree.map(gather, stored)
        if scale is not None:
            stored = jax.lax.bitcast_convert_type(stored, dtype)
        whole = remove_padding(param, quantization.decode(param, stored, dtype))
        if scale is not None:
            whole = float8.ScaledMatrix(values=whole, scale=scale)
        return _forbid_gradient(whole, shard)

    def reduce_scatter(self, param: Parameter, gradient: Any) -> Shard:
        """This device's shard of the gradient's sum over all shards; if `sums_replicas_early`,
        gradients of layers are also summed over replicas. Without shards, there is no sum."""
        if isinstance(gradient, float8.ScaledMatrix):  # that of the codes is the matrix's
            gradient = gradient.values
        dim = choose_placement(param, self.num_shards).dim
        if dim is None:
            summed = gradient.astype(jnp.float32)
        else:
            widths = padding(param, gradient.ndim, self.num_shards)
            stored = jnp.pad(gradient.astype(self.reduce_dtype), widths)
            with jax.named_scope(WEIGHTS_SCOPE):
                summed = jax.lax.psum_scatter(
                    stored, axes.SHARDS, scatter_dimension=dim, tiled=True
                ).astype(jnp.float32)
                if self._is_summed_early(param):
                    summed = jax.lax.psum(summed, axes.REPLICA)
        return Shard(value=None, grad_holder=self._move_gradient(param, summed))

    def has_gradient(self, shard: Shard) -> bool:
        """False for the shard of a frozen weight."""
        return shard.grad_holder is not None

    def split_holders(self, shards: Any) -> tuple[Any, Any]:
        """Splits shards into holders and values: see `layers.Gather`."""
        is_shard = lambda x: isinstance(x, Shard)
        holders = jax.tree.map(lambda shard: shard.grad_holder, shards, is_leaf=is_shard)
        return holders, self.merge_holders(jax.tree.map(lambda _: None, holders), shards)

    def merge_holders(self, holders: Any, values: Any) -> Any:
        """Shards from holders and values: see `layers.Gather`."""
        return jax.tree.map(
            lambda shard, holder: dataclasses.replace(shard, grad_holder=holder),
            values,
            holders,
            is_leaf=lambda x: isinstance(x, Shard),
        )

    def __call__(self, params: Any, shards: Any) -> Any:
        """Whole weights of a tree, or of one parameter. Gradients are returned in the holders."""

        def gather_param(param: Parameter, shard: Shard) -> Any:
            if not self.has_gradient(shard):
                return self.all_gather(param, shard)

            @jax.custom_vjp
            def gather(shard: Shard) -> Any:
                whole = self.all_gather(param, shard)
                return jax.tree.map(lambda x: x.astype(jnp.float32), whole)

            gather.defvjp(
                lambda shard: (gather(shard), None),
                lambda _, gradient: (self.reduce_scatter(param, gradient),),
            )
            return gather(shard)

        return jax.tree.map(gather_param, params, shards)

    def _move_gradient(self, param: Parameter, gradient: Array) -> Array:
        """Moves the gradient of a trained weight to host memory, if it belongs there."""
        is_on_host = self.gradients_on_host and host_offload.should_offload_gradient(param)
        return device_memory.to_host(gradient) if is_on_host else gradient

    def reduce(
        self, table: layers.Weights, gradients: layers.Weights, divisor: Array
    ) -> layers.Weights:
        """Gradients of the whole mesh, divided; None for frozen weights. Each is summed over every
        axis on which `reduce_scatter` has not summed it."""

        def reduce_param(param: Parameter, gradient: Array | None) -> Array | None:
            if gradient is None:
                return None
            is_whole = choose_placement(param, self.num_shards).dim is None
            done: tuple[str, ...] = () if is_whole else axes.SHARDS
            if self._is_summed_early(param):
                done = (*done, axes.REPLICA)
            other_axes = tuple(axis for axis in axes.ALL if axis not in done)

            def sum_and_divide(gradient: Array) -> Array:
                with jax.named_scope(WEIGHTS_SCOPE):
                    return jax.lax.psum(gradient, other_axes) / divisor

            if device_memory.is_on_host(gradient):
                return host_offload.update_each_layer(param, sum_and_divide, gradient)
            return sum_and_divide(gradient)

        return jax.tree.map(reduce_param, table, gradients)

    def _is_summed_early(self, param: Parameter) -> bool:
        """True if `reduce_scatter` sums a gradient over replicas."""
        is_sharded = choose_placement(param, self.num_shards).dim is not None
        return self.sums_replicas_early and is_sharded and param.num_layers is not None

    def _gathered_bytes(self, param: Parameter) -> int:
        """Bytes of a weight as it is gathered, all layers together."""
        shape = stored_shape(param, self.num_shards)
        if quantization.is_quantized(param):
            return quantization.stored_bytes(param, shape)
        return math.prod(shape) * self._dtype(param).itemsize

    def _dtype(self, param: Parameter) -> jnp.dtype:
        """dtype that the model gets a weight in."""
        return jnp.dtype(param.compute_dtype or self.compute_dtype)


def describe(table: layers.Weights, num_shards: int) -> str:
    """Describes which weights are sharded."""
    if num_shards == 1:
        return "every device holds all weights"
    params = jax.tree.leaves(table)
    small = [param for param in params if choose_placement(param, num_shards).dim is None]
    if len(small) == len(params):
        return "every device holds all weights, because they are too small to shard"
    text = f"sharded over {num_shards} devices"
    if small:
        num_bytes = sum(shard_bytes(param, num_shards) for param in small)
        text += f", except {num_bytes / 2**20:.1f} MiB of small ones that every device holds"
    return text


# Arrays that one replica reads from storage and the others receive over the devices. Otherwise each
# of 128 replicas would read the whole model, and the whole state, at the same time.


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
