"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon (iterations and momentum); Liu et al.
2025, arXiv:2502.16982, section 2.2: the update is multiplied by 0.2 * sqrt(max(rows, columns)), so
that it is as large as AdamW's and takes AdamW's learning rate and weight decay.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxsp.blocks.layers import Parameter

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a, a^3 and a^5, for a singular value a; five iterations bring singular values
near 1."""

_NUM_ITERATIONS = 5
_EPS = 1e-8  # number added to the norm of a matrix
_RMS = 0.2  # root mean square of an update's elements, as of AdamW's in practice


class MomentumState(NamedTuple):
    """State of a matrix."""

    count: Any
    """Number of updates."""
    mu: Any
    """Average gradient."""


def scale_by_momentum(beta: float) -> optax.GradientTransformation:
    """Nesterov momentum with bias correction, the part of Muon that needs no whole matrices."""

    def init(params: Any) -> MomentumState:
        return MomentumState(count=jnp.int32(0), mu=optax.tree.zeros_like(params))

    def update(updates: Any, state: MomentumState, params: Any = None) -> tuple[Any, MomentumState]:
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        own = optax.tree.bias_correction(updates, beta, count)
        direction = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, own)
        return direction, MomentumState(count=count, mu=mu)

    return optax.GradientTransformation(init, update)


def orthogonalize(param: Parameter, matrices: Float[Array, "n o i"]) -> Float[Array, "n o i"]:
    """Updates of whole matrices of a weight, from their momenta, computed in their dtype.
    Zero rows and columns, such as padding, stay zero."""
    dtype = matrices.dtype
    is_tall = param.matrix_shape[0] > param.matrix_shape[1]
    x32 = matrices.astype(jnp.float32)
    norms = jnp.sqrt(jnp.sum(x32 * x32, axis=(1, 2), keepdims=True))
    x = (x32 / (norms + _EPS)).astype(dtype)
    if is_tall:
        x = x.mT
    a, b, c = (jnp.asarray(number, dtype) for number in _COEFFICIENTS)

    def iterate(_: Array, x: Array) -> Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    # GPUs would multiply float32 matrices in TF32, with 10 bits of mantissa
    with jax.default_matmul_precision("float32" if dtype == jnp.float32 else None):
        x = jax.lax.fori_loop(0, _NUM_ITERATIONS, iterate, x)
    scale = jnp.asarray(_RMS * max(param.matrix_shape) ** 0.5, dtype)
    return scale * (x.mT if is_tall else x)
