"""Optimizer update: an optax transform per weight, layer by layer, and the state that it keeps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.core import units
from jaxsp.core.units import format_count
from jaxsp.optimizers import muon, param_groups
from jaxsp.optimizers.registry import Optimizer
from jaxsp.sharding import host_offload, sharding
from jaxsp.system import device_memory, device_mesh


class StateBytes(NamedTuple):
    """Bytes of the optimizer's state of a weight that a device holds."""

    like_weight: int
    """Arrays in the shape of the weight, which are offloaded with it."""
    others: int


def build_transform(config: Optimizer, param: Parameter) -> optax.GradientTransformation:
    """Optax transform of one layer's gradient, without the learning rate; only matrices decay.

    Each expert is transformed for itself, and has its own state. Of updates that need whole
    matrices, it is the part before `Optimizer.finish_matrices`.
    """
    is_matrix = is_layer_matrix(param)
    transform = config.make_matrix_transform() if is_matrix else config.make_transform()
    if not (is_matrix and config.needs_whole_matrices):
        decay = optax.add_decayed_weights(param_groups.weight_decay(config, param))
        transform = optax.chain(transform, decay)
    if param.num_experts is None:
        return transform
    return optax.GradientTransformation(jax.vmap(transform.init), jax.vmap(transform.update))


@functools.lru_cache(maxsize=1024)
def describe_state(config: Optimizer, param: Parameter) -> Any:
    """Shapes, without padding, of a weight's optimizer state, all layers; None if it is frozen."""
    if not param.is_trainable:
        return None
    return jax.eval_shape(functools.partial(init, config, param))


def init(config: Optimizer, param: Parameter) -> Any:
    """Initial optimizer state of a weight, without padding: each layer has its own."""
    init_layer = build_transform(config, param).init
    weight = jnp.zeros(param.stacked_shape)
    return init_layer(weight) if param.num_layers is None else jax.vmap(init_layer)(weight)


def state_bytes(config: Optimizer, param: Parameter, num_shards: int) -> StateBytes:
    """Bytes of a weight's optimizer state on each device. Example: 8 per element for AdamW."""
    like_weight = 0
    others = 0
    for x in jax.tree.leaves(describe_state(config, param)):
        shape, is_sharded = _find_stored(param, x.shape, num_shards)
        num_bytes = math.prod(shape) * x.dtype.itemsize // (num_shards if is_sharded else 1)
        if x.shape == param.stacked_shape:
            like_weight += num_bytes
        else:
            others += num_bytes
    return StateBytes(like_weight, others)


def is_layer_matrix(param: Parameter) -> bool:
    """True for matrices of the layers; not for embeddings, the head, norms and biases."""
    return param.num_layers is not None and len(param.matrix_shape) == 2 and not param.is_lookup


def map_weights_and_state(
    table: layers.Weights, function: Callable[..., tuple[Any, Any]], *trees: Any
) -> tuple[Any, Any]:
    """Two trees of the weights and optimizer states that a function returns for each parameter and
    its part of each tree."""
    structure: Any = jax.tree.structure(table)
    parts = map(structure.flatten_up_to, (table, *trees))
    weights, states = zip(*map(function, *parts), strict=True)
    return structure.unflatten(weights), structure.unflatten(states)


