"""Decisions of a router: the experts of each token, their weights, and losses that balance them.

Dims: T tokens, E experts, K experts of a token, D model.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.core import axes

_MIN_SUM = 1e-20
"""Added to the sum of a token's sigmoids, which may all be 0."""


def compute_logits(
    x_TD: Float[Array, "T D"],
    router_ED: Float32[Array, "E D"],
    bias_E: Float32[Array, "E"] | None = None,
) -> Float32[Array, "T E"]:
    """Logits of all experts. Precision: float32. Args: bias_E: added to the logits."""
    logits_TE = jnp.einsum(
        "TD,ED->TE", x_TD.astype(jnp.float32), router_ED, precision=jax.lax.Precision.HIGHEST
    )
    if bias_E is None:
        return logits_TE
    # Broadcast, so that the gradient is summed over tokens in float32
    return logits_TE + jnp.broadcast_to(bias_E, logits_TE.shape)


def route(
    logits_TE: Float32[Array, "T E"],
    *,
    num_chosen: int,
    is_normalized: bool,
    correction_E: Float32[Array, "E"] | None = None,
    is_sigmoid: bool = False,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Float32[Array, "T K"], Int32[Array, "T K"]]:
    """Weights and numbers of each token's experts, those with the highest scores first.

    Precision: float32. Where two logits differ by less than their rounding errors, meshes or
        programs may choose another expert. Of equal ones the lowest number is chosen.

    Args:
        is_normalized: True if the weights of a token are divided by their sum.
        correction_E: added to the scores for the choice, but not for the weights; it gets no
            gradient.
        is_sigmoid: True if scores are sigmoids of the logits, else their softmax.
        num_groups, num_chosen_groups: see `ExpertsConfig`.
        scale: factor on the weights.
    """
    scores_TE = jax.nn.sigmoid(logits_TE) if is_sigmoid else jax.nn.softmax(logits_TE, axis=-1)
    if correction_E is None and num_groups == 1:
        weights_TK, experts_TK = jax.lax.top_k(scores_TE, num_chosen)
    else:
        choice_TE = jax.lax.stop_gradient(scores_TE)
        if correction_E is not None:
            choice_TE += jnp.broadcast_to(jax.lax.stop_gradient(correction_E), choice_TE.shape)
        if num_groups != num_chosen_groups:
            # -inf in all but the groups with the largest sums of two scores
            choice_TGX = choice_TE.reshape(len(choice_TE), num_groups, -1)
            sums_TG = jnp.sum(jax.lax.top_k(choice_TGX, 2)[0], axis=-1)
            _, chosen_TC = jax.lax.top_k(sums_TG, num_chosen_groups)
            is_kept_TG = jnp.any(jax.nn.one_hot(chosen_TC, num_groups, dtype=jnp.bool), axis=1)
            choice_TGX = jnp.where(is_kept_TG[..., None], choice_TGX, -jnp.inf)
            choice_TE = choice_TGX.reshape(choice_TE.shape)
        _, experts_TK = jax.lax.top_k(choice_TE, num_chosen)
        weights_TK = jnp.take_along_axis(scores_TE, experts_TK, axis=-1)
    if is_normalized:
        sum_T1 = jnp.sum(weights_TK, axis=-1, keepdims=True)
        weights_TK /= sum_T1 + _MIN_SUM if is_sigmoid else sum_T1
    if scale != 1:
        weights_TK *= scale
    return weights_TK, experts_TK.astype(jnp.int32)


def measure(logits_TE: Float32[Array, "T E"], experts_TK: Int32[Array, "T K"]) -> dict[str, Array]:
    """Statistics of each token, float32.

    Returns: `chosen`, 1 for its experts, and `probabilities`, [T, E]; `squared_lse`, the square of
        log(sum(exp(logits))), and `entropy` of the probabilities divided by log(E), [T].
    """
    num_experts = logits_TE.shape[1]
    log_probabilities_TE = jax.nn.log_softmax(logits_TE, axis=-1)
    probabilities_TE = jnp.exp(log_probabilities_TE)
    one_hot_TKE = jax.nn.one_hot(experts_TK, num_experts, dtype=jnp.float32)
    entropy_T = -jnp.sum(probabilities_TE * log_probabilities_TE, axis=-1)
    return {
        "chosen": jnp.sum(one_hot_TKE, axis=1),
        "probabilities": probabilities_TE,
        "squared_lse": jax.nn.logsumexp(logits_TE, axis=-1) ** 2,
        "entropy": jax.lax.stop_gradient(entropy_T) / jnp.log(max(num_experts, 2)),
    }


def sum_over_rows(
    statistics: dict[str, Array], lengths_BM: Int32[Array, "B M"]
) -> dict[str, Array]:
    """Sums over this device's part of a microbatch, inside shard_map.

    Args:
        statistics: those of `measure`, summed over this device's tokens of each row, [N, B, ...].
        lengths_BM: lengths of the rows' segments, on all devices.
    Returns: `router_aux_loss_sum` and `router_z_loss_sum`, which have gradients, and
        `router_entropy_sum`: sums over rows of means over tokens and layers; and
        `router_counts_NE`: number of tokens that chose each expert, int32.

    The auxiliary loss of a row is E * sum_e(f_e * p_e), where f_e is the mean number of tokens that
    chose an expert and p_e its mean probability, over all tokens and layers: K if it is even.
    Source: `load_balancing_loss_func` of transformers, for a batch of one row; Switch Transformers,
    equations 4 to 6 (arXiv 2101.03961). The z-loss is equation 5 of ST-MoE (arXiv 2202.08906), as a
    mean over layers.
    """
    chosen_NBE = jax.lax.stop_gradient(statistics["chosen"])
    num_layers, _, num_experts = chosen_NBE.shape
    divisor_B = num_layers * jnp.maximum(lengths_BM.sum(-1), 1).astype(jnp.float32)
    mean = lambda name: jnp.sum(statistics[name], axis=0) / divisor_B
    # Counts have no gradient, so that their sum over devices adds none
    row_chosen_BE = jax.lax.psum(jnp.sum(chosen_NBE, axis=0), axes.SEQ) / divisor_B[:, None]
    probabilities_BE = jnp.sum(statistics["probabilities"], axis=0) / divisor_B[:, None]
    return {
        "router_aux_loss_sum": num_experts * jnp.sum(row_chosen_BE * probabilities_BE),
        "router_z_loss_sum": jnp.sum(mean("squared_lse")),
        "router_entropy_sum": jnp.sum(mean("entropy")),
        "router_counts_NE": jnp.sum(chosen_NBE.astype(jnp.int32), axis=1),
    }
