"""cuDNN's flash attention, forward and backward: whole rows of one or of many pieces, and rectangles of them.

Its calls are wrapped in a custom_vjp of ours, whose output and log-sum-exp a remat policy knows by name; heads go through in
parts, and pieces of different lengths get calls of their own (packed.py).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.attention.kernels import cudnn_calls, packed, pieces, residuals


def attention(
    q_BLhK: Float[Array, "B L h K"],
    k_BLgK: Float[Array, "B L g K"],
    v_BLgK: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    head_chunks: int = 1,
    window: int | None = None,
) -> Float[Array, "B L h K"]:
    """Causal softmax attention inside each piece; the output at padding means nothing, not even a number.

    Rows of one slot (M = 1) are computed as a whole: their piece begins with the row (NaN if not), and what follows it is
    padding.

    Args:
        head_chunks: the heads go through in so many parts, one after another, one of `limits.parts`.
        window: a token sees itself and the window - 1 tokens before it; None: all of them.
    Raises: what `limits.obstacles` finds is the caller's to report; here cuDNN or JAX would refuse it.
    """
    return _attention(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, head_chunks, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(
    q: Array, k: Array, v: Array, starts_BM: Array, lengths_BM: Array, head_chunks: int, window: int | None
) -> Array:
    return _attention_fwd(q, k, v, starts_BM, lengths_BM, head_chunks, window)[0]


def _attention_fwd(
    q: Array, k: Array, v: Array, starts_BM: Array, lengths_BM: Array, head_chunks: int, window: int | None
) -> tuple[Array, tuple[Array, ...]]:
    out, lse = forward(q, k, v, starts_BM, lengths_BM, head_chunks=head_chunks, window=window)
    out, lse = checkpoint_name(out, residuals.OUT), checkpoint_name(lse, residuals.LSE)
    return out, (q, k, v, starts_BM, lengths_BM, out, lse)


def _attention_bwd(
    head_chunks: int, window: int | None, saved: tuple[Array, ...], dout: Array
) -> tuple[Array, Array, Array, None, None]:
    q, k, v, starts_BM, lengths_BM, out, lse = saved
    found = backward(q, k, v, out, lse, dout, starts_BM, lengths_BM, head_chunks=head_chunks, window=window)
    return *found, None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def forward(
    q: Float[Array, "B L h K"],
    k: Float[Array, "B L g K"],
    v: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    head_chunks: int = 1,
    window: int | None = None,
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Output and log-sum-exp, which mean nothing at padding."""
    part = lambda q, k, v: _part_forward(q, k, v, starts_BM, lengths_BM, window)
    return _forward(part, q, k, v, head_chunks)


def backward(
    q: Float[Array, "B L h K"],
    k: Float[Array, "B L g K"],
    v: Float[Array, "B L g K"],
    out: Float[Array, "B L h K"],
    lse: Float32[Array, "B h L"],
    dout: Float[Array, "B L h K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    head_chunks: int = 1,
    window: int | None = None,
) -> tuple[Float[Array, "B L h K"], Float[Array, "B L g K"], Float[Array, "B L g K"]]:
    """dq, dk and dv, which mean nothing at padding; the output and its log-sum-exp may be of more keys than these."""
    part = lambda q, k, v, out, dout, lse: _part_backward(q, k, v, out, dout, lse, starts_BM, lengths_BM, window)
    return _backward(part, q, k, v, out, lse, dout, head_chunks)


def rectangle_forward(
    q: Float[Array, "R C h K"],
    k: Float[Array, "R D g K"],
    v: Float[Array, "R D g K"],
    where: pieces.Rectangle,
    *,
    head_chunks: int = 1,
) -> tuple[Float[Array, "R C h K"], Float32[Array, "R h C"]]:
    """Output and log-sum-exp of the rectangle's queries over its keys, without a mask; for other queries they mean nothing."""
    k, v = (_moved(x, where.first_B) for x in (k, v))
    return _forward(lambda q, k, v: cudnn_calls.forward(where, q, k, v, window=None), q, k, v, head_chunks)


def rectangle_backward(
    q: Float[Array, "R C h K"],
    k: Float[Array, "R D g K"],
    v: Float[Array, "R D g K"],
    out: Float[Array, "R C h K"],
    lse: Float32[Array, "R h C"],
    dout: Float[Array, "R C h K"],
    where: pieces.Rectangle,
    *,
    head_chunks: int = 1,
) -> tuple[Float[Array, "R C h K"], Float[Array, "R D g K"], Float[Array, "R D g K"]]:
    """dq, dk and dv of the rectangle, which mean nothing elsewhere; the output and its log-sum-exp may be of more keys."""
    k, v = (_moved(x, where.first_B) for x in (k, v))
    part = lambda q, k, v, out, dout, lse: cudnn_calls.backward(where, lse, q, k, v, out, dout, window=None)
    dq, *dkv = _backward(part, q, k, v, out, lse, dout, head_chunks)
    dk, dv = (_moved(x, -where.first_B) for x in dkv)
    return dq, dk, dv


def _moved(x_RDgK: Array, by_R: Array) -> Array:
    """The tokens so many places further to the front: cuDNN counts keys from the first; without a mask any order will do."""
    return jax.vmap(lambda x, by: jnp.roll(x, -by, axis=0))(x_RDgK, by_R)


def _forward(part: Callable[..., tuple[Array, Array]], q: Array, k: Array, v: Array, head_chunks: int) -> tuple[Array, Array]:
    """What `part` gives for each part of the heads, one after another."""
    found: list[tuple[Array, Array]] = []
    for heads, kv_heads in _parts(q.shape[2], k.shape[2], head_chunks):
        of_part = part(q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads])
        (q, k, v), found = _after(((q, k, v), [*found, of_part]))
    outs, lses = zip(*found, strict=True)
    return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=1)


