"""Learning-rate schedule and optimizer update: an optax transform per weight, layer by layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float32, Int32

from jaxsp.config.schema import OptimizerConfig
from jaxsp.model import layers
from jaxsp.model.layers import Parameter
from jaxsp.training import host_offload


def build_schedule(
    config: OptimizerConfig, num_steps: int
) -> Callable[[Int32[Array, ""]], Float32[Array, ""]]:
    """Learning rate as a function of the step, counted from 0.

    It grows from lr / warmup_steps to lr, then follows the schedule, to 0 at `num_steps` unless the
    schedule is constant.
    """
    peak = config.learning_rate
    warmup = config.num_warmup_steps(num_steps)
    rest = max(1, num_steps - warmup)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]

    def rate(step: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            increasing = peak * (step + 1) / max(1, warmup)
            return jnp.where(step < warmup, increasing, decay(step - warmup)).astype(jnp.float32)

    return rate


def build_transform(config: OptimizerConfig, param: Parameter) -> optax.GradientTransformation:
    """Optax transform of one layer's gradient, without the learning rate; only matrices decay."""
    decay = optax.add_decayed_weights(config.weight_decay if param.is_matrix else 0.0)
    if config.name == "sgd":
        return decay
    return optax.chain(optax.scale_by_adam(config.beta1, config.beta2, config.eps), decay)


def state_bytes_per_weight(config: OptimizerConfig) -> int:
    """Bytes of optimizer state for each element of a matrix. Example: 8 for AdamW's two moments."""
    matrix = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    state = jax.eval_shape(
        build_transform(config, Parameter(shape=(2, 2), hf_name="")).init, matrix
    )
    return sum(x.dtype.itemsize for x in jax.tree.leaves(state) if x.shape == matrix.shape)


def init(config: OptimizerConfig, table: Any, master: Any) -> Any:
    """Optimizer state of every weight of a tree, or of one weight; None for frozen weights.

    Stacked weights have a state for each layer.
    """

    def init_param(param: Parameter, weight: Any) -> Any:
        if not param.is_trainable:
            return None
        init_layer = build_transform(config, param).init
        return init_layer(weight) if param.num_layers is None else jax.vmap(init_layer)(weight)

    return jax.tree.map(init_param, table, master)


def map_weights_and_state(
    table: layers.Weights, function: Callable[..., tuple[Any, Any]], *trees: Any
) -> tuple[Any, Any]:
    """Two trees with the results of a function that returns a weight and its optimizer state.

    Args:
        function: receives a parameter and its part of each tree.
    """
    structure: Any = jax.tree.structure(table)
    parts = map(structure.flatten_up_to, (table, *trees))
    weights, states = zip(*map(function, *parts), strict=True)
    return structure.unflatten(weights), structure.unflatten(states)


def update(
    config: OptimizerConfig,
    table: layers.Weights,
    gradients: layers.Weights,
    state: Any,
    master: layers.Weights,
    *,
    learning_rate: Float32[Array, ""],
    grad_scale: Float32[Array, ""],
    accept: Bool[Array, ""],
) -> tuple[layers.Weights, Any]:
    """Weights and state after a step with the gradients times `grad_scale`.

    Both are unchanged unless `accept`, and always those of frozen weights.

    Memory: layers are updated one after another, in place, so that the temporaries of one layer
        exist at a time. Arrays in host memory are copied to the device one layer at a time.
    """

    def update_param(
        param: Parameter, gradient: Array | None, state: Any, weight: Any
    ) -> tuple[Any, Any]:
        if gradient is None:
            return weight, state
        transform = build_transform(config, param).update

        def update_layer(old: tuple[Array, Any], gradient: Array) -> tuple[Array, Any]:
            weight, state = old
            with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
                direction, new_state = transform(gradient * grad_scale, state, weight)
                new = (weight - learning_rate * direction, new_state)
            return jax.tree.map(lambda new, old: jnp.where(accept, new, old), new, old)

        return host_offload.update_each_layer(param, update_layer, (weight, state), gradient)

    return map_weights_and_state(table, update_param, gradients, state, master)
