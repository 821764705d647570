"""cuDNN's flash attention, forward and backward, on whole rows of one or of many pieces: the one file that knows jax._src.

JAX's own way to it is passed by, down to the primitives that stand for cuDNN's calls, for three reasons. The output and the
log-sum-exp can be named for a remat policy only in a custom_vjp of ours; JAX multiplies the packed places of K and V by the
wrong number of heads before 0.11.1 (jax PR 39521), which is done here; and pieces of different lengths get calls of their own
(packed.py).
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.attention.kernels import packed, pieces, residuals

TESTED = "0.10.1 to 0.12.0"
"""Versions of JAX."""

_OPERANDS = (
    "query",
    "key",
    "value",
    "bias",
    "q_seqlen",
    "kv_seqlen",
    "q_offsets",
    "kv_offsets",
    "page_table_k",
    "page_table_v",
)
_BACKWARD = ("activation", "fwd_output", "grad_output")
_FIELDS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
_OF_0_12 = {"score_mod_name": None, "score_mod_jaxpr": None}
"""What jax 0.12 asks for besides: a function of the scores, which we have none of."""

_Taken = packed.Slots | pieces.Rectangle | None
"""What a call is of: slots of packed rows, rectangles, or rows as a whole."""


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


def unknown_jax() -> str | None:
    """Why this JAX cannot be used, or None: its inner functions are not one of those we know."""
    if _library() is None or _asked_besides() is None:
        return f"is called through parts of JAX that this version, {jax.__version__}, has changed; {TESTED} are known"
    return None


def version() -> tuple[int, int, int] | None:
    """The installed cuDNN, None where JAX finds none."""
    library = _library()
    if library is None or library.cuda_versions is None:
        return None
    number = library.check_cudnn_version()
    return number // 10000, number // 100 % 100, number % 100


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
    return _forward(lambda *qkv: _part_forward(*qkv, starts_BM, lengths_BM, window), q, k, v, head_chunks)


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
    part = lambda *inputs: _part_backward(*inputs, starts_BM, lengths_BM, window)
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
    return _forward(lambda *qkv: _call_forward(where, *qkv, window=None), q, k, v, head_chunks)


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
    part = lambda q, k, v, out, dout, lse: _call_backward(where, lse, q, k, v, out, dout, window=None)
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
        out, lse_BhL = _call_forward(None, q, k, v, window=window)
        return jnp.where(starts_BM[:, :, None, None] == 0, out, jnp.nan), lse_BhL
    B, L, h, _ = q.shape
    out, lse_Nh = jnp.zeros_like(q), jnp.zeros((B * L, h), jnp.float32)
    for call in _calls(q, starts_BM):
        taken = packed.slots(call, starts_BM, lengths_BM)
        inside_N1 = (taken.slot_N >= 0)[:, None]
        found, statistic_ShT = _call_forward(taken, *_cut(call, q, k, v), window=window)
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
        return _call_backward(None, lse_BhL, q, k, v, out, dout, window=window)
    B, L, h, _ = q.shape
    lse_Nh = lse_BhL.swapaxes(1, 2).reshape(B * L, h)
    dq, dk, dv = (jnp.zeros_like(x) for x in (q, k, v))
    for call in _calls(q, starts_BM):
        taken = packed.slots(call, starts_BM, lengths_BM)
        inside_BL11 = (taken.slot_N >= 0).reshape(B, L, 1, 1)
        statistic_ShT = packed.expanded(lse_Nh, taken, tokens=call.tokens)
        found = _call_backward(taken, statistic_ShT, *_cut(call, q, k, v, out, dout), window=window)
        dq, dk, dv = (
            jnp.where(inside_BL11, x.reshape(whole.shape), whole) for x, whole in zip(found, (dq, dk, dv), strict=True)
        )
        # lse_Nh too: else one operation expands it for all calls, and the statistics of all are there at once
        (q, k, v, dout, lse_Nh), (dq, dk, dv) = _after(((q, k, v, dout, lse_Nh), (dq, dk, dv)))
    return dq, dk, dv


def _call_forward(taken: _Taken, q: Array, k: Array, v: Array, *, window: int | None) -> tuple[Array, Array]:
    """Output and log-sum-exp, f32[B, h, L], of rows as a whole and of rectangles; or of slots, f32[S, h, T], undefined beyond
    each piece.
    """
    out, statistic = _library()._dot_product_attention_fwd_p.bind(
        *_operands(q, k, v, taken), **_fields(q, taken, window), is_training=True
    )
    return out, statistic


def _call_backward(
    taken: _Taken,
    statistic: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    *,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv; of slots, undefined at tokens of none."""
    dq, dk, dv = _library()._dot_product_attention_bwd_p.bind(
        *_operands(q, k, v, taken), statistic, out, dout, **_fields(q, taken, window)
    )
    return dq, dk, dv


