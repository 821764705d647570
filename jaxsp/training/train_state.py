"""Training state: weights, optimizer state and step, as arrays or as their shapes; initial weights
on their devices, random or read from a checkpoint in slices."""

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
from jaxtyping import Array

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.core import batch
from jaxsp.core.batch import PER_ROW, PER_TOKEN, PREDICTIONS, SPECS, Batch, Pairs, max_pairs
from jaxsp.objectives.distill import Distill
from jaxsp.optimizers import optimizer
from jaxsp.sharding import quantization, sharding
from jaxsp.system import device_memory, device_mesh
from jaxsp.training.specs import StepSpec, select

ReadSlice = Callable[[Parameter, int | None, tuple[slice, ...]], np.ndarray]
"""Function that reads a slice of one layer of a weight, in float32 and without padding.

The layer is None for a weight that is not stacked.
"""

_Spans = tuple[tuple[int, int], ...]
"""First index in each dim, and the index after the last."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Arrays that training carries from step to step."""

    master: layers.Weights
    """All weights: trained ones in float32, frozen ones in the format that they are stored in."""
    opt_state: Any
    """Optimizer state of each weight; None for a frozen one."""
    step: batch.Leaf
    """Number of steps done, an int32 scalar."""


def init_state(spec: StepSpec, master: layers.Weights) -> TrainState:
    """These weights and an initial optimizer state."""
    shapes = abstract_inputs(spec)[0]

    def init_param(param: Parameter, opt_state: Any) -> Any:
        if not param.is_trainable:
            return None

        def init() -> Any:
            state = optimizer.init(spec.config.optimizer, param)
            return optimizer.add_padding(state, opt_state)

        return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, opt_state))()

    # One after another: the temporaries of all weights of a large model may not fit a device
    opt_state = jax.tree.map(init_param, spec.state_table, shapes.opt_state)
    step = jax.device_put(jnp.int32(0), shapes.step.sharding)
    return TrainState(master=master, opt_state=opt_state, step=step)


def abstract_weights(spec: StepSpec) -> layers.Weights:
    """Weights as jax.ShapeDtypeStructs with shardings."""
    num_shards = device_mesh.num_shards(spec.mesh)

    def describe(param: Parameter) -> Any:
        shape = sharding.stored_shape(param, num_shards)
        place = sharding.named_sharding(param, spec.mesh, is_on_host=spec.is_on_host(param))

        def add_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(add_sharding, quantization.describe(param, shape))

    return jax.tree.map(describe, spec.state_table)


def abstract_inputs(spec: StepSpec) -> tuple[TrainState, Batch]:
    """Inputs of a step as jax.ShapeDtypeStructs with shardings.

    They are enough to compile it, also for devices that are absent.
    """
    replicated = NamedSharding(spec.mesh, PartitionSpec())

    def describe_state(param: Parameter) -> Any:
        if not param.is_trainable:
            return None
        describe = functools.partial(
            optimizer.describe_array,
            param,
            mesh=spec.mesh,
            is_on_host=spec.is_on_host(param),
        )
        return jax.tree.map(describe, optimizer.describe_state(spec.config.optimizer, param))

    master = abstract_weights(spec)
    opt_state = jax.tree.map(describe_state, spec.state_table)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    state = TrainState(master=master, opt_state=opt_state, step=step)
    return state, _abstract_batch(spec)


