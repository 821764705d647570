"""Config section of the optimizer: its name, parameter groups and learning-rate schedule."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

from jaxsp.config import fields
from jaxsp.config.fields import (
    ConfigSection,
    Fraction,
    NonNegativeCount,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    with_examples,
)

DEFAULTS: Mapping[str, Mapping[str, float | bool]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    "sgd": {"momentum": 0.0, "nesterov": False},
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "adafactor": {},
    "muon": {"momentum": 0.95, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    "adamw8bit": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
}
"""Fields that apply to each optimizer, with their defaults.

Sources: lion, arXiv:2302.06675, section 4.1; muon, arXiv:2502.16982, section 2 (momentum), and
optax.contrib.muon. beta2 of AdamW is that of Llama 2 (arXiv:2307.09288, section 2.2); optax has
0.999.
"""

SCHEDULE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("min_learning_rate_fraction",),
    "linear": ("min_learning_rate_fraction",),
    "constant": (),
    "wsd": ("min_learning_rate_fraction", "decay_fraction", "decay_steps", "decay_shape"),
    "inverse_sqrt": (),
}
"""Fields that apply to each schedule, in addition to those of the warmup."""

DEFAULT_DECAY_FRACTION = 0.2
"""Fraction of a run's steps in which wsd decays. Source: arXiv:2405.18392, section 4.1."""


class ParameterGroup(ConfigSection):
    """Weights that a pattern selects, and how their update differs."""

    pattern: Annotated[str, with_examples("model.embed_tokens*", min_length=1)]
    """Hugging Face names of the weights, where * stands for any text and ? for one character:
    model.embed_tokens*, or model.layers.*.mlp.*. A pattern selects a weight in all layers; one
    layer cannot be selected."""
    learning_rate_factor: Annotated[NonNegativeFloat, with_examples(0.1)] = 1.0
    """Factor of the learning rate."""
    weight_decay: Annotated[NonNegativeFloat | None, with_examples(0.0)] = None
    """Weight decay of the group's matrices. null: that of the optimizer."""
    frozen: bool = False
    """The weights stay as they are, without gradients or optimizer state."""


