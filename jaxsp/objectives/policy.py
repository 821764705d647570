"""Policy losses of given trajectories: the training half of reinforcement learning.

Names, defaults and formulas are those of TRL 1.16 (`GRPOTrainer`); configs/guide/policy.md has a
table of them. Differs: counts are those of the whole step, on every mesh. TRL takes grpo, bnpo,
dr_grpo, sapo and luspo over each microbatch of a device, and averages these. A trajectory without
a token that has a loss is left out, and does not count; TRL's means count it with a loss of 0.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from jaxsp.config.fields import (
    HERE,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    with_examples,
)
from jaxsp.objectives.objective import LENGTH, TileTokens, TokenObjective

if TYPE_CHECKING:
    from jax import Array

_LOG_RATIO = "log_ratio"
_KL = "kl"

_MAX_LOG_RATIO = 20.0
_MIN_LOG_WEIGHT = math.log(1e-8)
"""Limits of vespo's log-ratios and of the logarithm of its weight."""


class _LossType(NamedTuple):
    """Fields and normalization of a loss_type, whose formula is in `Policy._find_losses`."""

    fields: tuple[str, ...]
    """Fields of `_FIELDS` that it reads."""
    divisor: Literal["num_trajectories", "num_loss_tokens"] = "num_trajectories"
    is_mean: bool = False
    """True if the losses of a trajectory are divided by its loss tokens."""
    level: Literal["token", "sequence"] | None = None
    """The only importance_sampling_level; None: both."""


_CLIP = ("epsilon", "epsilon_high", "delta")
_SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")
_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
_FIELDS = (*_CLIP, "max_completion_length", *_SAPO, *_VESPO)

_LOSS_TYPES = {
    "grpo": _LossType(_CLIP, is_mean=True),
    "dr_grpo": _LossType((*_CLIP, "max_completion_length")),
    "dapo": _LossType(_CLIP, "num_loss_tokens"),
    "bnpo": _LossType(_CLIP, "num_loss_tokens"),
    "luspo": _LossType(_CLIP, level="sequence"),
    "cispo": _LossType(("epsilon_high",), "num_loss_tokens"),
    "sapo": _LossType(_SAPO, is_mean=True),
    "vespo": _LossType(_VESPO, "num_loss_tokens", level="token"),
}