def _abstract_batch(spec: StepSpec) -> Batch:
    """Batch of a step, [microbatches, rows, ...], as jax.ShapeDtypeStructs."""
    config = spec.config
    num_rows = device_mesh.num_groups(spec.mesh) * config.microbatch_rows
    widths = {PER_TOKEN: config.row_tokens, PER_ROW: config.max_segments}
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(
            (spec.num_microbatches, num_rows, widths[partition]),
            jnp.int32,
            sharding=NamedSharding(spec.mesh, partition),
        )
        for name, partition in SPECS.items()
    }
    labels = arrays["labels_BL"]
    numbers = jax.ShapeDtypeStruct(labels.shape, jnp.float32, sharding=labels.sharding)
    if spec.has_weights:
        arrays["weights_BL"] = numbers
    if names := spec.objective.needs:
        arrays["numbers_BL"] = dict.fromkeys(names, numbers)
    if isinstance(spec.objective, Distill) and spec.objective.predictions is not None:
        shape = (*labels.shape, spec.objective.predictions_width)
        predictions = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=labels.sharding)
        arrays["numbers_BL"] = {PREDICTIONS: predictions}
    if spec.objective.has_pairs:
        arrays["documents_BM"] = arrays["starts_BM"]
        num_pairs = max_pairs(
            rows_per_step=config.rows_per_step,
            max_segments=config.max_segments,
        )
        whole = NamedSharding(spec.mesh, PartitionSpec())
        arrays["pairs"] = Pairs(
            references_P2=jax.ShapeDtypeStruct((num_pairs, 2), jnp.float32, sharding=whole),
            is_desirable_P=jax.ShapeDtypeStruct((num_pairs,), bool, sharding=whole),
        )
    return Batch(**arrays)


# Trained and frozen weights


def select_trained(table: layers.Weights, tree: Any) -> Any:
    """Part of a tree, in the structure of `table`, that belongs to trained weights."""
    return select(table, tree, lambda param: param.is_trainable)


def select_frozen(table: layers.Weights, tree: Any) -> Any:
    """Part of a tree, in the structure of `table`, that belongs to frozen weights."""
    return select(table, tree, lambda param: not param.is_trainable)