def _operands(q: Array, k: Array, v: Array, taken: _Taken) -> tuple[Array, ...]:
    unused = jnp.zeros(0, q.dtype)
    lengths, places = (unused, unused), (unused, unused)
    if isinstance(taken, pieces.Rectangle):
        # no softmax over nothing: what a row without queries or keys gives is not used
        lengths = (jnp.maximum(taken.queries_B, 1), jnp.maximum(taken.keys_B, 1))
    elif taken is not None:
        lengths_RS = taken.lengths_S.reshape(len(q), -1)
        lengths, places = (lengths_RS, lengths_RS), (_places(taken, q), _places(taken, k))
    return q, k, v, unused, *lengths, *places, unused, unused


def _places(taken: packed.Slots, x_RTXK: Array) -> Int32[Array, "R S_plus_1"]:
    """Where each slot begins in an array's memory, in elements: a slot's first token times what a token takes of *this* array.

    Unused slots, and the one place more of each row that the call has, are at the end of the memory.
    """
    R, T, X, K = x_RTXK.shape
    end = R * T
    starts_S = jnp.where(taken.lengths_S > 0, taken.starts_S, end)
    return jnp.concatenate([starts_S, jnp.full(R, end, jnp.int32)]).reshape(R, -1) * (X * K)


def _fields(q: Array, taken: _Taken, window: int | None) -> dict[str, Any]:
    """What a call is told besides arrays.

    cuDNN keeps the scores where key + window > query and, being causal, key <= query, both counted from the slot's first
    token: the window counts the token itself. Where no slot is longer than the window, it is not told of one.
    Source: sliding_window_mask in NVIDIA/cudnn-frontend utils/attn_score_modifiers.h, aligned to the top left, with the left
        bound that openxla/xla xla/stream_executor/cuda/cuda_dnn.cc sets to sliding_window_length.
    """
    library = _library()
    masks = {type(None): "CAUSAL", packed.Slots: "PADDING_CAUSAL", pieces.Rectangle: "PADDING"}
    mask = library.MaskType[masks[type(taken)]]
    told = None if window is None or window >= q.shape[1] else window
    known = (q.shape[-1] ** -0.5, 42, 0.0, (False, False), mask, library.AttentionLayout.BTNH.value, told)
    return dict(zip(_FIELDS, known, strict=True)) | (_asked_besides() or {})


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


@functools.cache
def _library() -> Any:
    try:
        from jax._src.cudnn import fused_attention_stablehlo
    except ImportError:
        return None
    return fused_attention_stablehlo


@functools.cache
def _asked_besides() -> dict[str, None] | None:
    """Parameters that this JAX's calls have besides those we know, with their values; None if there are others."""
    lowerings = [getattr(_library(), f"_dot_product_attention_{way}_cuda_lowering", None) for way in ("fwd", "bwd")]
    primitives = [hasattr(_library(), f"_dot_product_attention_{way}_p") for way in ("fwd", "bwd")]
    if not all(primitives) or None in lowerings:
        return None
    forward, backward = (list(inspect.signature(function).parameters) for function in lowerings if function)
    for extra in ({}, _OF_0_12):
        operands = ["score_mod_args"] if extra else []
        first = ["ctx", *_OPERANDS, *operands, *_FIELDS, *extra, "is_training"]
        second = ["ctx", *_OPERANDS, *_BACKWARD, *operands, *_FIELDS, *extra]
        if (forward, backward) == (first, second):
            return dict(extra)
    return None