def _backward(
    part: Callable[..., tuple[Array, Array, Array]],
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    head_chunks: int,
) -> tuple[Array, Array, Array]:
    found: list[tuple[Array, Array, Array]] = []
    for heads, kv_heads in _parts(q.shape[2], k.shape[2], head_chunks):
        inputs = q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads], out[:, :, heads], dout[:, :, heads], lse[:, heads]
        (q, k, v, out, dout, lse), found = _after(((q, k, v, out, dout, lse), [*found, part(*inputs)]))
    dqs, dks, dvs = zip(*found, strict=True)
    sharing = max(head_chunks // k.shape[2], 1)
    return jnp.concatenate(dqs, axis=2), _joined(dks, sharing), _joined(dvs, sharing)


def _part_forward(q: Array, k: Array, v: Array, starts_BM: Array, lengths_BM: Array, window: int | None) -> tuple[Array, Array]:
    if starts_BM.shape[1] == 1:
        out, lse_BhL = cudnn_calls.forward(None, q, k, v, window=window)
        return jnp.where(starts_BM[:, :, None, None] == 0, out, jnp.nan), lse_BhL
    B, L, h, _ = q.shape
    out, lse_Nh = jnp.zeros_like(q), jnp.zeros((B * L, h), jnp.float32)
    for call in _calls(q, starts_BM):
        taken = packed.slots(call, starts_BM, lengths_BM)
        inside_N1 = (taken.slot_N >= 0)[:, None]
        found, statistic_ShT = cudnn_calls.forward(taken, *_cut(call, q, k, v), window=window)
        out = jnp.where(inside_N1.reshape(B, L, 1, 1), found.reshape(q.shape), out)
        lse_Nh = jnp.where(inside_N1, packed.compressed(statistic_ShT, taken), lse_Nh)
        (q, k, v), out, lse_Nh = _after(((q, k, v), out, lse_Nh))
    return out, lse_Nh.reshape(B, L, h).swapaxes(1, 2)


def _part_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse_BhL: Array,
    starts_BM: Array,
    lengths_BM: Array,
    window: int | None,
) -> tuple[Array, Array, Array]:
    if starts_BM.shape[1] == 1:
        return cudnn_calls.backward(None, lse_BhL, q, k, v, out, dout, window=window)
    B, L, h, _ = q.shape
    lse_Nh = lse_BhL.swapaxes(1, 2).reshape(B * L, h)
    dq, dk, dv = (jnp.zeros_like(x) for x in (q, k, v))
    for call in _calls(q, starts_BM):
        taken = packed.slots(call, starts_BM, lengths_BM)
        inside_BL11 = (taken.slot_N >= 0).reshape(B, L, 1, 1)
        statistic_ShT = packed.expanded(lse_Nh, taken, tokens=call.tokens)
        found = cudnn_calls.backward(taken, statistic_ShT, *_cut(call, q, k, v, out, dout), window=window)
        dq, dk, dv = (
            jnp.where(inside_BL11, x.reshape(whole.shape), whole) for x, whole in zip(found, (dq, dk, dv), strict=True)
        )
        # lse_Nh too: else one operation expands it for all calls, and the statistics of all are there at once
        (q, k, v, dout, lse_Nh), (dq, dk, dv) = _after(((q, k, v, dout, lse_Nh), (dq, dk, dv)))
    return dq, dk, dv


def _calls(q_BLhK: Array, starts_BM: Array) -> tuple[packed.Call, ...]:
    B, L = q_BLhK.shape[:2]
    return packed.calls(num_rows=B, row_tokens=L, max_pieces=starts_BM.shape[1])


def _cut(call: packed.Call, *arrays_BLXK: Array) -> Iterator[Array]:
    """The rows' memory taken for more and shorter rows, as long as a slot."""
    return (x.reshape(call.num_rows, call.tokens, *x.shape[2:]) for x in arrays_BLXK)


def _parts(num_heads: int, num_kv_heads: int, head_chunks: int) -> Iterator[tuple[slice, slice]]:
    """Query heads and K/V heads of each part."""
    size, kv_size = num_heads // head_chunks, max(num_kv_heads // head_chunks, 1)
    for part in range(head_chunks):
        first = part * num_kv_heads // head_chunks
        yield slice(part * size, (part + 1) * size), slice(first, first + kv_size)


def _joined(gradients: tuple[Array, ...], sharing: int) -> Array:
    """Gradients of K/V heads, where each head is in `sharing` parts one after another; these are added in float32."""
    if sharing == 1:
        return jnp.concatenate(gradients, axis=2)
    dtype = gradients[0].dtype
    of_heads = (gradients[first : first + sharing] for first in range(0, len(gradients), sharing))
    sums = [functools.reduce(jnp.add, (x.astype(jnp.float32) for x in same)).astype(dtype) for same in of_heads]
    return jnp.concatenate(sums, axis=2)


def _after(arrays: Any) -> Any:
    """The same arrays, all of them there before any is used: else XLA may hold what several calls give at the same time."""
    return jax.lax.optimization_barrier(arrays)
