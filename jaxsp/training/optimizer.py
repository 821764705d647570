"""How weights move: a learning-rate schedule, and an optax transform for each weight, one layer at a time."""

import dataclasses
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
    """The learning rate of a step, counted from 0: warm-up from lr / warmup_steps, then the schedule to 0 at num_steps."""
    peak, warmup = config.learning_rate, config.num_warmup_steps(num_steps)
    rest = max(1, num_steps - warmup)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]

    def rate(step: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            growing = peak * (step + 1) / max(1, warmup)
            return jnp.where(step < warmup, growing, after(step - warmup)).astype(jnp.float32)

    return rate


def build_transform(config: OptimizerConfig, param: Parameter) -> optax.GradientTransformation:
    """What happens to one layer's gradient before the learning rate; only matrices decay."""
    decay = optax.add_decayed_weights(config.weight_decay if param.is_matrix else 0.0)
    if config.name == "sgd":
        return decay
    return optax.chain(optax.scale_by_adam(config.beta1, config.beta2, config.eps), decay)


def init(config: OptimizerConfig, table: Any, master: Any) -> Any:
    """Optimizer state of every weight of a tree, or of one; stacked weights have a state for each layer."""

    def one(row: Parameter, weight: Array) -> Any:
        start = build_transform(config, row).init
        return start(weight) if row.num_layers is None else jax.vmap(start)(weight)

    return jax.tree.map(one, table, master)


@dataclasses.dataclass(frozen=True)
class _WeightAndState:
    """A weight and its state: one leaf, not a tree."""

    weight: Any
    state: Any


def map_weights_and_state(
    table: layers.Weights, function: Callable[..., tuple[Any, Any]], *trees: Any
) -> tuple[Any, Any]:
    """The trees of first and of second results of a function of each weight: of its row, and its part of each tree."""
    both = jax.tree.map(lambda row, *parts: _WeightAndState(*function(row, *parts)), table, *trees)
    return jax.tree.map(lambda x: x.weight, both), jax.tree.map(lambda x: x.state, both)


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
    """Weights and state after a step with the gradients times `scale`; both as they were unless `accept`.

    Layers are walked one after another, in place, so that one layer's temporaries exist at a time, and what is in host memory
    visits the device a layer at a time.
    """

    def one(row: Parameter, gradient: Array, state: Any, weight: Array) -> tuple[Array, Any]:
        move = build_transform(config, row).update

        def layer(old: tuple[Array, Any], gradient: Array) -> tuple[Array, Any]:
            weight, state = old
            with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
                moves, new_state = move(gradient * grad_scale, state, weight)
                new = (weight - learning_rate * moves, new_state)
            return jax.tree.map(lambda new, old: jnp.where(accept, new, old), new, old)

        return host_offload.update_each_layer(row, layer, (weight, state), gradient)

    return map_weights_and_state(table, one, gradients, state, master)
