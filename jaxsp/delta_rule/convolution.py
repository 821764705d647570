"""Causal convolution over the tokens of each segment, on rows that devices share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

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
    # Otherwise the backward pass keeps float32 arrays of all tokens, several times
    filtered = jax.checkpoint(_filter)(padded, filters_XW, segments.age_Bl.reshape(shape))
    return filtered.reshape(B, l, X)


def convolve_token(
    before_BtX: Float[Array, "B t X"], x_B1X: Float[Array, "B 1 X"], filters_XW: Float[Array, "X W"]
) -> tuple[Float[Array, "B 1 X"], Float[Array, "B t X"]]:
    """Convolution of the next token of each row, and the tokens before the one after it.

    Args: before_BtX: the W - 1 tokens before; 0 before the row.
    """
    padded = jnp.concatenate([before_BtX, x_B1X], axis=1)
    age = jnp.full((len(x_B1X), 1, 1), filters_XW.shape[1], jnp.int32)
    return _filter(padded[:, None], filters_XW, age)[:, 0], padded[:, 1:]


def _filter(
    padded: Float[Array, "B n t X"], filters_XW: Float[Array, "X W"], age: Int32[Array, "B n s"]
) -> Float[Array, "B n s X"]:
    """The convolution of n spans of s tokens, each after the W - 1 before it."""
    W = filters_XW.shape[1]
    out = jnp.zeros((*age.shape, padded.shape[-1]), jnp.float32)
    for back in range(W):
        first = W - 1 - back
        tokens = padded[:, :, first : first + age.shape[-1]].astype(jnp.float32)
        # In float32 and broadcast, so that the filters' gradients are summed over tokens in float32
        tap_X = filters_XW[:, first].astype(jnp.float32)
        out += jnp.where((age >= back)[..., None], tokens * jnp.broadcast_to(tap_X, out.shape), 0)
    rounded = out.astype(padded.dtype).astype(jnp.float32)
    return jax.nn.silu(rounded).astype(padded.dtype)
