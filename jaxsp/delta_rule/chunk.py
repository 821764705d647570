"""The gated delta rule on one chunk of tokens.

Token by token, the state S [K, V] of a head changes by

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    out = S^T q

and is 0 before the first token of a segment. For a chunk of C tokens with incoming state X, this is

    New = U - W X;    out = Q X + A New;    X' = decay X + K^T New

where U, W, Q, A, K and decay do not depend on X. Everything that does not depend on X is computed
for many chunks at once. Then the pass from chunk to chunk needs one product for each:

    X' = decay X - (K^T W) X + K^T U;    out = (Q - A W) X + A U

Decays between two tokens of different segments are exact zeros, so nothing leaks.

Dims: T chunks at a time, G key heads, R value heads of each, C tokens, K key
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
    v: Float[Array, "T G R C V"]
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


class ChunkMap(NamedTuple):
    """Effect of a chunk on any incoming state X: it becomes decay X - d X + u, and the chunk's
    output is q X + out."""

    decay: Float32[Array, "T G R"]
    d: Float[Array, "T G R K K"]
    u: Float[Array, "T G R K V"]
    q: Float[Array, "T G R C K"]
    out: Float[Array, "T G R C V"]


def compute_decays(tokens: Tokens) -> Decays:
    """Decays of a chunk.

    Sums over the tokens between two others are added up for each pair. Differences of prefix sums
    lose 3e-5 where decay is fast, which differs between meshes.
    """
    C = tokens.g.shape[-1]
    index = np.arange(C)
    is_between_ijm = (index[None, :, None] < index) & (index <= index[:, None, None])
    sums_ij = jnp.einsum(
        "...m,ijm->...ij",
        tokens.g,
        jnp.asarray(is_between_ijm, jnp.float32),
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


def compute_map(tokens: Tokens, dtype: jnp.dtype) -> ChunkMap:
    """The map of a chunk, in the compute dtype.

    The system of equations is solved in float32: errors of keys that are alike grow with its
    inverse.
    """
    decays = compute_decays(tokens)
    product = functools.partial(multiply, dtype=dtype)
    k = tokens.k[:, :, None]
    k_products = product("...ik,...jk->...ij", k, k)
    system = jnp.tril(tokens.beta[..., None] * k_products * decays.between_ij, -1)
    inverse = _invert(system)
    solve = lambda weights, x: (inverse @ _weigh(weights, x)).astype(dtype)
    u = solve(tokens.beta, tokens.v)
    w = solve(tokens.beta * decays.from_state_i, k)
    k_to_state = _weigh(decays.to_state_i, k)
    q = tokens.q[:, :, None]
    a_ij = (product("...ik,...jk->...ij", q, k) * decays.between_ij).astype(dtype)
    corrections = product("...ij,...jk->...ik", a_ij, w)
    return ChunkMap(
        decay=decays.state,
        d=product("...ck,...cl->...kl", k_to_state, w, out=dtype),
        u=product("...ck,...cv->...kv", k_to_state, u, out=dtype),
        q=(_weigh(decays.from_state_i, q) - corrections).astype(dtype),
        out=product("...ij,...jv->...iv", a_ij, u, out=dtype),
    )


def _weigh(weights: Float32[Array, "... C"], x: Float[Array, "... C X"]) -> Array:
    return weights[..., None] * x.astype(jnp.float32)


def update_state(
    x: Float32[Array, "T G R K V"],
    decay: Array,
    d: Array,
    u: Array,
    dtype: jnp.dtype,
    *,
    is_reversed: bool = False,
) -> Float32[Array, "T G R K V"]:
    """The state that leaves a chunk: see `ChunkMap`. Args: is_reversed: transposes d."""
    spec = "...lk,...lv->...kv" if is_reversed else "...kl,...lv->...kv"
    stored = multiply(spec, d, x, dtype=dtype)
    return decay[..., None, None] * x - stored + u.astype(jnp.float32)


def invert(n_ij: Float32[Array, "... C C"]) -> Float32[Array, "... C C"]:
    """(I + N)^-1 of strictly lower triangular N.

    By blocks whose size doubles, which is stable: powers of N reach 1e18 for equal keys.
    """
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
    """The same for small matrices: each doubling is two products of whole matrices."""
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


_invert = jax.custom_vjp(invert)


def _keep_inverse(n_ij: Array) -> tuple[Array, Array]:
    inverse = invert(n_ij)
    return inverse, inverse


def _pull_inverse(inverse: Array, dinverse: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(transposed @ (dinverse @ transposed), -1),)


_invert.defvjp(_keep_inverse, _pull_inverse)
