"""Initial weights on their devices: random, or read from a checkpoint in slices."""

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import Array

from jaxsp.model import layers
from jaxsp.model.layers import Parameter
from jaxsp.runtime import device_mesh
from jaxsp.training import host_offload, sharding

ReadSlice = Callable[[Parameter, int | None, tuple[slice, ...]], np.ndarray]
"""Function that reads a slice of one layer of a weight, in float32 and without padding.

The layer is None for a weight that is not stacked.
"""

_Spans = tuple[tuple[int, int], ...]
"""First index in each dim, and the index after the last."""


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

    def draw(param: Parameter) -> Array:
        # A checksum of the name, so that a weight does not change when another one is added
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(param.hf_name.encode()))
        if param.hf_rows is not None:  # gate and up of one tensor have the same name
            key = jax.random.fold_in(key, param.hf_rows[0])
        shape = param.stacked_shape
        padding = tuple(sharding.padding(param, len(shape), num_shards))
        place = sharding.named_sharding(param, mesh, is_on_host=is_on_host(param))
        dtype = sharding.stored_dtype(param)
        return _build_draw(shape, dtype, param.mean, param.std, padding, place)(key)

    # One after another: the drawing of all weights of a large model may not fit a device
    return jax.tree.map(draw, table)


@functools.cache  # most weights of a model have the shape of another one
def _build_draw(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    mean: float,
    std: float,
    padding: tuple[tuple[int, int], ...],
    place: NamedSharding,
) -> Callable[[Array], Array]:
    """Jitted function that draws a weight with a key."""

    def draw(key: Array) -> Array:
        if std:
            whole = mean + std * jax.random.normal(key, shape)
        else:
            whole = jnp.full(shape, mean)
        return jnp.pad(whole, padding).astype(dtype)

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

    Memory: on the host, in addition to the shards of its CPU devices, one shard of one stacked
        weight and the slice of a layer.
    """
    num_shards = device_mesh.num_shards(mesh)

    def load(param: Parameter) -> Array:
        shape = sharding.stored_shape(param, num_shards)
        place = sharding.named_sharding(param, mesh, is_on_host=is_on_host(param))
        dtype = sharding.stored_dtype(param)
        owners: dict[_Spans, list[jax.Device]] = {}
        for device, index in place.addressable_devices_indices_map(shape).items():
            assert index is not None, "the device is addressable"
            spans = tuple(
                dim_slice.indices(size)[:2] for dim_slice, size in zip(index, shape, strict=True)
            )
            owners.setdefault(spans, []).append(device)
        shards = []
        # A callback of make_array_from_callback would hold the shards of all devices at a time
        for spans, devices in owners.items():
            shard = _read_shard(param, spans, read_slice, dtype)
            copies = [
                jax.device_put(shard, SingleDeviceSharding(device, memory_kind=place.memory_kind))
                for device in devices
            ]
            # A copy may read its source after device_put has returned
            shards += jax.block_until_ready(copies)
        return jax.make_array_from_single_device_arrays(shape, place, shards)

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


def _row_norms(matrix: Parameter, magnitude: Parameter, mesh: Mesh) -> Callable[[Array], Array]:
    """Jitted function that computes the norms of a matrix's rows, stored as `magnitude`."""

    def compute(stored: Array) -> Array:
        weight = sharding.remove_padding(matrix, host_offload.to_device(stored))
        norms = jnp.sqrt(jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-1))
        widths = sharding.padding(magnitude, norms.ndim, device_mesh.num_shards(mesh))
        return jnp.pad(norms, widths)

    return jax.jit(compute, out_shardings=sharding.named_sharding(magnitude, mesh))


def _read_shard(
    param: Parameter, spans: _Spans, read_slice: ReadSlice, dtype: jnp.dtype
) -> np.ndarray:
    """Shard of a stored weight between these indices; zeros where it is padding."""
    shard = np.zeros([stop - start for start, stop in spans], dtype)
    param_spans = zip(spans[-len(param.shape) :], param.shape, strict=True)
    source = tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in param_spans)
    target = tuple(slice(part.stop - part.start) for part in source)
    if param.num_layers is None:
        shard[target] = read_slice(param, None, source)
        return shard
    for layer, layer_shard in enumerate(shard):
        layer_shard[target] = read_slice(param, layer, source)
    return shard
