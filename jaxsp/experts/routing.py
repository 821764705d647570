"""Decisions of a router: the experts of each token, and their weights.

Dims: T tokens, E experts, K experts of a token, D model.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

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