class OptimizerConfig(ConfigSection):
    """Optimizer, parameter groups and learning-rate schedule."""

    name: Literal["adamw", "sgd", "lion", "adafactor", "muon", "adamw8bit"] = "adamw"
    """Optimizer. muon orthogonalizes the updates of the layers' matrices, and updates all other
    weights by adamw. adamw8bit has moments of 8 bits for the layers' matrices."""
    learning_rate: Annotated[NonNegativeFloat, with_examples(1e-5)]
    """Peak learning rate, reached after warmup."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """Learning rate after warmup. cosine and linear fall toward min_learning_rate_fraction of the
    peak, which the step after the last one would have. wsd stays at the peak and falls in the last
    steps of the run. inverse_sqrt is peak * sqrt(warmup steps / step). constant stays at the
    peak."""
    min_learning_rate_fraction: Annotated[
        float | None, pydantic.Field(ge=0, le=1, examples=[0.1])
    ] = None
    """Learning rate at the end of cosine, linear and wsd, as a fraction of the peak. null: 0."""
    decay_fraction: Annotated[float | None, pydantic.Field(gt=0, le=1, examples=[0.2])] = None
    """Steps in which wsd decays, as a fraction of all steps of the run, rounded up. null: 0.2,
    unless decay_steps is set."""
    decay_steps: Annotated[PositiveCount | None, with_examples(200)] = None
    """Number of last steps in which wsd decays. Set this or decay_fraction."""
    decay_shape: Annotated[Literal["sqrt", "linear", "cosine"] | None, with_examples("sqrt")] = None
    """Shape of wsd's decay, at a fraction x of the decay. sqrt: 1 - sqrt(x). linear: 1 - x. cosine:
    (1 + cos(pi x)) / 2. null: sqrt."""
    warmup_steps: Annotated[NonNegativeCount, with_examples(100)] = 0
    """Number of steps of linear growth. The first step has learning_rate / warmup_steps."""
    warmup_fraction: Annotated[Fraction | None, with_examples(0.03)] = None
    """Warmup as a fraction of all steps of the run, rounded up to whole steps. Set this or
    warmup_steps."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of matrices, multiplied by the learning rate. Norms and biases do not
    decay."""
    momentum: Annotated[Fraction | None, with_examples(0.95)] = None
    """Decay rate of the momentum of sgd and of muon's matrices. null: 0 for sgd, 0.95 for muon."""
    nesterov: Annotated[bool | None, with_examples(True)] = None
    """Nesterov momentum for sgd; muon always has it. null: false."""
    beta1: Annotated[Fraction | None, with_examples(0.9)] = None
    """Decay rate of the first moment, the average gradient, of adamw, adamw8bit and muon's other
    weights; for lion, the weight of the momentum in the update. null: 0.9."""
    beta2: Annotated[Fraction | None, with_examples(0.95)] = None
    """Decay rate of the second moment, the average squared gradient, of adamw, adamw8bit and muon's
    other weights; for lion, of the momentum. null: 0.95, for lion 0.99."""
    eps: Annotated[PositiveFloat | None, with_examples(1e-8)] = None
    """Number added to the square root of the second moment, for adamw, adamw8bit and muon's other
    weights. null: 1e-8."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum global norm of a step's gradient; a larger gradient is scaled down. null: no
    limit."""
    groups: Annotated[
        tuple[ParameterGroup, ...],
        pydantic.Field(
            strict=False, examples=["[{pattern: model.embed_tokens*, learning_rate_factor: 0.1}]"]
        ),
    ] = ()
    """Parameter groups. The first one whose pattern matches a weight counts."""

    @pydantic.field_validator("warmup_steps", "decay_steps", mode="before")
    @classmethod
    def _check_steps(cls, value: Any, info: Any) -> Any:
        if isinstance(value, float) and 0 < value < 1:
            name = str(info.field_name).replace("steps", "fraction")
            raise ValueError(
                f"must be an integer. For a fraction of all steps, set optimizer.{name}={value}"
            )
        return value

    @pydantic.field_validator("warmup_fraction", "decay_fraction", mode="before")
    @classmethod
    def _check_fraction(cls, value: Any, info: Any) -> Any:
        if fields.is_count(value) and (value > 1 or info.field_name == "warmup_fraction"):
            name = str(info.field_name).replace("fraction", "steps")
            raise ValueError(
                f"must be less than 1. For a number of steps, set optimizer.{name}={value}"
            )
        return value

    def get_option(self, name: str) -> float:
        """Value of a field of DEFAULTS: as set, or the default of this optimizer."""
        value = getattr(self, name)
        return float(DEFAULTS[self.name][name] if value is None else value)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Number of warmup steps in a run of `num_steps` steps."""
        if self.warmup_fraction is None:
            return self.warmup_steps
        return _round_up(self.warmup_fraction * num_steps)

    def num_decay_steps(self, num_steps: int) -> int:
        """Number of steps in which wsd decays, at most those after the warmup."""
        fraction = DEFAULT_DECAY_FRACTION if self.decay_fraction is None else self.decay_fraction
        steps = self.decay_steps or _round_up(fraction * num_steps)
        return min(steps, max(1, num_steps - self.num_warmup_steps(num_steps)))

    @property
    def state_kind(self) -> str:
        """Name of the optimizer's state: runs with the same one can continue each other."""
        if self.name == "sgd" and self.get_option("momentum"):
            return "sgd with momentum"
        return self.name


def _round_up(steps: float) -> int:
    # 0.07 * 100 is 7.000000000000001 in floating point, and 7 steps are meant
    return math.ceil(round(steps, 6))
