"""Losses of pairs: a chosen and a rejected answer to one prompt.

Names, signs and defaults are those of TRL 1.16 (DPOTrainer; CPOTrainer for SimPO; ORPOTrainer;
RewardTrainer).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxsp.config.objective_schema import ObjectiveConfig
from jaxsp.objectives.objective import PairSums

Losses = Float32[Array, "P"]
Rewards = Float32[Array, "P 2"]


def compute_dpo(config: ObjectiveConfig, pairs: PairSums) -> Losses:
    """Sigmoid loss of the margin. Source: DPO, arXiv:2305.18290, equation 7; with label smoothing
    conservative DPO, Mitchell 2023."""
    return _smooth_sigmoid_loss(config, _dpo_margin(config, pairs))


def compute_hinge(config: ObjectiveConfig, pairs: PairSums) -> Losses:
    """Hinge loss of the margin. Source: SLiC, arXiv:2305.10425, on DPO's margin."""
    return jax.nn.relu(1 - _dpo_margin(config, pairs))


def compute_ipo(config: ObjectiveConfig, pairs: PairSums) -> Losses:
    """Squared loss of the log-ratios per token. Source: IPO, arXiv:2310.12036, equation 17."""
    ratios_P2 = pairs.ratios_P2 / jnp.maximum(pairs.counts_P2, 1)
    return (ratios_P2[:, 0] - ratios_P2[:, 1] - 1 / (2 * config.value("beta"))) ** 2


def compute_robust(config: ObjectiveConfig, pairs: PairSums) -> Losses:
    """DPO without the bias of swapped labels. Source: arXiv:2403.00409, equation 4."""
    margin_P = _dpo_margin(config, pairs)
    smoothing = config.value("label_smoothing")
    right_P = (1 - smoothing) * jax.nn.log_sigmoid(margin_P)
    swapped_P = smoothing * jax.nn.log_sigmoid(-margin_P)
    return (swapped_P - right_P) / (1 - 2 * smoothing)


def compute_simpo(config: ObjectiveConfig, pairs: PairSums) -> Losses:
    """Sigmoid loss of mean log-probabilities. Source: SimPO, arXiv:2405.14734, equation 6."""
    rewards_P2 = mean_rewards(config, pairs)
    return _smooth_sigmoid_loss(config, rewards_P2[:, 0] - rewards_P2[:, 1] - config.value("gamma"))


def compute_orpo(config: ObjectiveConfig, pairs: PairSums) -> Losses:
    """Sigmoid loss of the odds ratio; the SFT term is part of it (objective.sft_weight).

    Source: ORPO, arXiv:2403.07691, equations 6 and 7. Differs: TRL's SFT term includes the tokens
        of prompts.
    """
    logps_P2 = jnp.where(pairs.is_real_P[:, None], pairs.mean_logps_P2, -1)
    logps_P2 = jnp.minimum(logps_P2, -1e-6)  # the odds of probability 1 are infinite
    log_odds_P2 = logps_P2 - _log_complement(logps_P2)
    log_ratio_P = log_odds_P2[:, 0] - log_odds_P2[:, 1]
    return -config.value("beta") * jax.nn.log_sigmoid(log_ratio_P)


def compute_reward(config: ObjectiveConfig, pairs: PairSums) -> Losses:
    """Bradley-Terry loss of scores. Source: arXiv:2203.02155, equation 1; the term that centers
    rewards is that of arXiv:2312.09244, appendix A.3."""
    scores_P2 = pairs.logps_P2
    losses_P = -jax.nn.log_sigmoid(scores_P2[:, 0] - scores_P2[:, 1])
    return losses_P + config.value("center_rewards_coefficient") * scores_P2.sum(1) ** 2


def ratio_rewards(config: ObjectiveConfig, pairs: PairSums) -> Rewards:
    """Implicit rewards of objectives with a reference model."""
    return config.value("beta") * pairs.ratios_P2


def mean_rewards(config: ObjectiveConfig, pairs: PairSums) -> Rewards:
    """Implicit rewards of objectives without a reference model, per token."""
    return config.value("beta") * pairs.mean_logps_P2


def scores(config: ObjectiveConfig, pairs: PairSums) -> Rewards:
    """Scores of a reward model."""
    return pairs.logps_P2


def _dpo_margin(config: ObjectiveConfig, pairs: PairSums) -> Losses:
    """Difference of the implicit rewards."""
    rewards_P2 = ratio_rewards(config, pairs)
    return rewards_P2[:, 0] - rewards_P2[:, 1]


def _smooth_sigmoid_loss(config: ObjectiveConfig, margin_P: Losses) -> Losses:
    smoothing = config.value("label_smoothing")
    right_P = (1 - smoothing) * jax.nn.log_sigmoid(margin_P)
    return -right_P - smoothing * jax.nn.log_sigmoid(-margin_P)


def _log_complement(logps: Array) -> Array:
    """log(1 - exp(logps)), exact near 0 and far from it."""
    is_near_0 = logps > -jnp.log(2.0)
    near = jnp.where(is_near_0, logps, -1)
    far = jnp.where(is_near_0, -1, logps)
    return jnp.where(is_near_0, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))
