"""Decisions of a router: the experts of each token, and their weights.

Dims: T tokens, E experts, K experts of a token, D model.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def route(
    x_TD: Float[Array, "T D"],
    router_ED: Float32[Array, "E D"],
    *,
    num_chosen: int,
    is_normalized: bool,
) -> tuple[Float32[Array, "T K"], Int32[Array, "T K"]]:
    """Weights and numbers of each token's experts, those with the highest probabilities first.

    Precision: float32. Where two logits differ by less than their rounding errors, meshes or
        programs may choose another expert. Of equal ones the lowest number is chosen.

    Args: is_normalized: True if the weights of a token are divided by their sum.
    """
    logits_TE = jnp.einsum(
        "TD,ED->TE", x_TD.astype(jnp.float32), router_ED, precision=jax.lax.Precision.HIGHEST
    )
    weights_TK, experts_TK = jax.lax.top_k(jax.nn.softmax(logits_TE, axis=-1), num_chosen)
    if is_normalized:
        weights_TK /= jnp.sum(weights_TK, axis=-1, keepdims=True)
    return weights_TK, experts_TK.astype(jnp.int32)
