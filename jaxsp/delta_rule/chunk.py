"""The gated delta rule on one chunk of tokens.

Token by token, the state S [K, V] of a head changes by

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    out = S^T q

and is 0 before the first token of a segment. For a chunk of C tokens with incoming state X, this is

    New = U - W X;    out = Q X + A New;    X' = decay X + K^T New

where U, W, Q, A, K and decay do not depend on X. Decays between two tokens of different segments
are exact zeros, so nothing leaks.

Dims: T chunks of different sections at a time, G key heads, R value heads of each, C tokens, K key
size, V value size.

Source: Yang et al. 2024, arXiv:2412.06464 (gated delta networks).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

_INVERTED_BLOCK = 16
"""Size of the blocks that are inverted by whole products."""


class Tokens(NamedTuple):
    """Tokens of a chunk. q and k are normalized, and q is scaled."""

    q: Float32[Array, "T G C K"]
    k: Float32[Array, "T G C K"]
    v: Float32[Array, "T G R C V"]
    g: Float32[Array, "T G R C"]
    """Logarithm of the decay, at most 0."""
    beta: Float32[Array, "T G R C"]
    is_first: Bool[Array, "T C"]
    """True at the first token of a segment."""


@dataclasses.dataclass(frozen=True)
class Decays:
    """Factors by which parts of a chunk decay. Those between segments are 0."""

    between_ij: Float32[Array, "T G R C C"]
    """From after token j to after token i."""
    from_state_i: Float32[Array, "T G R C"]
    """From the incoming state to after token i."""
    to_state_i: Float32[Array, "T G R C"]
    """From after token i to the outgoing state."""
    state: Float32[Array, "T G R"]


class Update(NamedTuple):
    """Change of any state by a chunk."""

    u: Float[Array, "T G R C V"]
    w: Float[Array, "T G R C K"]
    k: Float[Array, "T G R C K"]
    decay: Float32[Array, "T G R"]


class Readout(NamedTuple):
    """Weights of the incoming state, and of what the chunk's tokens add, in its output."""

    q: Float[Array, "T G R C K"]
    a_ij: Float[Array, "T G R C C"]


