"""Objectives of pairs, a chosen and a rejected answer to one prompt, and of unpaired answers.

Names, signs and defaults are those of TRL 1.16 (DPOTrainer; CPOTrainer for SimPO, which adds the
SFT term by default, unlike the paper; ORPOTrainer; RewardTrainer).
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jaxsp.config.fields import NonNegativeFloat, PositiveFloat, with_examples
from jaxsp.objectives.objective import PairObjective, Relative, WithSft

if TYPE_CHECKING:
    from jaxsp.objectives.pair_sums import PairSums


class _Smoothed(PairObjective):
    label_smoothing: Annotated[float, with_examples(0.1, ge=0, lt=0.5, allow_inf_nan=False)] = 0.0
    """Assumed probability that chosen and rejected are swapped; dpo is then conservative DPO."""

    def smooth(self, margin_P: Any) -> Any:
        """Sigmoid loss of a margin, float32[P]."""
        import jax

        right_P = (1 - self.label_smoothing) * jax.nn.log_sigmoid(margin_P)
        return -right_P - self.label_smoothing * jax.nn.log_sigmoid(-margin_P)


class Dpo(_Smoothed, WithSft, Relative):
    """Sigmoid loss of the difference between log-probabilities of chosen and rejected, relative to
    the reference model.

    Source: DPO, arXiv:2305.18290, equation 7; conservative DPO, Mitchell 2023.
    """

    type: Literal["dpo"] = "dpo"

    def losses(self, pairs: "PairSums") -> Any:
        return self.smooth(self.margin(pairs))


class Hinge(WithSft, Relative):
    """Hinge loss of the same margin as dpo. Source: SLiC, arXiv:2305.10425."""

    type: Literal["hinge"] = "hinge"

    def losses(self, pairs: "PairSums") -> Any:
        import jax

        return jax.nn.relu(1 - self.margin(pairs))


class Ipo(WithSft, Relative):
    """Squared distance of the margin of per-token log-ratios from 1 / (2 beta).

    Source: IPO, arXiv:2310.12036, equation 17.
    """

    type: Literal["ipo"] = "ipo"

    def losses(self, pairs: "PairSums") -> Any:
        import jax.numpy as jnp

        ratios_P2 = pairs.ratios_P2 / jnp.maximum(pairs.counts_P2, 1)
        return (ratios_P2[:, 0] - ratios_P2[:, 1] - 1 / (2 * self.beta)) ** 2


class Robust(_Smoothed, WithSft, Relative):
    """DPO loss corrected for a known rate of swapped labels (label_smoothing).

    Source: arXiv:2403.00409, equation 4.
    """

    type: Literal["robust"] = "robust"

    def losses(self, pairs: "PairSums") -> Any:
        import jax

        margin_P = self.margin(pairs)
        right_P = (1 - self.label_smoothing) * jax.nn.log_sigmoid(margin_P)
        swapped_P = self.label_smoothing * jax.nn.log_sigmoid(-margin_P)
        return (swapped_P - right_P) / (1 - 2 * self.label_smoothing)


class _Mean(WithSft):
    beta: Annotated[PositiveFloat, with_examples(0.1)] = 0.1
    """For simpo, scale of the rewards; for orpo, weight of the odds-ratio loss."""

    def rewards(self, pairs: "PairSums") -> Any:
        return self.beta * pairs.mean_logps_P2


class Simpo(_Mean, _Smoothed):
    """Sigmoid loss of the margin of mean log-probabilities per token, without a reference model.

    Source: SimPO, arXiv:2405.14734, equation 6.
    """

    type: Literal["simpo"] = "simpo"
    gamma: Annotated[NonNegativeFloat, with_examples(0.5)] = 0.5
    """Target margin between the rewards of chosen and rejected."""

    def losses(self, pairs: "PairSums") -> Any:
        return self.smooth(self.margin(pairs) - self.gamma)


class Orpo(_Mean):
    """SFT loss of the chosen answer plus a sigmoid loss of the odds ratio, without a reference.

    Source: ORPO, arXiv:2403.07691, equations 6 and 7. Differs: TRL's SFT term includes the tokens
        of prompts.
    """

    type: Literal["orpo"] = "orpo"
    sft_weight: Annotated[NonNegativeFloat, with_examples(1.0)] = 1.0
    """Factor of the mean loss of the chosen answers' tokens."""

    def losses(self, pairs: "PairSums") -> Any:
        import jax
        import jax.numpy as jnp

        logps_P2 = jnp.where(pairs.is_real_P[:, None], pairs.mean_logps_P2, -1)
        logps_P2 = jnp.minimum(logps_P2, -1e-6)  # the odds of probability 1 are infinite
        # log(1 - exp(logps)), exact near 0 and far from it
        is_near_0 = logps_P2 > -jnp.log(2.0)
        near = jnp.where(is_near_0, logps_P2, -1)
        far = jnp.where(is_near_0, -1, logps_P2)
        complement = jnp.where(is_near_0, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))
        log_odds_P2 = logps_P2 - complement
        return -self.beta * jax.nn.log_sigmoid(log_odds_P2[:, 0] - log_odds_P2[:, 1])


