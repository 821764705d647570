"""Objectives of pairs, a chosen and a rejected answer to one prompt, and of unpaired answers.

Their losses are functions of sums over the tokens of documents. The sums are taken over the mesh in
the forward pass. The derivative of the loss by a document's log-probability is the weight of its
tokens in the backward pass, so that no collective is ever differentiated, and an objective is a
function of a few numbers for each pair.

Names, signs and defaults are those of TRL 1.16 (DPOTrainer; CPOTrainer for SimPO, which adds the
SFT term by default, unlike the paper; ORPOTrainer; RewardTrainer).

Dims: P pairs of documents, of which not all may be real; 2 documents: chosen and rejected, or the
answer and the mismatched one of an unpaired record.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jaxsp.config.fields import NonNegativeFloat, PositiveFloat, with_examples
from jaxsp.objectives.objective import Objective

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSums:
    """Sums over the documents of pairs, float32. All are 0 for pairs that are not real."""

    logps_P2: "Array"
    """Log-probability of each document's loss tokens by the trained model."""
    references_P2: "Array"
    """The same by the reference model."""
    counts_P2: "Array"
    """Number of each document's loss tokens."""
    is_real_P: "Array"
    is_desirable_P: "Array"
    """Label of unpaired records."""
    num_pairs: "Array"
    """Number of pairs of the whole step."""
    num_first_tokens: "Array"
    """Number of loss tokens of the first documents of all pairs of the step."""

    @property
    def ratios_P2(self) -> "Array":
        """Log-ratio of each document's probability by the trained and the reference model."""
        return self.logps_P2 - self.references_P2

    @property
    def mean_logps_P2(self) -> "Array":
        """Log-probability of each document per loss token."""
        return self.logps_P2 / self.counts_P2.clip(1)


class PairObjective(Objective, abc.ABC):
    """Objective of pairs of documents, whose losses and rewards are functions inside jit."""

    format: ClassVar[str | None] = "preference"
    has_pairs: ClassVar[bool] = True

    @abc.abstractmethod
    def losses(self, pairs: PairSums) -> Any:
        """Loss of each pair, float32[P], without the SFT term."""

    @abc.abstractmethod
    def rewards(self, pairs: PairSums) -> Any:
        """Implicit reward of each document, float32[P, 2], for metrics."""

    def margin(self, pairs: PairSums) -> Any:
        """Difference of the implicit rewards, float32[P]."""
        rewards_P2 = self.rewards(pairs)
        return rewards_P2[:, 0] - rewards_P2[:, 1]

    def measure(self, pairs: PairSums) -> dict[str, Any]:
        """Sums for metrics that only this objective has."""
        return {}

    def find_divisor(self, counts: Mapping[str, Any]) -> Any:
        return counts["num_pairs"]

    def compute_losses(self, pairs: PairSums) -> Any:
        """Loss of each pair, float32[P], 0 if it is not real; the step's loss is their mean."""
        import jax.numpy as jnp

        return jnp.where(pairs.is_real_P, self.losses(pairs), 0)

    def differentiate(self, pairs: PairSums) -> tuple[Any, Any]:
        """Losses of pairs, and the derivative of their sum by the log-probability of each
        document."""
        import jax
        import jax.numpy as jnp

        def compute(logps_P2: "Array") -> "Array":
            return self.compute_losses(dataclasses.replace(pairs, logps_P2=logps_P2))

        losses_P, pull = jax.vjp(compute, pairs.logps_P2)
        return losses_P, pull(jnp.ones_like(losses_P))[0]

    def sum_metrics(self, pairs: PairSums, losses_P: Any) -> dict[str, Any]:
        """Sums over pairs, of which `metric_table` makes metrics.

        Unpaired records are chosen if they are desirable, and otherwise rejected.
        """
        import jax.numpy as jnp

        rewards_P2 = self.rewards(pairs)
        first_P, second_P = jnp.moveaxis(jnp.stack([rewards_P2, pairs.logps_P2]), 2, 0)
        sums = {"loss_sum": losses_P.sum()} | self.measure(pairs)
        is_chosen_P = pairs.is_real_P
        is_rejected_P = pairs.is_real_P
        if self.format == "unpaired":
            is_chosen_P &= pairs.is_desirable_P
            is_rejected_P &= ~pairs.is_desirable_P
            second_P = first_P
        else:
            # relative to a reference, all margins are rounding errors before the first update
            scale = 1e-6 * self.beta if isinstance(self, Relative) else 0.0
            tolerance_P = scale * jnp.abs(pairs.logps_P2).sum(1)
            is_right_P = pairs.is_real_P & (self.margin(pairs) > tolerance_P)
            sums["num_pairs_right"] = is_right_P.sum(dtype=jnp.int32)
        sums["num_both"] = jnp.minimum(is_chosen_P.sum(), is_rejected_P.sum()).astype(jnp.int32)
        for name, is_used_P, used_P in (
            ("chosen", is_chosen_P, first_P),
            ("rejected", is_rejected_P, second_P),
        ):
            reward_sum, logp_sum = jnp.where(is_used_P[None], used_P, 0).sum(-1)
            sums |= {
                f"num_{name}": is_used_P.sum(dtype=jnp.int32),
                f"{name}_reward_sum": reward_sum,
                f"{name}_logp_sum": logp_sum,
            }
        return sums


