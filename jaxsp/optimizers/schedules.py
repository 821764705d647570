"""Learning-rate schedules: warmup, then a schedule of the registry.

Sources: wsd (warmup, stable, decay), arXiv:2404.06395; its decay by 1 - sqrt, arXiv:2405.18392,
section 3; inverse_sqrt, arXiv:1706.03762, section 5.3.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32

from jaxsp.config.optimizer_schema import OptimizerConfig

Schedule = Callable[[Array], Array]
"""Learning rate as a function of the number of steps after the warmup."""

_DECAYS: Mapping[str, Callable[[Array], Array]] = {
    "sqrt": lambda x: 1 - jnp.sqrt(x),
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + jnp.cos(jnp.pi * x)) / 2,
}
"""Remaining fraction of the distance to the minimum, after a fraction of wsd's decay."""


def build_schedule(
    config: OptimizerConfig, num_steps: int
) -> Callable[[Int32[Array, ""]], Float32[Array, ""]]:
    """Learning rate as a function of the step, counted from 0.

    It grows from lr / warmup_steps to lr, then follows the schedule. Schedules that decay reach
    their minimum at `num_steps`, which is the step after the last.
    """
    peak = config.learning_rate
    warmup = config.num_warmup_steps(num_steps)
    after_warmup = _SCHEDULES[config.schedule](config, num_steps)

    def rate(step: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            increasing = peak * (step + 1) / max(1, warmup)
            later = after_warmup(step - warmup)
            return jnp.where(step < warmup, increasing, later).astype(jnp.float32)

    return rate


def _cosine(config: OptimizerConfig, num_steps: int) -> Schedule:
    floor = config.min_learning_rate_fraction or 0.0
    return optax.cosine_decay_schedule(
        config.learning_rate, _num_steps_after_warmup(config, num_steps), alpha=floor
    )


def _linear(config: OptimizerConfig, num_steps: int) -> Schedule:
    peak = config.learning_rate
    floor = peak * (config.min_learning_rate_fraction or 0.0)
    return optax.linear_schedule(peak, floor, _num_steps_after_warmup(config, num_steps))


def _constant(config: OptimizerConfig, num_steps: int) -> Schedule:
    return optax.constant_schedule(config.learning_rate)


def _wsd(config: OptimizerConfig, num_steps: int) -> Schedule:
    peak = config.learning_rate
    floor = peak * (config.min_learning_rate_fraction or 0.0)
    num_decay_steps = config.num_decay_steps(num_steps)
    begin = _num_steps_after_warmup(config, num_steps) - num_decay_steps
    decay = _DECAYS[config.decay_shape or "sqrt"]

    def rate(step: Array) -> Array:
        progress = jnp.clip((step - begin) / num_decay_steps, 0.0, 1.0)
        return floor + (peak - floor) * decay(progress)

    return rate


def _inverse_sqrt(config: OptimizerConfig, num_steps: int) -> Schedule:
    warmup = config.num_warmup_steps(num_steps)

    def rate(step: Array) -> Array:
        return config.learning_rate * jnp.sqrt(warmup / jnp.maximum(warmup + step + 1, 1))

    return rate


def _num_steps_after_warmup(config: OptimizerConfig, num_steps: int) -> int:
    return max(1, num_steps - config.num_warmup_steps(num_steps))


_SCHEDULES: Mapping[str, Callable[[OptimizerConfig, int], Schedule]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}


def describe(config: OptimizerConfig, num_steps: int) -> str:
    """Describes the schedule of a run. Example: `cosine schedule to 10 % of the peak`."""
    text = f"{config.schedule} schedule"
    if config.schedule == "wsd":
        steps = config.num_decay_steps(num_steps)
        last_steps = "step" if steps == 1 else f"{steps:,} steps"
        text += f", {config.decay_shape or 'sqrt'} decay in the last {last_steps}"
    if config.min_learning_rate_fraction:
        text += f" to {100 * config.min_learning_rate_fraction:g} % of the peak"
    return text
