"""Attention of one new token of each row to cached keys, which the devices of a group share.

Each device attends to the keys that it holds. The parts are joined by their softmax statistics:
one maximum and one sum over `seq`, of arrays with one token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.core import axes

SCOPE = "attend_to_cache"


class CachedKeys(NamedTuple):
    """Keys and values on one device."""

    k_BlGK: Float[Array, "B l G K"]
    v_BlGK: Float[Array, "B l G K"]
    positions_Bl: Int32[Array, "B l"]
    """Position of each key in its document; -1: there is no key."""


def attend_to_cache(
    q_BHK: Float[Array, "B H K"],
    keys: Sequence[CachedKeys],
    *,
    positions_B: Int32[Array, "B"],
    window: Int32[Array, ""],
    score: ScoreConfig,
    sinks_H: Float[Array, "H"] | None = None,
) -> Float[Array, "B H K"]:
    """Output of the new tokens, the same on all devices of a group; inside shard_map.

    Args:
        keys: keys of this device in several arrays. Each key is on one device of the group, also
            that of the new token.
        positions_B: positions of the new tokens.
        window: number of tokens that a token sees, including itself.
        score: its window does not count.
        sinks_H: see `Attend`.
    Precision: scores and sums are float32.
    """
    B, H, K = q_BHK.shape
    G = keys[0].k_BlGK.shape[2]
    with jax.named_scope(SCOPE):
        q_BGRK = q_BHK.reshape(B, G, H // G, K)
        scores = []
        for k_BlGK, _, key_positions_Bl in keys:
            products = jnp.einsum(
                "BGRK,BlGK->BGRl", q_BGRK, k_BlGK, preferred_element_type=jnp.float32
            )
            scores_BGRl = products * score.find_scale(K)
            if score.softcap is not None:
                scores_BGRl = score.softcap * jnp.tanh(scores_BGRl / score.softcap)
            distance_Bl = positions_B[:, None] - key_positions_Bl
            is_seen_Bl = (key_positions_Bl >= 0) & (distance_Bl >= 0) & (distance_Bl < window)
            scores.append(jnp.where(is_seen_Bl[:, None, None], scores_BGRl, -jnp.inf))
        largest_BGR = jnp.concatenate(scores, axis=-1).max(-1)
        largest_BGR = jax.lax.pmax(largest_BGR, axes.SEQ)
        sinks_GR = None if sinks_H is None else sinks_H.astype(jnp.float32).reshape(G, -1)
        if sinks_GR is not None:
            largest_BGR = jnp.maximum(largest_BGR, sinks_GR[None])
        total_BGR = jnp.zeros_like(largest_BGR)
        out_BGRK = jnp.zeros(q_BGRK.shape, jnp.float32)
        for part, scores_BGRl in zip(keys, scores, strict=True):
            weights_BGRl = jnp.exp(scores_BGRl - largest_BGR[..., None])
            total_BGR += weights_BGRl.sum(-1)
            out_BGRK += jnp.einsum(
                "BGRl,BlGK->BGRK",
                weights_BGRl.astype(part.v_BlGK.dtype),
                part.v_BlGK,
                preferred_element_type=jnp.float32,
            )
        total_BGR, out_BGRK = jax.lax.psum((total_BGR, out_BGRK), axes.SEQ)
        if sinks_GR is not None:
            total_BGR += jnp.exp(sinks_GR[None] - largest_BGR)
        return (out_BGRK / total_BGR[..., None]).astype(q_BHK.dtype).reshape(B, H, K)