class Relative(PairObjective):
    """Objective with a reference model, whose rewards are log-ratios to it."""

    needs_reference: ClassVar[bool] = True
    beta: Annotated[PositiveFloat, with_examples(0.1)] = 0.1
    """Strength of the regularization toward the reference model; for ipo, the paper's tau."""

    def rewards(self, pairs: PairSums) -> Any:
        return self.beta * pairs.ratios_P2


class WithSft(PairObjective):
    """Objective whose loss can have the loss of chosen answers added."""

    sft_weight: Annotated[NonNegativeFloat, with_examples(0.1)] = 0.0
    """Factor of the mean loss of the chosen answers' tokens, which is added to the loss."""

    def compute_losses(self, pairs: PairSums) -> Any:
        import jax.numpy as jnp

        if not self.sft_weight:
            return super().compute_losses(pairs)
        # so that the mean over pairs is the mean over all tokens of chosen answers
        factor = self.sft_weight * pairs.num_pairs / jnp.maximum(pairs.num_first_tokens, 1)
        losses_P = self.losses(pairs) - factor * pairs.logps_P2[:, 0]
        return jnp.where(pairs.is_real_P, losses_P, 0)


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

    def losses(self, pairs: PairSums) -> Any:
        return self.smooth(self.margin(pairs))


class Hinge(WithSft, Relative):
    """Hinge loss of the same margin as dpo. Source: SLiC, arXiv:2305.10425."""

    type: Literal["hinge"] = "hinge"

    def losses(self, pairs: PairSums) -> Any:
        import jax

        return jax.nn.relu(1 - self.margin(pairs))


class Ipo(WithSft, Relative):
    """Squared distance of the margin of per-token log-ratios from 1 / (2 beta).

    Source: IPO, arXiv:2310.12036, equation 17.
    """

    type: Literal["ipo"] = "ipo"

    def losses(self, pairs: PairSums) -> Any:
        ratios_P2 = pairs.ratios_P2 / pairs.counts_P2.clip(1)
        return (ratios_P2[:, 0] - ratios_P2[:, 1] - 1 / (2 * self.beta)) ** 2


class Robust(_Smoothed, WithSft, Relative):
    """DPO loss corrected for a known rate of swapped labels (label_smoothing).

    Source: arXiv:2403.00409, equation 4.
    """

    type: Literal["robust"] = "robust"

    def losses(self, pairs: PairSums) -> Any:
        import jax

        margin_P = self.margin(pairs)
        right_P = (1 - self.label_smoothing) * jax.nn.log_sigmoid(margin_P)
        swapped_P = self.label_smoothing * jax.nn.log_sigmoid(-margin_P)
        return (swapped_P - right_P) / (1 - 2 * self.label_smoothing)


class _Mean(WithSft):
    beta: Annotated[PositiveFloat, with_examples(0.1)] = 0.1
    """For simpo, scale of the rewards; for orpo, weight of the odds-ratio loss."""

    def rewards(self, pairs: PairSums) -> Any:
        return self.beta * pairs.mean_logps_P2


class Simpo(_Mean, _Smoothed):
    """Sigmoid loss of the margin of mean log-probabilities per token, without a reference model.

    Source: SimPO, arXiv:2405.14734, equation 6.
    """

    type: Literal["simpo"] = "simpo"
    gamma: Annotated[NonNegativeFloat, with_examples(0.5)] = 0.5
    """Target margin between the rewards of chosen and rejected."""

    def losses(self, pairs: PairSums) -> Any:
        return self.smooth(self.margin(pairs) - self.gamma)


class Orpo(_Mean):
    """SFT loss of the chosen answer plus a sigmoid loss of the odds ratio, without a reference.

    Source: ORPO, arXiv:2403.07691, equations 6 and 7. Differs: TRL's SFT term includes the tokens
        of prompts.
    """

    type: Literal["orpo"] = "orpo"
    sft_weight: Annotated[NonNegativeFloat, with_examples(1.0)] = 1.0
    """Factor of the mean loss of the chosen answers' tokens."""

    def losses(self, pairs: PairSums) -> Any:
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

    def losses(self, pairs: PairSums) -> Any:
        import jax

        losses_P = -jax.nn.log_sigmoid(self.margin(pairs))
        return losses_P + self.center_rewards_coefficient * pairs.logps_P2.sum(1) ** 2

    def rewards(self, pairs: PairSums) -> Any:
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

    def losses(self, pairs: PairSums) -> Any:
        import jax
        import jax.numpy as jnp

        point = jax.lax.stop_gradient(self._find_reference_point(pairs))
        sign_P = jnp.where(pairs.is_desirable_P, 1.0, -1.0)
        weight_P = jnp.where(pairs.is_desirable_P, self.desirable_weight, self.undesirable_weight)
        value_P = jax.nn.sigmoid(self.beta * sign_P * (pairs.ratios_P2[:, 0] - point))
        return weight_P * (1 - value_P)

    def measure(self, pairs: PairSums) -> dict[str, Any]:
        num_pairs = pairs.is_real_P.sum(dtype="float32")
        return {"kl_sum": self._find_reference_point(pairs) * num_pairs}

    def _find_reference_point(self, pairs: PairSums) -> Any:
        """Mean log-ratio of the mismatched documents, float32, at least 0."""
        num_pairs = pairs.is_real_P.sum().clip(1).astype("float32")
        return (pairs.ratios_P2[:, 1].sum() / num_pairs).clip(0)
