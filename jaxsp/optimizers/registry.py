"""Optimizers, one class each: fields and optax transforms."""

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic

from jaxsp.config.fields import (
    HERE,
    Choice,
    ConfigSection,
    Fraction,
    NonNegativeCount,
    NonNegativeFloat,
    PositiveFloat,
    for_training,
    with_examples,
)
from jaxsp.optimizers import schedules
from jaxsp.optimizers.schedules import SCHEDULE, Cosine, InverseSqrt, Schedule

if TYPE_CHECKING:
    import optax


class ParameterGroup(ConfigSection):
    """Weights selected by a pattern, with their own update settings."""

    pattern: Annotated[str, with_examples("model.embed_tokens*", min_length=1)]
    """Hugging Face names of the weights, where * stands for any text and ? for one character:
    model.embed_tokens*, or model.layers.*.mlp.*. A pattern selects a weight in all layers; one
    layer cannot be selected."""
    learning_rate_factor: Annotated[NonNegativeFloat, with_examples(0.1)] = 1.0
    """Factor of the learning rate."""
    weight_decay: Annotated[NonNegativeFloat | None, with_examples(0.0)] = None
    """Weight decay of the group's matrices. null: that of the optimizer."""
    frozen: bool = False
    """Freeze the weights: no gradients and no optimizer state."""

    def find_problems(self) -> Iterator[str]:
        for name, unset in (("learning_rate_factor", 1), ("weight_decay", None)):
            if self.frozen and getattr(self, name) != unset:
                yield (
                    f"{self.show(name)}: has no effect, because the group is frozen. "
                    f"Leave it out, or set {HERE}.frozen=false."
                )