def compute_decays(tokens: Tokens) -> Decays:
    """Decays of a chunk.

    Sums over the tokens between two others are added up for each pair. Differences of prefix sums
    lose 3e-5 where decay is fast, which differs between meshes.
    """
    C = tokens.g.shape[-1]
    index = np.arange(C)
    is_between_jim = (index[:, None, None] < index) & (index <= index[None, :, None])
    sums_ij = jnp.einsum(
        "...m,jim->...ij",
        tokens.g,
        jnp.asarray(is_between_jim, jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    from_start_i = jnp.cumsum(tokens.g, axis=-1)
    number = jnp.cumsum(tokens.is_first.astype(jnp.int32), axis=-1)
    is_alike = (number[:, :, None] == number[:, None]) & np.tri(C, dtype=bool)[None]
    is_before_any = (number == 0)[:, None, None]
    is_in_last = (number == number[:, -1:])[:, None, None]
    exp_where = lambda mask, x: jnp.exp(jnp.where(mask, x, -jnp.inf))
    return Decays(
        between_ij=exp_where(is_alike[:, None, None], sums_ij),
        from_state_i=exp_where(is_before_any, from_start_i),
        to_state_i=exp_where(is_in_last, sums_ij[..., -1, :]),
        state=exp_where(is_before_any[..., -1], from_start_i[..., -1]),
    )


def multiply(
    spec: str, a: Array, b: Array, *, dtype: jnp.dtype, out: jnp.dtype | None = None
) -> Array:
    """einsum of two arrays in the compute dtype, summed in float32. Args: out: None: float32."""
    return jnp.einsum(
        spec, a.astype(dtype), b.astype(dtype), preferred_element_type=out or jnp.float32
    )


def compute_inverse(tokens: Tokens, decays: Decays, dtype: jnp.dtype) -> Array:
    """(I + N)^-1, N_ij the part of token j in what token i finds already stored. [T, G, R, C, C]

    By blocks whose size doubles, which is stable: powers of N reach 1e18 for equal keys.
    """
    n_ij = _compute_system(tokens, decays, dtype)
    shape = n_ij.shape
    size = shape[-1]
    n_ij = n_ij.reshape(-1, size, size)  # XLA's CPU library has products of at most 8 dims
    block = min(_INVERTED_BLOCK, size)
    if size % block or (size // block) & (size // block - 1):
        block = size
    take = lambda i, j: n_ij[..., i : i + block, j : j + block]
    inverse = _invert_blocks(jnp.stack([take(i, i) for i in range(0, size, block)], -3))
    while block < size:
        low = inverse[..., ::2, :, :]
        high = inverse[..., 1::2, :, :]
        off = jnp.stack([take(i + block, i) for i in range(0, size, 2 * block)], -3)
        top = jnp.concatenate([low, jnp.zeros_like(low)], -1)
        bottom = jnp.concatenate([-high @ (off @ low), high], -1)
        inverse = jnp.concatenate([top, bottom], -2)
        block *= 2
    return inverse.reshape(shape)


def _invert_blocks(n_ij: Array) -> Array:
    """(I + N)^-1 of small matrices: each doubling is two products of whole matrices."""
    size = n_ij.shape[-1]
    index = np.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=n_ij.dtype), n_ij.shape)
    block = 1
    while block < size:
        number = index // block
        is_off = (number[:, None] // 2 == number // 2) & (number[:, None] > number)
        off = jnp.where(np.broadcast_to(is_off, n_ij.shape), n_ij, 0)
        inverse = inverse - inverse @ (off @ inverse)
        block *= 2
    return inverse


def _compute_system(tokens: Tokens, decays: Decays, dtype: jnp.dtype) -> Array:
    products = multiply("...ik,...jk->...ij", tokens.k, tokens.k, dtype=dtype)[:, :, None]
    return jnp.tril(tokens.beta[..., None] * products * decays.between_ij, -1)


def compute_update(tokens: Tokens, decays: Decays, inverse: Array, dtype: jnp.dtype) -> Update:
    """Update of any state. Args: inverse: result of `compute_inverse`, which is not computed again;
    gradients pass through the system that it is the inverse of."""
    inverse = _as_inverse_of(_compute_system(tokens, decays, dtype), inverse)
    k = tokens.k[:, :, None]
    product = functools.partial(multiply, "...ij,...jx->...ix", inverse, dtype=dtype)
    return Update(
        u=product(tokens.beta[..., None] * tokens.v),
        w=product((tokens.beta * decays.from_state_i)[..., None] * k, out=dtype),
        k=(decays.to_state_i[..., None] * k).astype(dtype),
        decay=decays.state,
    )


def compute_readout(tokens: Tokens, decays: Decays, dtype: jnp.dtype) -> Readout:
    products = multiply("...ik,...jk->...ij", tokens.q, tokens.k, dtype=dtype)[:, :, None]
    return Readout(
        q=(decays.from_state_i[..., None] * tokens.q[:, :, None]).astype(dtype),
        a_ij=(products * decays.between_ij).astype(dtype),
    )


def update_state(x: Array, update: Update, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The outgoing state, and what the chunk's tokens add: `New`."""
    new = update.u - multiply("...ck,...kv->...cv", update.w, x, dtype=dtype)
    added = multiply("...ck,...cv->...kv", update.k, new, dtype=dtype)
    return update.decay[..., None, None] * x + added, new


def run(
    tokens: Tokens, x: Float32[Array, "T G R K V"], inverse: Array, dtype: jnp.dtype
) -> tuple[Float32[Array, "T G R C V"], Float32[Array, "T G R K V"]]:
    """Output and outgoing state of a chunk."""
    decays = compute_decays(tokens)
    readout = compute_readout(tokens, decays, dtype)
    after, new = update_state(x, compute_update(tokens, decays, inverse, dtype), dtype)
    out = multiply("...ck,...kv->...cv", readout.q, x, dtype=dtype)
    return out + multiply("...ij,...jv->...iv", readout.a_ij, new, dtype=dtype), after


def pull_state(dx: Array, dout: Array, update: Update, readout: Readout, dtype: jnp.dtype) -> Array:
    """Gradient of the incoming state, from those of the outgoing state and the output."""
    dnew = multiply("...ij,...iv->...jv", readout.a_ij, dout, dtype=dtype)
    dnew += multiply("...ck,...kv->...cv", update.k, dx, dtype=dtype)
    read = multiply("...ck,...cv->...kv", readout.q, dout, dtype=dtype)
    stored = multiply("...ck,...cv->...kv", update.w, dnew, dtype=dtype)
    return update.decay[..., None, None] * dx + read - stored


@jax.custom_vjp
def _as_inverse_of(n_ij: Array, inverse: Array) -> Array:
    """`inverse`, as a function of the system that it was computed from."""
    return inverse


def _pull_inverse(inverse: Array, dinverse: Array) -> tuple[Array, None]:
    transposed = jnp.swapaxes(inverse.astype(jnp.float32), -1, -2)
    return -jnp.tril(transposed @ (dinverse.astype(jnp.float32) @ transposed), -1), None


_as_inverse_of.defvjp(lambda _, inverse: (inverse, inverse), _pull_inverse)