def merge(part: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The tree of which two results of `select` are parts."""
    merged = part | other
    for name in part.keys() & other.keys():
        merged[name] = merge(part[name], other[name])
    return merged


# Initial weights


def random_weights(
    table: layers.Weights,
    *,
    seed: int,
    mesh: Mesh,
    is_on_host: Callable[[Parameter], bool] = lambda param: False,
) -> layers.Weights:
    """Random weights, each on its devices; the same numbers on every mesh.

    Args: is_on_host: function that returns True for a weight in host memory.
    """
    num_shards = device_mesh.num_shards(mesh)

    def draw(param: Parameter) -> Any:
        # A checksum of the name, so that a weight does not change when another one is added
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(param.hf_name.encode()))
        if param.hf_rows is not None:  # gate and up of one tensor have the same name
            key = jax.random.fold_in(key, param.hf_rows.first)
        if param.layers and param.layers[0]:  # another kind of layers has weights of the same name
            key = jax.random.fold_in(key, param.layers[0])
        shape = param.stacked_shape
        padding = tuple(sharding.padding(param, len(shape), num_shards))
        place = sharding.named_sharding(param, mesh, is_on_host=is_on_host(param))
        fixed = dataclasses.replace(
            param, hf_name="", hf_rows=None, is_transposed=False, adapted_rows=None
        )
        return _build_draw(fixed, padding, place)(key)

    # One after another: the drawing of all weights of a large model may not fit a device
    return jax.tree.map(draw, table)


@functools.cache  # most weights of a model have the shape of another one
def _build_draw(
    param: Parameter, padding: tuple[tuple[int, int], ...], place: NamedSharding
) -> Callable[[Array], Any]:
    """Jitted function that draws a weight with a key, in the format that it is stored in."""

    def draw(key: Array) -> Any:
        whole = jnp.full(param.stacked_shape, param.mean)
        if param.log_uniform is not None:
            low, high = param.log_uniform
            whole = jnp.log(jax.random.uniform(key, whole.shape, minval=low, maxval=high))
        if param.softplus_range is not None:
            low, high = map(math.log, param.softplus_range)
            step = jnp.exp(jax.random.uniform(key, whole.shape, minval=low, maxval=high))
            whole = step + jnp.log(-jnp.expm1(-step))
        if param.std:
            whole += param.std * jax.random.normal(key, whole.shape)
        return quantization.encode(param, jnp.pad(whole, padding), jnp)

    return jax.jit(draw, out_shardings=place)


def load_weights(
    table: layers.Weights,
    mesh: Mesh,
    read_slice: ReadSlice,
    *,
    is_on_host: Callable[[Parameter], bool] = lambda param: False,
) -> layers.Weights:
    """Weights from slices that `read_slice` returns, each on its devices.

    A process reads the slices of its own devices only, each once, even if several devices hold it.
    Processes without a device of replica 0 read nothing, and receive its weights one by one.

    Memory: on the host, in addition to the shards of its CPU devices, one shard of one stacked
        weight and the slice of a layer.
    """
    num_shards = device_mesh.num_shards(mesh)
    readers = sharding.find_readers(mesh)
    is_broadcast = sharding.is_broadcast(mesh)

    def load(param: Parameter) -> Any:
        shape = sharding.stored_shape(param, num_shards)
        place = sharding.named_sharding(param, mesh, is_on_host=is_on_host(param))
        owners: dict[_Spans, list[jax.Device]] = {}
        for device, index in place.addressable_devices_indices_map(shape).items():
            if device not in readers:
                continue
            assert index is not None, "the device is addressable"
            spans = tuple(
                dim_slice.indices(size)[:2] for dim_slice, size in zip(index, shape, strict=True)
            )
            owners.setdefault(spans, []).append(device)
        shards: list[Any] = []
        memory_kind = None if is_broadcast else place.memory_kind
        # A callback of make_array_from_callback would hold the shards of all devices at a time
        for spans, devices in owners.items():
            shard = _read_shard(param, spans, read_slice)
            copies = [
                jax.device_put(shard, SingleDeviceSharding(device, memory_kind=memory_kind))
                for device in devices
            ]
            # A copy may read its source after device_put has returned
            shards += jax.block_until_ready(copies)

        def join(like: Any, *parts: Array) -> Array:
            if is_broadcast:
                return sharding.broadcast(like, place, parts)
            return jax.make_array_from_single_device_arrays(like.shape, place, list(parts))

        return jax.tree.map(join, quantization.describe(param, shape), *shards)

    return jax.tree.map(load, table)


def init_magnitudes(
    table: layers.Weights, weights: layers.Weights, *, mesh: Mesh
) -> layers.Weights:
    """Weights in which DoRA's magnitudes are the norms of the rows of the adapted matrices."""

    def init(params: layers.Weights, values: layers.Weights) -> layers.Weights:
        new = dict(values)
        for name, part in params.items():
            if isinstance(part, Parameter):
                continue
            new[name] = init(part, values[name])
            if "magnitude" in part.get("adapter", {}):
                magnitude = _row_norms(part["weight"], part["adapter"]["magnitude"], mesh)
                adapter = new[name]["adapter"]
                new[name]["adapter"] = adapter | {"magnitude": magnitude(values[name]["weight"])}
        return new

    return init(table, weights)


def _row_norms(matrix: Parameter, magnitude: Parameter, mesh: Mesh) -> Callable[[Any], Array]:
    """Jitted function that computes the norms of a matrix's rows, stored as `magnitude`."""

    def compute(stored: Any) -> Array:
        whole = quantization.decode(matrix, device_memory.to_device(stored), jnp.dtype("float32"))
        weight = sharding.remove_padding(matrix, whole)
        norms = jnp.sqrt(jnp.sum(jnp.square(weight), axis=-1))
        widths = sharding.padding(magnitude, norms.ndim, device_mesh.num_shards(mesh))
        return jnp.pad(norms, widths)

    return jax.jit(compute, out_shardings=sharding.named_sharding(magnitude, mesh))


def _read_shard(param: Parameter, spans: _Spans, read_slice: ReadSlice) -> Any:
    """Shard of a stored weight between these indices; zeros where it is padding."""
    shape = tuple(stop - start for start, stop in spans)
    param_spans = zip(spans[-len(param.shape) :], param.shape, strict=True)
    source = tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in param_spans)
    target = tuple(slice(part.stop - part.start) for part in source)
    like = quantization.describe(param, shape)
    shard = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)

    def read(layer: int | None) -> Any:
        whole = np.zeros(shape[-len(param.shape) :], np.float32)
        whole[target] = read_slice(param, layer, source)
        return quantization.encode(param, whole)

    if param.layers is None:
        return read(None)
    for index, layer in enumerate(param.layers):

        def write(stack: np.ndarray, part: np.ndarray, index: int = index) -> None:
            stack[index] = part

        jax.tree.map(write, shard, read(layer))
    return shard
