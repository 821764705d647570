"""What jax's cuDNN calls promise, written out for the CPU: places in memory by element, one slot after another.

Whatever cuDNN leaves undefined is NaN here: outputs and gradients of tokens in no slot, the statistic beyond a slot's piece.
What it does not read, it does not read here either: a statistic of NaN beyond a piece changes nothing.
A window of w keeps the scores where key + w > query, both counted from the slot's first token: itself is one of the w.
Sources: openxla/xla xla/stream_executor/cuda/cuda_dnn.cc, where q, k, v, o and their gradients get ragged offsets and the
statistic, [slots, heads, tokens of a slot, 1], gets none; NVIDIA/cudnn-frontend scaled_dot_product_flash_attention.h, where the
padding mask replaces the score minus the statistic; its utils/attn_score_modifiers.h, sliding_window_mask, for windows.
"""

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxsp.attention.kernels import cudnn_calls


def attend(q, k, v, sees):
    """Output and log-sum-exp of one slot, [T, h, K] and [h, T]."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qhK,khK->hqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    scores = jnp.where(sees[None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(sees[None], jnp.exp(scores - lse[..., None]), 0)
    return jnp.einsum("hqk,khK->qhK", weights, v, precision="highest"), lse


def slots(q, k, seqlen, q_places, kv_places):
    """For each slot: where its tokens lie in q and in k, counted in what a token takes, and which of its T tokens it holds."""
    R, T, h, K = q.shape
    if q_places.ndim == 1:
        first_q = first_k = jnp.arange(R, dtype=jnp.int32) * T
        lengths = jnp.full(R, T, jnp.int32)
    else:
        # XLA reads one place more than there are slots from memory that is as long or longer
        num_slots = R * (q_places.shape[1] - 1)
        first_q = q_places.reshape(-1)[:num_slots] // (h * K)
        first_k = kv_places.reshape(-1)[:num_slots] // (k.shape[2] * K)
        lengths = seqlen.reshape(-1)
    place = jnp.arange(T, dtype=jnp.int32)[None]
    return first_q[:, None] + place, first_k[:, None] + place, place < lengths[:, None]


def seen(num_tokens, window):
    """Which keys each query of a slot sees; a window that is null or 0, as XLA has it, is none."""
    query, key = jnp.arange(num_tokens)[:, None], jnp.arange(num_tokens)[None]
    return (key <= query) & (key + window > query) if window else key <= query


def flat(x):
    return x.reshape(-1, *x.shape[2:]).astype(jnp.float32)


def rectangle(q, k, q_length, kv_length):
    """Which queries of each row see which keys, where only lengths are told: all of so many see all of so many."""
    inside_q, inside_k = (
        jnp.arange(x.shape[1])[None] < n[:, None] for x, n in ((q, q_length), (k, kv_length))
    )
    return inside_q, inside_k, inside_q[:, :, None] & inside_k[:, None]


def rectangle_forward(q, k, v, q_length, kv_length):
    inside_q, _, sees = rectangle(q, k, q_length, kv_length)
    out, lse = jax.vmap(attend)(*(x.astype(jnp.float32) for x in (q, k, v)), sees)
    return jnp.where(inside_q[..., None, None], out, jnp.nan).astype(q.dtype), jnp.where(
        inside_q[:, None], lse, jnp.nan
    )


def rectangle_backward(q, k, v, q_length, kv_length, statistic, out, dout):
    inside_q, inside_k, sees = rectangle(q, k, q_length, kv_length)
    dtypes = q.dtype, k.dtype, v.dtype
    q, k, v, out, dout = (x.astype(jnp.float32) for x in (q, k, v, out, dout))
    q, out, dout = (jnp.where(inside_q[..., None, None], x, 0) for x in (q, out, dout))
    repeats = q.shape[2] // k.shape[2]
    k1, v1 = (
        jnp.repeat(jnp.where(inside_k[..., None, None], x, 0), repeats, axis=2) for x in (k, v)
    )
    dots = lambda way, a, b: jnp.einsum(way, a, b, precision="highest")
    scale = q.shape[-1] ** -0.5
    weights = jnp.where(
        sees[:, None], jnp.exp(dots("RqhK,RkhK->Rhqk", q, k1) * scale - statistic[..., None]), 0
    )
    delta = dots("RqhK,RqhK->Rhq", dout, out)[..., None]
    dscores = (
        jnp.where(sees[:, None], weights * (dots("RqhK,RkhK->Rhqk", dout, v1) - delta), 0) * scale
    )
    dk, dv = dots("Rhqk,RqhK->RkhK", dscores, q), dots("Rhqk,RqhK->RkhK", weights, dout)
    dk, dv = (x.reshape(*k.shape[:3], repeats, -1).sum(3) for x in (dk, dv))
    found = (dots("Rhqk,RkhK->RqhK", dscores, k1), inside_q), (dk, inside_k), (dv, inside_k)
    return tuple(
        jnp.where(own[..., None, None], x, jnp.nan).astype(t)
        for (x, own), t in zip(found, dtypes, strict=True)
    )


def forward(
    q,
    k,
    v,
    _bias,
    seqlen,
    kv_seqlen,
    q_places,
    kv_places,
    *_,
    sliding_window_length,
    mask_type,
    **_fields,
):
    if mask_type.name == "PADDING":
        return rectangle_forward(q, k, v, seqlen, kv_seqlen)
    tokens_q, tokens_k, inside = slots(q, k, seqlen, q_places, kv_places)
    last = q.shape[0] * q.shape[1] - 1
    causal = seen(q.shape[1], sliding_window_length)

    def slot(at_q, at_k, inside):
        at_q, at_k = jnp.minimum(at_q, last), jnp.minimum(at_k, last)
        return attend(
            flat(q)[at_q], flat(k)[at_k], flat(v)[at_k], causal & inside[:, None] & inside[None]
        )

    out, lse = jax.vmap(slot)(tokens_q, tokens_k, inside)
    to = jnp.where(inside, tokens_q, last + 1)
    merged = (
        jnp.full_like(flat(q), jnp.nan)
        .at[to]
        .set(out, mode="drop")
        .reshape(q.shape)
        .astype(q.dtype)
    )
    return merged, jnp.where(inside[:, None], lse, jnp.nan)


def backward(
    q,
    k,
    v,
    _bias,
    seqlen,
    kv_seqlen,
    q_places,
    kv_places,
    _,
    _also,
    statistic,
    out,
    dout,
    *_more,
    sliding_window_length,
    mask_type,
    **_fields,
):
    if mask_type.name == "PADDING":
        return rectangle_backward(q, k, v, seqlen, kv_seqlen, statistic, out, dout)
    tokens_q, tokens_k, inside = slots(q, k, seqlen, q_places, kv_places)
    last = q.shape[0] * q.shape[1] - 1
    causal = seen(q.shape[1], sliding_window_length)
    repeats = q.shape[2] // k.shape[2]

    def slot(at_q, at_k, inside, statistic):
        at_q, at_k = jnp.minimum(at_q, last), jnp.minimum(at_k, last)
        sees = causal & inside[:, None] & inside[None]
        q1, o1, do1 = (flat(x)[at_q] for x in (q, out, dout))
        k1, v1 = (jnp.repeat(flat(x)[at_k], repeats, axis=1) for x in (k, v))
        dots = lambda way, a, b: jnp.einsum(way, a, b, precision="highest")
        scale = q.shape[-1] ** -0.5
        weights = jnp.where(
            sees[None], jnp.exp(dots("qhK,khK->hqk", q1, k1) * scale - statistic[..., None]), 0
        )
        delta = dots("qhK,qhK->hq", do1, o1)[..., None]
        dscores = (
            jnp.where(sees[None], weights * (dots("qhK,khK->hqk", do1, v1) - delta), 0) * scale
        )
        do1, q1, k1 = (jnp.where(inside[:, None, None], x, 0) for x in (do1, q1, k1))
        dk, dv = dots("hqk,qhK->khK", dscores, q1), dots("hqk,qhK->khK", weights, do1)
        dk, dv = (x.reshape(len(x), k.shape[2], repeats, -1).sum(2) for x in (dk, dv))
        return dots("hqk,khK->qhK", dscores, k1), dk, dv

    dq, dk, dv = jax.vmap(slot)(tokens_q, tokens_k, inside, statistic)
    merged = []
    for gradient, tokens, x in ((dq, tokens_q, q), (dk, tokens_k, k), (dv, tokens_k, v)):
        to = jnp.where(inside, tokens, last + 1)
        merged.append(
            jnp.full_like(flat(x), jnp.nan)
            .at[to]
            .set(gradient, mode="drop")
            .reshape(x.shape)
            .astype(x.dtype)
        )
    return tuple(merged)


def on_cpu() -> None:
    """From now on jax's cuDNN calls compute by this contract where they are compiled for the CPU."""
    library = cudnn_calls._library()
    primitives = {
        library._dot_product_attention_fwd_p: forward,
        library._dot_product_attention_bwd_p: backward,
    }
    for primitive, function in primitives.items():
        mlir.register_lowering(
            primitive, mlir.lower_fun(function, multiple_results=True), platform="cpu"
        )
