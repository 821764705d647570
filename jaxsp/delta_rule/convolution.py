"""Causal convolution over the tokens of each segment, on rows that devices share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsp.delta_rule.spans import OwnSegments, RowSpans


def convolve(
    x_BlX: Float[Array, "B l X"],
    filters_XW: Float[Array, "X W"],
    segments: OwnSegments,
    spans: RowSpans,
) -> Float[Array, "B l X"]:
    """silu of a filter of each channel over a token and the W - 1 before it in its segment.

    Precision: products are summed in float32, and rounded before silu, as in transformers.
    """
    B, l, X = x_BlX.shape
    W = filters_XW.shape[1]
    shape = (B, spans.count, spans.span_tokens)
    halo = spans.halo(x_BlX, size=W - 1)
    padded = jnp.concatenate([halo, x_BlX.reshape(*shape, X)], axis=2)
    age = segments.age_Bl.reshape(shape)
    out = jnp.zeros((*shape, X), jnp.float32)
    for back in range(W):
        first = W - 1 - back
        tokens = padded[:, :, first : first + spans.span_tokens].astype(jnp.float32)
        # In float32 and broadcast, so that the filters' gradients are summed over tokens in float32
        tap_X = filters_XW[:, first].astype(jnp.float32)
        out += jnp.where((age >= back)[..., None], tokens * jnp.broadcast_to(tap_X, out.shape), 0)
    rounded = out.astype(x_BlX.dtype).astype(jnp.float32).reshape(B, l, X)
    return jax.nn.silu(rounded).astype(x_BlX.dtype)
