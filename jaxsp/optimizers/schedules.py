"""Learning-rate schedules after the warmup, one class each."""

import abc
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pydantic

from jaxsp.config.fields import HERE, Choice, ConfigSection, PositiveCount, with_examples

Rate = Callable[[Any], Any]
"""Learning rate as a function of the number of steps after the warmup, inside jit."""


def round_up(steps: float) -> int:
    """Rounds up to whole steps: 0.07 * 100 is 7.000000000000001, and 7 steps are meant."""
    return math.ceil(round(steps, 6))


class Schedule(ConfigSection, abc.ABC):
    """Learning rate after the warmup."""

    type: str
    """Learning-rate schedule after warmup."""

    @abc.abstractmethod
    def make_rate(self, peak: float, *, num_steps: int, num_warmup_steps: int) -> Rate:
        """Returns the learning rate after warmup.

        Args: num_steps: steps of the run, warmup included, after which a decay has ended.
        """

    def describe(self, num_steps: int, num_warmup_steps: int) -> str:
        """Describes it for the banner. Example: `cosine schedule to 10 % of the peak`."""
        return f"{self.type} schedule"


class Constant(Schedule):
    """Constant at the peak."""

    type: Literal["constant"] = "constant"

    def make_rate(self, peak: float, *, num_steps: int, num_warmup_steps: int) -> Rate:
        return lambda step: peak


class InverseSqrt(Schedule):
    """Inverse square-root decay: peak * sqrt(warmup steps / step).

    Source: arXiv:1706.03762, section 5.3.
    """

    type: Literal["inverse_sqrt"] = "inverse_sqrt"

    def make_rate(self, peak: float, *, num_steps: int, num_warmup_steps: int) -> Rate:
        import jax.numpy as jnp

        warmup = num_warmup_steps
        return lambda step: peak * jnp.sqrt(warmup / jnp.maximum(warmup + step + 1, 1))


class _Decay(Schedule):
    min_learning_rate_fraction: Annotated[float, pydantic.Field(ge=0, le=1, examples=[0.1])] = 0.0
    """Learning rate at the end of the schedule, as a fraction of the peak."""

    def describe(self, num_steps: int, num_warmup_steps: int) -> str:
        text = super().describe(num_steps, num_warmup_steps)
        if self.min_learning_rate_fraction:
            text += f" to {100 * self.min_learning_rate_fraction:g} % of the peak"
        return text


class Cosine(_Decay):
    """Cosine decay from the peak to min_learning_rate_fraction of it, one step after the last."""

    type: Literal["cosine"] = "cosine"

    def make_rate(self, peak: float, *, num_steps: int, num_warmup_steps: int) -> Rate:
        import optax

        steps = max(1, num_steps - num_warmup_steps)
        return optax.cosine_decay_schedule(peak, steps, alpha=self.min_learning_rate_fraction)


class Linear(_Decay):
    """Linear decay from the peak to min_learning_rate_fraction of it, one step after the last."""

    type: Literal["linear"] = "linear"

    def make_rate(self, peak: float, *, num_steps: int, num_warmup_steps: int) -> Rate:
        import optax

        steps = max(1, num_steps - num_warmup_steps)
        return optax.linear_schedule(peak, peak * self.min_learning_rate_fraction, steps)


class Wsd(_Decay):
    """Warmup-stable-decay: constant at the peak, then a decay in the last steps of the run.

    Sources: arXiv:2404.06395; decay of 1 - sqrt(x) in the last fifth: arXiv:2405.18392, sections 3
    and 4.1.
    """

    type: Literal["wsd"] = "wsd"
    decay_fraction: Annotated[float | None, pydantic.Field(gt=0, le=1, examples=[0.2])] = None
    """Length of the final decay, as a fraction of all steps of the run, rounded up. null: 0.2,
    unless decay_steps is set."""
    decay_steps: Annotated[PositiveCount | None, with_examples(200)] = None
    """Number of steps of the final decay. Set this or decay_fraction."""
    decay_shape: Annotated[Literal["sqrt", "linear", "cosine"], with_examples("sqrt")] = "sqrt"
    """Shape of the decay, where x is the completed fraction of it. sqrt: 1 - sqrt(x). linear:
    1 - x. cosine: (1 + cos(pi x)) / 2."""

    def find_problems(self) -> Iterator[str]:
        if self.decay_steps and self.decay_fraction is not None:
            yield (
                f"{self.show('decay_steps')}, {self.show('decay_fraction')}: only one of them may "
                f"be set. Use {HERE}.decay_steps=null or {HERE}.decay_fraction=null."
            )

    def num_decay_steps(self, num_steps: int, num_warmup_steps: int) -> int:
        """Number of steps of the decay, at most those after the warmup."""
        fraction = 0.2 if self.decay_fraction is None else self.decay_fraction
        steps = self.decay_steps or round_up(fraction * num_steps)
        return min(steps, max(1, num_steps - num_warmup_steps))

    def make_rate(self, peak: float, *, num_steps: int, num_warmup_steps: int) -> Rate:
        import jax.numpy as jnp

        floor = peak * self.min_learning_rate_fraction
        num_decay_steps = self.num_decay_steps(num_steps, num_warmup_steps)
        begin = max(1, num_steps - num_warmup_steps) - num_decay_steps

        def rate(step: Any) -> Any:
            x = jnp.clip((step - begin) / num_decay_steps, 0.0, 1.0)
            remaining = {
                "sqrt": lambda: 1 - jnp.sqrt(x),
                "linear": lambda: 1 - x,
                "cosine": lambda: (1 + jnp.cos(jnp.pi * x)) / 2,
            }[self.decay_shape]()
            return floor + (peak - floor) * remaining

        return rate

    def describe(self, num_steps: int, num_warmup_steps: int) -> str:
        steps = self.num_decay_steps(num_steps, num_warmup_steps)
        last_steps = "step" if steps == 1 else f"{steps:,} steps"
        decay = f"wsd schedule, {self.decay_shape} decay in the last {last_steps}"
        return super().describe(num_steps, num_warmup_steps).replace("wsd schedule", decay)


SCHEDULES = (Cosine, Linear, Constant, Wsd, InverseSqrt)
SCHEDULE = Choice(selector="type", types=SCHEDULES, default="cosine", is_name=True)
