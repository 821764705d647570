"""Products of activations with a frozen matrix and the adapter beside it, as one product.

    y  = x W^T + s (x A^T) B^T
    dx = dy W + s (dy B) A

The second terms are little arithmetic, but each reads and writes an array as large as the first. So
the wider side of a matrix is multiplied once: x and s x A^T beside each other with W and B beside
each other, and the same for dx. Beside each other is a copy of the narrower side.

Dims: T tokens, i and o of the matrix, r rank of the adapter.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxsp.blocks import layers

_MIN_RATIO = 2
"""Minimum ratio of the sides of a matrix for which the copy pays."""

_RANK_MULTIPLE = 8
"""Divisor of ranks that GPUs multiply fast beside the matrix."""


def is_faster(x: Float[Array, "... i"], weight_oi: Float[Array, "o i"], rank: int) -> bool:
    """True if one product is faster: for gate, up and down of most models and many tokens."""
    narrow, wide = sorted(weight_oi.shape)
    num_tokens = math.prod(x.shape[:-1])
    # The copy of the matrix is small beside the activations
    return rank % _RANK_MULTIPLE == 0 and wide >= _MIN_RATIO * narrow and 2 * num_tokens >= wide


def multiply(
    x: Float[Array, "... i"],
    weight_oi: Float[Array, "o i"],
    a_ri: Float[Array, "r i"],
    b_or: Float[Array, "o r"],
    scale: float,
) -> Float[Array, "... o"]:
    """x W^T + scale * (x A^T) B^T in the dtype of x; gradients of A and B have their dtypes.

    Precision: like the frozen product's; intermediate values of dim r are in the dtype of x.
    """
    product = _multiply(x, weight_oi, a_ri, b_or, scale)
    return checkpoint_name(product, layers.PRODUCT_NAME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _multiply(x: Array, weight_oi: Array, a_ri: Array, b_or: Array, scale: float) -> Array:
    return _forward(x, weight_oi, a_ri, b_or, scale)[0]


def _forward(
    x: Array, weight_oi: Array, a_ri: Array, b_or: Array, scale: float
) -> tuple[Array, tuple[Array, ...]]:
    dtype = x.dtype
    reduced = layers.scale(jnp.einsum("...i,ri->...r", x, a_ri.astype(dtype)), scale)
    o, i = weight_oi.shape
    if o > i:
        joined = jnp.concatenate([x, reduced], axis=-1)
        y = jnp.einsum("...i,oi->...o", joined, _beside(weight_oi, b_or, dtype))
    else:
        y = jnp.einsum("...i,oi->...o", x, weight_oi.astype(dtype))
        y = y + jnp.einsum("...r,or->...o", reduced, b_or.astype(dtype))
    return y, (x, weight_oi, a_ri, b_or, reduced)


def _backward(
    scale: float, residuals: tuple[Array, ...], dy: Array
) -> tuple[Array, Array, Array, Array]:
    x, weight_oi, a_ri, b_or, reduced = residuals
    dtype = x.dtype
    o, i = weight_oi.shape
    if o > i:
        joined = jnp.einsum("...o,oi->...i", dy, _beside(weight_oi, b_or, dtype))
        dreduced = layers.scale(joined[..., i:], scale)
        dx = joined[..., :i] + jnp.einsum("...r,ri->...i", dreduced, a_ri.astype(dtype))
    else:
        dreduced = layers.scale(jnp.einsum("...o,or->...r", dy, b_or.astype(dtype)), scale)
        joined = jnp.concatenate([dy, dreduced], axis=-1)
        below = jnp.concatenate([weight_oi.astype(dtype), a_ri.astype(dtype)])
        dx = jnp.einsum("...o,oi->...i", joined, below)
    return (
        dx,
        jnp.einsum("...o,...i->oi", dy, x, preferred_element_type=weight_oi.dtype),
        jnp.einsum("...r,...i->ri", dreduced, x, preferred_element_type=a_ri.dtype),
        jnp.einsum("...o,...r->or", dy, reduced, preferred_element_type=b_or.dtype),
    )


_multiply.defvjp(_forward, _backward)


def _beside(weight_oi: Array, b_or: Array, dtype: jnp.dtype) -> Array:
    return jnp.concatenate([weight_oi.astype(dtype), b_or.astype(dtype)], axis=1)