class Reward(PairObjective):
    """Reward model with a scalar head (Bradley-Terry). Source: arXiv:2203.02155, equation 1."""

    type: Literal["reward"] = "reward"
    center_rewards_coefficient: Annotated[NonNegativeFloat, with_examples(0.01)] = 0.0
    """Factor of the squared sum of both rewards of a pair (arXiv:2312.09244, appendix A.3)."""

    def losses(self, pairs: "PairSums") -> Any:
        import jax

        losses_P = -jax.nn.log_sigmoid(self.margin(pairs))
        return losses_P + self.center_rewards_coefficient * pairs.logps_P2.sum(1) ** 2

    def rewards(self, pairs: "PairSums") -> Any:
        return pairs.logps_P2


class Kto(Relative):
    """KTO loss of answers labeled desirable or undesirable, relative to an estimate of
    the KL divergence from the reference model.

    The reference point is the mean log-ratio of the mismatched documents (a prompt and the answer
    to another one) over the whole step, at least 0; it has no gradient.

    Source: KTO, arXiv:2402.01306, equations 7 and 8, and TRL 1.16's KTOTrainer. Differs: TRL takes
        the mean over a device batch and over the devices.
    """

    type: Literal["kto"] = "kto"
    desirable_weight: Annotated[NonNegativeFloat, with_examples(1.0)] = 1.0
    """Factor of the losses of desirable records."""
    undesirable_weight: Annotated[NonNegativeFloat, with_examples(1.33)] = 1.0
    """Factor of the losses of undesirable records."""
    format: ClassVar[str | None] = "unpaired"
    needs_step: ClassVar[bool] = True

    def losses(self, pairs: "PairSums") -> Any:
        import jax
        import jax.numpy as jnp

        point = jax.lax.stop_gradient(self._find_reference_point(pairs))
        sign_P = jnp.where(pairs.is_desirable_P, 1.0, -1.0)
        weight_P = jnp.where(pairs.is_desirable_P, self.desirable_weight, self.undesirable_weight)
        value_P = jax.nn.sigmoid(self.beta * sign_P * (pairs.ratios_P2[:, 0] - point))
        return weight_P * (1 - value_P)

    def measure(self, pairs: "PairSums") -> dict[str, Any]:
        num_pairs = pairs.is_real_P.sum(dtype="float32")
        return {"kl_sum": self._find_reference_point(pairs) * num_pairs}

    def _find_reference_point(self, pairs: "PairSums") -> Any:
        """Mean log-ratio of the mismatched documents, float32, at least 0."""
        import jax.numpy as jnp

        num_pairs = jnp.maximum(pairs.is_real_P.sum(), 1).astype(jnp.float32)
        ratios_P = jnp.where(pairs.is_real_P, pairs.ratios_P2[:, 1], 0)
        return jnp.maximum(ratios_P.sum() / num_pairs, 0)
