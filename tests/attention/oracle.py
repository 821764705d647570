"""Attention that materializes the whole score matrix: the slow and obvious oracle of tests."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxsp.attention.kernels import segments


def attention(
    q_BLhK: Float[Array, "B L h K"],
    k_BLgK: Float[Array, "B L g K"],
    v_BLgK: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    window: int | None = None,
) -> Float[Array, "B L h K"]:
    """Causal softmax attention inside each segment, in float32; the output is undefined at padding.

    Units: memory and time grow with L * L.
    Args:
        window: a token attends to itself and the window - 1 tokens before it; None: no limit.
    """
    B, L, h, K = q_BLhK.shape
    g = k_BLgK.shape[2]
    window = L if window is None else window
    segment_BL = segments.segment_ids(starts_BM, lengths_BM, L)
    distance_LL = jnp.arange(L)[:, None] - jnp.arange(L)[None, :]
    near_LL = (distance_LL >= 0) & (distance_LL < window)
    mask_BLL = (segment_BL[:, :, None] == segment_BL[:, None, :]) & near_LL[None]
    q_BLgrK = q_BLhK.reshape(B, L, g, h // g, K).astype(jnp.float32)
    k_BLgK = k_BLgK.astype(jnp.float32)
    v_BLgK = v_BLgK.astype(jnp.float32)
    scores = jnp.einsum("BqgrK,BkgK->Bgrqk", q_BLgrK, k_BLgK, precision="highest") * K**-0.5
    weights = jax.nn.softmax(jnp.where(mask_BLL[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("Bgrqk,BkgK->BqgrK", weights, v_BLgK, precision="highest")
    return out.reshape(B, L, h, K).astype(q_BLhK.dtype)
