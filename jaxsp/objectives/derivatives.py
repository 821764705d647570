"""Losses of pairs by an objective, their derivatives, and sums for metrics."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxsp.objectives.objective import PairObjective, Relative, WithSft
from jaxsp.objectives.pair_sums import PairSums


def compute_losses(objective: PairObjective, pairs: PairSums) -> Float32[Array, "P"]:
    """Loss of each pair, 0 if it is not real; the step's loss is their mean."""
    losses_P = objective.losses(pairs)
    if isinstance(objective, WithSft) and objective.sft_weight:
        # so that the mean over pairs is the mean over all tokens of chosen answers
        factor = objective.sft_weight * pairs.num_pairs / jnp.maximum(pairs.num_first_tokens, 1)
        losses_P = losses_P - factor * pairs.logps_P2[:, 0]
    return jnp.where(pairs.is_real_P, losses_P, 0)


def differentiate(
    objective: PairObjective, pairs: PairSums
) -> tuple[Float32[Array, "P"], Float32[Array, "P 2"]]:
    """Losses of pairs, and the derivative of their sum by the log-probability of each document."""

    def compute(logps_P2: Array) -> Array:
        return compute_losses(objective, dataclasses.replace(pairs, logps_P2=logps_P2))

    losses_P, pull = jax.vjp(compute, pairs.logps_P2)
    return losses_P, pull(jnp.ones_like(losses_P))[0]


def measure(
    objective: PairObjective, pairs: PairSums, losses_P: Float32[Array, "P"]
) -> dict[str, Array]:
    """Sums over pairs, of which `metric_table` makes metrics.

    Unpaired records are chosen if they are desirable, and otherwise rejected.
    """
    rewards_P2 = objective.rewards(pairs)
    first_P, second_P = jnp.moveaxis(jnp.stack([rewards_P2, pairs.logps_P2]), 2, 0)
    sums = {"loss_sum": losses_P.sum()} | objective.measure(pairs)
    is_chosen_P = pairs.is_real_P
    is_rejected_P = pairs.is_real_P
    if objective.format == "unpaired":
        is_chosen_P &= pairs.is_desirable_P
        is_rejected_P &= ~pairs.is_desirable_P
        second_P = first_P
    else:
        # relative to a reference, all margins are rounding errors before the first update
        scale = 1e-6 * objective.beta if isinstance(objective, Relative) else 0.0
        tolerance_P = scale * jnp.abs(pairs.logps_P2).sum(1)
        is_right_P = pairs.is_real_P & (rewards_P2[:, 0] - rewards_P2[:, 1] > tolerance_P)
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