def update(
    config: Optimizer,
    table: layers.Weights,
    gradients: layers.Weights,
    state: Any,
    master: layers.Weights,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    learning_rate: Float32[Array, ""],
    grad_scale: Float32[Array, ""],
    accept: Bool[Array, ""],
) -> tuple[layers.Weights, Any]:
    """Weights and state after a step with the gradients times `grad_scale`.

    Both are unchanged unless `accept`, and always those of frozen weights.

    Memory: elementwise updates of weights without padding have no temporaries. Other layers are
        updated one after another, in place, so that the temporaries of one layer exist at a time.
        Arrays in host memory are copied to the device one layer at a time. Updates that need whole
        matrices are computed in groups of layers, one for each shard.

    Args: dtype: compute dtype, for updates that need whole matrices.
    """
    num_shards = device_mesh.num_shards(mesh)

    def update_param(
        param: Parameter, gradient: Array | None, state: Any, weight: Any
    ) -> tuple[Any, Any]:
        if gradient is None:
            return weight, state
        group = param_groups.find_group(config, param)
        rate = learning_rate * group.learning_rate_factor
        transform = build_transform(config, param)
        is_grouped = config.needs_whole_matrices and is_layer_matrix(param)

        def update_layer(old: tuple[Array, Any], gradient: Array) -> tuple[Array, Any]:
            weight, state, own_gradient = remove_padding(param, old[0].shape, (*old, gradient))
            with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
                direction, new_state = transform.update(own_gradient * grad_scale, state, weight)
                new = (weight - rate * direction, new_state)
            return add_padding(new, old)

        def update_group(old: tuple[Array, Any], gradients: Array) -> tuple[Array, Any]:
            # the last part needs whole matrices; padding is zero before and after
            weights, state = old
            finish = functools.partial(config.finish_matrices, param)
            decay = param_groups.weight_decay(config, param)
            with jax.numpy_dtype_promotion("standard"):
                momenta, new_state = jax.vmap(transform.update)(
                    gradients * grad_scale, state, weights
                )
                directions = muon.map_matrices(
                    param, finish, momenta.astype(dtype), mesh=mesh
                ).astype(jnp.float32)
                return weights - rate * (directions + decay * weights), new_state

        def update_if_accepted(old: tuple[Array, Any], gradient: Array) -> tuple[Array, Any]:
            new = (update_group if is_grouped else update_layer)(old, gradient)
            return jax.tree.map(lambda new, old: jnp.where(accept, new, old), new, old)

        old = weight, state
        is_on_host = any(map(device_memory.is_on_host, jax.tree.leaves((gradient, old))))
        has_padding = weight.shape != param.stacked_shape
        if config.is_elementwise and param.num_layers is not None:
            if not is_on_host and not has_padding:
                # no temporaries; a loop over layers would copy each layer before it is written
                return jax.vmap(update_if_accepted)(old, gradient)
        group_size = muon.group_size(param, num_shards) if is_grouped else None
        return host_offload.update_each_layer(
            param, update_if_accepted, old, gradient, group_size=group_size
        )

    return map_weights_and_state(table, update_param, gradients, state, master)


def describe(
    config: Optimizer, table: layers.Weights, *, num_steps: int, num_shards: int
) -> tuple[str, str]:
    """Describes the optimizer of a run: everything, and what a user checks first."""
    num_warmup_steps = config.num_warmup_steps(num_steps)
    short = (
        f"{config.name}, {config.schedule.describe(num_steps, num_warmup_steps)}, "
        f"{format_count(num_warmup_steps, 'warmup step')}"
    )
    if num_warmup_steps >= num_steps:
        short += " (the run ends during warmup)"
    text = short
    if config.max_grad_norm:
        text += f", gradients clipped to norm {config.max_grad_norm:g}"
    params = jax.tree.leaves(table)
    state = sum(sum(state_bytes(config, param, num_shards)) for param in params)
    if state:
        text += f", {units.format_bytes(state)} of state per device"
    groups = param_groups.describe(config, table)
    return "; ".join([text, *groups]), "; ".join([short, *groups])


def _find_stored(
    param: Parameter, shape: tuple[int, ...], num_shards: int
) -> tuple[tuple[int, ...], bool]:
    """Shape as stored of an array of a weight's state, all layers together; and True if it is
    sharded like the weight. Args: shape: without padding."""
    layer = shape if param.num_layers is None else shape[1:]
    placement = sharding.choose_placement(param, num_shards)
    dim = placement.dim
    if dim is None or len(layer) != len(param.shape) or layer[dim] != param.shape[dim]:
        return shape, False  # such as counts
    # moments, or scales of 8-bit moments: [rows, blocks]
    stored = _replace_sizes(layer, param.shape, placement.stored_shape)
    return dataclasses.replace(param, shape=stored).stacked_shape, True


def describe_array(
    param: Parameter, x: jax.ShapeDtypeStruct, mesh: Mesh, *, is_on_host: bool
) -> Any:
    """Shape as stored and sharding of an array of the state, from that without padding.
    Args: is_on_host: True if the weight is in host memory, and with it arrays of its shape."""
    shape, is_sharded = _find_stored(param, x.shape, device_mesh.num_shards(mesh))
    is_like_weight = x.shape == param.stacked_shape
    place = NamedSharding(mesh, PartitionSpec())
    if is_sharded or is_like_weight:
        place = sharding.named_sharding(param, mesh, is_on_host=is_on_host and is_like_weight)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)


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