class Optimizer(ConfigSection, abc.ABC):
    """Optimizer, parameter groups and learning-rate schedule.

    A transform gets one layer of one weight, or one expert of it, whole and without padding, as a
    global array: means and maxima over it need no collective. Its state starts at zero. It has no
    weight decay and no learning rate.
    """

    name: str
    """Optimizer."""
    learning_rate: NonNegativeFloat = for_training(1e-5)
    """Peak learning rate, reached after warmup."""
    schedule: Annotated[Schedule, SCHEDULE] = Cosine()
    """Learning-rate schedule after warmup: a name, or a mapping with type and its fields."""
    warmup_steps: Annotated[NonNegativeCount, with_examples(100)] = 0
    """Number of linear warmup steps. The first step has learning_rate / warmup_steps."""
    warmup_fraction: Annotated[Fraction | None, with_examples(0.03)] = None
    """Warmup as a fraction of all steps of the run, rounded up to whole steps. Set this or
    warmup_steps."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of matrices, multiplied by the learning rate. Norms and biases do not
    decay."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum global norm of a step's gradient; a larger gradient is scaled down. null: no
    limit."""
    groups: Annotated[
        tuple[ParameterGroup, ...],
        pydantic.Field(
            strict=False, examples=["[{pattern: model.embed_tokens*, learning_rate_factor: 0.1}]"]
        ),
    ] = ()
    """Parameter groups. A weight belongs to the first group whose pattern matches it."""

    is_elementwise: ClassVar[bool] = False
    """True if an element's update depends on its own weight, gradient and state only, so that the
    update of all layers at once needs no temporaries."""
    needs_whole_matrices: ClassVar[bool] = False
    """True if `finish_matrices` is the last part of the update of the layers' matrices."""

    @abc.abstractmethod
    def make_transform(self) -> "optax.GradientTransformation":
        """Transform of a layer's gradient."""

    def make_matrix_transform(self) -> "optax.GradientTransformation":
        """Transform of the layers' matrices."""
        return self.make_transform()

    def finish_matrices(self, param: Any, updates_nOI: Any) -> Any:
        """Last part of the update of whole matrices of a parameter on a device, in the compute
        dtype. It keeps zero rows and columns."""
        raise NotImplementedError

    @property
    def state_kind(self) -> str:
        """Name of the optimizer's state: runs with the same one can continue each other."""
        return self.name

    def find_problems(self) -> Iterator[str]:
        has_warmup = self.warmup_steps or self.warmup_fraction
        if isinstance(self.schedule, InverseSqrt) and not has_warmup:
            yield (
                f"{HERE}.schedule = inverse_sqrt: needs a warmup, because the learning rate is "
                f"peak * sqrt(warmup steps / step). Set {HERE}.warmup_fraction=0.03."
            )
        if self.warmup_steps and self.warmup_fraction is not None:
            yield (
                f"{self.show('warmup_steps')}, {self.show('warmup_fraction')}: only one of them "
                f"may be set. Use {HERE}.warmup_steps=0 or {HERE}.warmup_fraction=null."
            )

    def num_warmup_steps(self, num_steps: int) -> int:
        """Number of warmup steps in a run of `num_steps` steps."""
        if self.warmup_fraction is None:
            return self.warmup_steps
        return schedules.round_up(self.warmup_fraction * num_steps)

    def make_rate(self, num_steps: int) -> Callable[[Any], Any]:
        """Learning rate, float32, as a function of the step, counted from 0.

        It grows from lr / warmup steps to lr, then follows the schedule. Schedules that decay reach
        their minimum at `num_steps`, which is the step after the last.
        """
        import jax
        import jax.numpy as jnp

        peak = self.learning_rate
        warmup = self.num_warmup_steps(num_steps)
        after_warmup = self.schedule.make_rate(peak, num_steps=num_steps, num_warmup_steps=warmup)

        def rate(step: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
                increasing = peak * (step + 1) / max(1, warmup)
                later = after_warmup(step - warmup)
                return jnp.where(step < warmup, increasing, later).astype(jnp.float32)

        return rate


class _Adam(Optimizer):
    beta1: Annotated[Fraction, with_examples(0.9)] = 0.9
    """Decay rate of the first moment, the average gradient; with muon, only for the weights that
    adamw updates."""
    beta2: Annotated[Fraction, with_examples(0.95)] = 0.95
    """Decay rate of the second moment, the average squared gradient; with muon, only for the
    weights that adamw updates."""
    eps: Annotated[PositiveFloat, with_examples(1e-8)] = 1e-8
    """Number added to the square root of the second moment; with muon, only for the weights that
    adamw updates."""

    def make_transform(self) -> "optax.GradientTransformation":
        import optax

        return optax.scale_by_adam(self.beta1, self.beta2, self.eps)


class AdamW(_Adam):
    """Adam with decoupled weight decay.

    beta2 is that of Llama 2 (arXiv:2307.09288, section 2.2); optax has 0.999.
    """

    name: Literal["adamw"] = "adamw"
    is_elementwise: ClassVar = True


class Sgd(Optimizer):
    """Gradient descent, with or without momentum."""

    name: Literal["sgd"] = "sgd"
    momentum: Annotated[Fraction, with_examples(0.95)] = 0.0
    """Decay rate of the momentum."""
    nesterov: Annotated[bool, with_examples(True)] = False
    """Use Nesterov momentum."""
    is_elementwise: ClassVar = True

    def find_problems(self) -> Iterator[str]:
        if self.nesterov and not self.momentum:
            yield f"{self.show('nesterov')}: needs momentum. Set {HERE}.momentum=0.9."
        yield from super().find_problems()

    @property
    def state_kind(self) -> str:
        return "sgd with momentum" if self.momentum else "sgd"

    def make_transform(self) -> "optax.GradientTransformation":
        import optax

        if not self.momentum:
            return optax.identity()
        return optax.trace(self.momentum, nesterov=self.nesterov)


class Lion(Optimizer):
    """Updates by the sign of a mix of momentum and gradient.

    Defaults: arXiv:2302.06675, section 4.1.
    """

    name: Literal["lion"] = "lion"
    beta1: Annotated[Fraction, with_examples(0.9)] = 0.9
    """Weight of the momentum in the update."""
    beta2: Annotated[Fraction, with_examples(0.99)] = 0.99
    """Decay rate of the momentum."""
    is_elementwise: ClassVar = True

    def make_transform(self) -> "optax.GradientTransformation":
        import optax

        return optax.scale_by_lion(self.beta1, self.beta2)


class Adafactor(Optimizer):
    """Adafactor as in transformers (`--optim adafactor`), with the learning rate of the config.

    Parts of a fused tensor (q, k and v, or gate and up, of Phi-3 and GLM-4) are matrices of their
    own, while transformers takes the statistics of the whole tensor. So are the matrices of
    experts, of which transformers clips all updates of a layer together.

    Second moments are factored into averages of rows and columns for matrices of at least
    128 x 128. Updates are clipped at a root mean square of 1. Source: arXiv:1804.04235, sections
    3, 6 and 7.2.
    """

    name: Literal["adafactor"] = "adafactor"

    def make_transform(self) -> "optax.GradientTransformation":
        import optax

        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


class Muon(_Adam):
    """Orthogonalized momentum updates for the layers' matrices, adamw for other weights.

    Sources: arXiv:2502.16982, section 2 (momentum); optax.contrib.muon.
    """

    name: Literal["muon"] = "muon"
    momentum: Annotated[Fraction, with_examples(0.95)] = 0.95
    """Decay rate of the Nesterov momentum of the layers' matrices."""
    needs_whole_matrices: ClassVar = True

    def make_matrix_transform(self) -> "optax.GradientTransformation":
        from jaxsp.optimizers import muon

        return muon.scale_by_momentum(self.momentum)

    def finish_matrices(self, param: Any, updates_nOI: Any) -> Any:
        from jaxsp.optimizers import muon

        return muon.orthogonalize(param, updates_nOI)


class AdamW8bit(_Adam):
    """AdamW with 8-bit moments for the layers' matrices."""

    name: Literal["adamw8bit"] = "adamw8bit"

    def make_matrix_transform(self) -> "optax.GradientTransformation":
        from jaxsp.optimizers import adamw8bit

        return adamw8bit.scale_by_adam(self.beta1, self.beta2, self.eps)


OPTIMIZERS = (AdamW, Sgd, Lion, Adafactor, Muon, AdamW8bit)
OPTIMIZER = Choice(selector="name", types=OPTIMIZERS, default="adamw")
