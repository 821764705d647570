"""Evenness of the choices of routers: its statistics, and the losses that improve it.

The losses are those of each row, so that they do not depend on the mesh: microbatches have other
rows on other meshes. Padding does not count.

Dims: T tokens, E experts, K experts of a token, N layers with experts, B rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxsp.core import axes


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