class Policy(TokenObjective):
    """Policy loss of given trajectories: GRPO and its variants, GSPO, CISPO, SAPO, LUSPO, VESPO."""

    type: Literal["policy"] = "policy"
    format: ClassVar[str | None] = "trajectories"
    is_by_document: ClassVar[bool] = True
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "luspo", "cispo", "sapo", "vespo"] = (
        "dapo"
    )
    """Formula of the loss, and its normalization over the step."""
    epsilon: Annotated[NonNegativeFloat, with_examples(0.2)] = 0.2
    """Ratios are clipped below 1 - epsilon."""
    epsilon_high: Annotated[NonNegativeFloat | None, with_examples(0.28)] = None
    """Ratios are clipped above 1 + epsilon_high; for cispo above epsilon_high, which it needs.
    null: epsilon."""
    delta: Annotated[PositiveFloat | None, with_examples(4.0)] = None
    """Maximum of ratios that are not clipped, which limits negative advantages. null: none."""
    beta: Annotated[NonNegativeFloat, with_examples(0.001)] = 0.0
    """Factor of the KL divergence from the reference model. Above 0, records need ref_logps."""
    use_bias_correction_kl: bool = True
    """Multiply the KL divergence of a token by its ratio."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratios: of each token, or the geometric mean over a trajectory (GSPO), which must then have
    one advantage."""
    temperature: Annotated[PositiveFloat, with_examples(1.0)] = 1.0
    """Temperature at which trajectories were sampled: the logits are divided by it."""
    max_completion_length: Annotated[PositiveCount | None, with_examples(4096)] = None
    """Number that dr_grpo divides the losses of a trajectory by, which it needs: the longest answer
    that was sampled. TRL's default is 512."""
    sapo_temperature_pos: Annotated[PositiveFloat, with_examples(1.0)] = 1.0
    """Temperature of sapo's gate for positive advantages."""
    sapo_temperature_neg: Annotated[PositiveFloat, with_examples(1.05)] = 1.05
    """Temperature of sapo's gate for other advantages."""
    vespo_k_pos: Annotated[NonNegativeFloat, with_examples(2.0)] = 2.0
    """Power of vespo's weight for advantages of at least 0."""
    vespo_lambda_pos: Annotated[PositiveFloat, with_examples(3.0)] = 3.0
    """Decay of vespo's weight for advantages of at least 0."""
    vespo_k_neg: Annotated[NonNegativeFloat, with_examples(3.0)] = 3.0
    """Power of vespo's weight for negative advantages."""
    vespo_lambda_neg: Annotated[PositiveFloat, with_examples(2.0)] = 2.0
    """Decay of vespo's weight for negative advantages."""

    def find_problems(self) -> Iterator[str]:
        own = f"with {HERE}.loss_type = {self.loss_type}"
        used = self._loss_type.fields
        yield from self._find_unused([name for name in _FIELDS if name not in used], f"{own}.")
        level = self._loss_type.level
        if level not in (None, self.importance_sampling_level):
            name = "importance_sampling_level"
            yield f"{self.show(name)}: must be {level} {own}. Set {HERE}.{name}={level}."
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            yield (
                f"{self.show('epsilon_high')}: must be at least 1 {own}, whose largest ratio it "
                f"is. Set {HERE}.epsilon_high=5.0."
            )
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            yield (
                f"{HERE}.max_completion_length: missing {own}. Set it to the longest answer that "
                f"was sampled, for example {HERE}.max_completion_length=4096."
            )
        if not self.beta:
            yield from self._find_unused(["use_bias_correction_kl"], f"with {HERE}.beta = 0.")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("advantages", "old_logps", *(("ref_logps",) if self.beta else ()))

    @property
    def needs_equal(self) -> tuple[str, ...]:
        return ("advantages",) if self._is_by_sequence else ()

    @property
    def has_document_sums(self) -> bool:
        return self._is_by_sequence or self.loss_type == "vespo"

    def sum_over_documents(self, tokens: TileTokens) -> dict[str, Any]:
        import jax.numpy as jnp

        logps_X = self._scale(tokens).logps_X
        log_ratios_X = logps_X - tokens.numbers["old_logps"]
        if self.loss_type == "vespo":
            return {_LOG_RATIO: jnp.clip(log_ratios_X, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)}
        if not self.beta:
            return {_LOG_RATIO: log_ratios_X}
        return {_LOG_RATIO: log_ratios_X, _KL: _estimate_kl(logps_X, tokens.numbers["ref_logps"])}

    def losses(self, tokens: TileTokens) -> tuple[Any, dict[str, Any]]:
        import jax
        import jax.numpy as jnp

        numbers = tokens.numbers
        scaled = self._scale(tokens)
        logps_X = scaled.logps_X
        log_ratios_X = logps_X - numbers["old_logps"]
        if self._is_by_sequence:
            # The derivative of a mean by a token's log-probability is 1 / n, and the n tokens of
            # the trajectory have the same loss: together as if each token's were 1
            means_X = numbers[_LOG_RATIO] / numbers[LENGTH]
            log_ratios_X = means_X + logps_X - jax.lax.stop_gradient(logps_X)
        ratios_X = jnp.exp(log_ratios_X)
        losses_X = self._find_losses(logps_X, ratios_X, numbers)
        log_softmax_XV = jax.nn.log_softmax(jax.lax.stop_gradient(scaled.logits_XV))
        measured = {
            "ratio": ratios_X,
            "entropy": -(jnp.exp(log_softmax_XV) * log_softmax_XV).sum(-1),
        }
        low, high = self._bounds
        advantages_X = numbers["advantages"]
        if "epsilon" in self._loss_type.fields:
            measured["clip_low"] = ((ratios_X < low) & (advantages_X < 0)).astype(jnp.float32)
        if "epsilon_high" in self._loss_type.fields:
            measured["clip_high"] = ((ratios_X > high) & (advantages_X > 0)).astype(jnp.float32)
        if self.beta:
            kl_X = _estimate_kl(logps_X, numbers["ref_logps"])
            fixed_X = jax.lax.stop_gradient(ratios_X)
            if self.use_bias_correction_kl and self._is_by_sequence:
                # The second term is 0, with the derivative of the trajectory's mean KL times its
                # ratio
                kl_X = kl_X * fixed_X + numbers[_KL] / numbers[LENGTH] * (ratios_X - fixed_X)
            elif self.use_bias_correction_kl:
                kl_X = kl_X * ratios_X
            losses_X = losses_X + self.beta * kl_X
            measured["reference_kl"] = kl_X
        if self._loss_type.is_mean:
            losses_X = losses_X / numbers[LENGTH]
        elif self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None, "checked with the config"
            losses_X = losses_X / self.max_completion_length
        return losses_X, jax.lax.stop_gradient(measured)

    def find_divisor(self, counts: Mapping[str, Any]) -> Any:
        return counts[self._loss_type.divisor]

    def _find_losses(
        self, logps_X: "Array", ratios_X: "Array", numbers: Mapping[str, "Array"]
    ) -> Any:
        """Loss of each token, before the KL divergence and the normalization."""
        import jax
        import jax.numpy as jnp

        advantages_X = numbers["advantages"]
        if self.loss_type == "cispo":
            weights_X = jax.lax.stop_gradient(jnp.minimum(ratios_X, self._bounds[1]))
            return -weights_X * advantages_X * logps_X
        if self.loss_type == "sapo":
            temperatures = self.sapo_temperature_pos, self.sapo_temperature_neg
            t_X = jnp.where(advantages_X > 0, *temperatures)
            return -4 / t_X * jax.nn.sigmoid(t_X * (ratios_X - 1)) * advantages_X
        if self.loss_type == "vespo":
            log_weights_X = jnp.clip(numbers[_LOG_RATIO], _MIN_LOG_WEIGHT, _MAX_LOG_RATIO)
            is_positive_X = advantages_X >= 0
            k_X = jnp.where(is_positive_X, self.vespo_k_pos, self.vespo_k_neg)
            lambda_X = jnp.where(is_positive_X, self.vespo_lambda_pos, self.vespo_lambda_neg)
            phi_X = jnp.exp(lambda_X * (1 - jnp.exp(log_weights_X)) + k_X * log_weights_X)
            return -phi_X * advantages_X * logps_X
        clipped_X = jnp.clip(ratios_X, *self._bounds) * advantages_X
        if self.delta is not None:
            ratios_X = jnp.minimum(ratios_X, self.delta)
        return -jnp.minimum(ratios_X * advantages_X, clipped_X)

    @property
    def _loss_type(self) -> _LossType:
        return _LOSS_TYPES[self.loss_type]

    @property
    def _is_by_sequence(self) -> bool:
        return self.importance_sampling_level == "sequence"

    @property
    def _bounds(self) -> tuple[float, float]:
        """Bounds of clipped ratios."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1 - self.epsilon, high + (self.loss_type != "cispo")

    def _scale(self, tokens: TileTokens) -> TileTokens:
        """The tokens, with logits divided by the temperature."""
        if self.temperature == 1:
            return tokens
        return dataclasses.replace(tokens, logits_XV=tokens.logits_XV / self.temperature)


def _estimate_kl(logps_X: Any, references_X: Any) -> Any:
    """Estimate of the KL divergence from the reference model, at least 0: Schulman 2020, k3."""
    import jax.numpy as jnp

    differences_X = references_X - logps_X
    return jnp.exp(differences_X) - differences_X - 1
