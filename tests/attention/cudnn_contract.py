"""The contract of jax's cuDNN calls, computed on CPUs bin by bin, with offsets into memory.

All that cuDNN leaves undefined is NaN here: outputs and gradients of tokens in no bin, and the
log-sum-exp after the end of a bin's segment. All that cuDNN does not read, these functions do not
read: a log-sum-exp of NaN after the end of a segment changes nothing. A window of w keeps the
scores where key + w > query, both counted from the bin's first token: the token itself is one of
the w.

Sources: openxla/xla xla/stream_executor/cuda/cuda_dnn.cc, where q, k, v, o and their gradients have
ragged offsets and the log-sum-exp, [bins, heads, tokens of a bin, 1], has none.
NVIDIA/cudnn-frontend scaled_dot_product_flash_attention.h, where the padding mask replaces the
score minus the log-sum-exp; its utils/attn_score_modifiers.h, sliding_window_mask, for windows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxsp.attention.kernels import cudnn_calls

_einsum = functools.partial(jnp.einsum, precision="highest")


def attend(q, k, v, mask, scale):
    """Output [T, h, K] and log-sum-exp [h, T] of one bin."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = _einsum("qhK,khK->hqk", q, k) * scale
    scores = jnp.where(mask[None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(mask[None], jnp.exp(scores - lse[..., None]), 0)
    return _einsum("hqk,khK->qhK", weights, v), lse


def bins(q, k, seqlen, q_offsets, kv_offsets):
    """For each bin: indices of its tokens in q and in k, and which of its T tokens it holds.

    Without offsets, each row is a bin, with a length if the call has lengths.
    """
    R, T, h, K = q.shape
    if q_offsets.ndim == 1:
        first_q = first_k = jnp.arange(R, dtype=jnp.int32) * T
        lengths = seqlen if len(seqlen) else jnp.full(R, T, jnp.int32)
    else:
        # XLA reads one offset more than there are bins, from memory that is at least as long.
        num_bins = R * (q_offsets.shape[1] - 1)
        first_q = q_offsets.reshape(-1)[:num_bins] // (h * K)
        first_k = kv_offsets.reshape(-1)[:num_bins] // (k.shape[2] * K)
        lengths = seqlen.reshape(-1)
    position = jnp.arange(T, dtype=jnp.int32)[None]
    return first_q[:, None] + position, first_k[:, None] + position, position < lengths[:, None]


def causal_mask(num_tokens, window):
    """Keys that each query of a bin attends to. A window of None or 0, as in XLA, is no window."""
    query = jnp.arange(num_tokens)[:, None]
    key = jnp.arange(num_tokens)[None]
    if window:
        return (key <= query) & (key + window > query)
    return key <= query


def flat(x):
    return x.reshape(-1, *x.shape[2:]).astype(jnp.float32)


def where_inside(inside, x, fill, dtype=None):
    """x, with `fill` at tokens outside. Shapes: [rows, tokens] and [rows, tokens, heads, K]."""
    return jnp.where(inside[..., None, None], x, fill).astype(dtype or x.dtype)


def off_diagonal_masks(q, k, q_lengths, kv_lengths):
    """Masks of queries, of keys and of their pairs, where a call has only lengths."""
    inside_q, inside_k = (
        jnp.arange(x.shape[1])[None] < n[:, None] for x, n in ((q, q_lengths), (k, kv_lengths))
    )
    return inside_q, inside_k, inside_q[:, :, None] & inside_k[:, None]


def off_diagonal_forward(q, k, v, q_lengths, kv_lengths, scale):
    inside_q, _, mask = off_diagonal_masks(q, k, q_lengths, kv_lengths)
    inputs = (x.astype(jnp.float32) for x in (q, k, v))
    out, lse = jax.vmap(functools.partial(attend, scale=scale))(*inputs, mask)
    out = where_inside(inside_q, out, jnp.nan, q.dtype)
    return out, jnp.where(inside_q[:, None], lse, jnp.nan)


def off_diagonal_backward(q, k, v, q_lengths, kv_lengths, lse, out, dout, scale):
    inside_q, inside_k, mask = off_diagonal_masks(q, k, q_lengths, kv_lengths)
    q32, k32, v32, out, dout = (x.astype(jnp.float32) for x in (q, k, v, out, dout))
    q32, out, dout = (where_inside(inside_q, x, 0) for x in (q32, out, dout))
    k32, v32 = (where_inside(inside_k, x, 0) for x in (k32, v32))
    pull = jax.vmap(functools.partial(gradients, scale=scale))
    dq, dk, dv = pull(q32, k32, v32, out, dout, lse, mask)
    return (
        where_inside(inside_q, dq, jnp.nan, q.dtype),
        where_inside(inside_k, dk, jnp.nan, k.dtype),
        where_inside(inside_k, dv, jnp.nan, v.dtype),
    )


def gradients(q, k, v, out, dout, lse, mask, scale):
    """dq, dk and dv of one bin, from q of [T, h, K] and lse of [h, T]."""
    num_kv_heads = k.shape[1]
    repeats = q.shape[1] // num_kv_heads
    k, v = (jnp.repeat(x, repeats, axis=1) for x in (k, v))
    scores = _einsum("qhK,khK->hqk", q, k) * scale
    weights = jnp.where(mask[None], jnp.exp(scores - lse[..., None]), 0)
    delta = _einsum("qhK,qhK->hq", dout, out)[..., None]
    dweights = _einsum("qhK,khK->hqk", dout, v)
    dscores = jnp.where(mask[None], weights * (dweights - delta), 0) * scale
    # Tokens outside the bin are NaN, and 0 * NaN is NaN.
    is_query = mask.any(1)[:, None, None]
    is_key = mask.any(0)[:, None, None]
    q, dout = (jnp.where(is_query, x, 0) for x in (q, dout))
    dk = _einsum("hqk,qhK->khK", dscores, q)
    dv = _einsum("hqk,qhK->khK", weights, dout)
    dk, dv = (x.reshape(len(x), num_kv_heads, repeats, -1).sum(2) for x in (dk, dv))
    return _einsum("hqk,khK->qhK", dscores, jnp.where(is_key, k, 0)), dk, dv


def scatter(values, tokens, inside, like):
    """Writes the values of all bins to their tokens, and NaN to tokens of no bin."""
    memory = jnp.full_like(flat(like), jnp.nan)
    tokens = jnp.where(inside, tokens, len(memory))
    return memory.at[tokens].set(values, mode="drop").reshape(like.shape).astype(like.dtype)


def forward(q, k, v, _bias, q_lengths, kv_lengths, q_offsets, kv_offsets, *_more, **params):
    scale = params["scale"]
    if params["mask_type"].name == "PADDING":
        return off_diagonal_forward(q, k, v, q_lengths, kv_lengths, scale)
    tokens_q, tokens_k, inside = bins(q, k, q_lengths, q_offsets, kv_offsets)
    last = q.shape[0] * q.shape[1] - 1
    causal = causal_mask(q.shape[1], params["sliding_window_length"])

    def compute_bin(tokens_q, tokens_k, inside):
        tokens_q = jnp.minimum(tokens_q, last)
        tokens_k = jnp.minimum(tokens_k, last)
        mask = causal & inside[:, None] & inside[None]
        return attend(flat(q)[tokens_q], flat(k)[tokens_k], flat(v)[tokens_k], mask, scale)

    out, lse = jax.vmap(compute_bin)(tokens_q, tokens_k, inside)
    return scatter(out, tokens_q, inside, q), jnp.where(inside[:, None], lse, jnp.nan)


def backward(q, k, v, _bias, q_lengths, kv_lengths, q_offsets, kv_offsets, *rest, **params):
    _, _, lse, out, dout, *_ = rest  # after two page tables
    scale = params["scale"]
    if params["mask_type"].name == "PADDING":
        return off_diagonal_backward(q, k, v, q_lengths, kv_lengths, lse, out, dout, scale)
    tokens_q, tokens_k, inside = bins(q, k, q_lengths, q_offsets, kv_offsets)
    last = q.shape[0] * q.shape[1] - 1
    causal = causal_mask(q.shape[1], params["sliding_window_length"])

    def compute_bin(tokens_q, tokens_k, inside, lse):
        tokens_q = jnp.minimum(tokens_q, last)
        tokens_k = jnp.minimum(tokens_k, last)
        mask = causal & inside[:, None] & inside[None]
        bin_q, bin_out, bin_dout = (flat(x)[tokens_q] for x in (q, out, dout))
        bin_k, bin_v = (flat(x)[tokens_k] for x in (k, v))
        return gradients(bin_q, bin_k, bin_v, bin_out, bin_dout, lse, mask, scale)

    dq, dk, dv = jax.vmap(compute_bin)(tokens_q, tokens_k, inside, lse)
    return (
        scatter(dq, tokens_q, inside, q),
        scatter(dk, tokens_k, inside, k),
        scatter(dv, tokens_k, inside, v),
    )


def on_cpu() -> None:
    """Makes jax's cuDNN calls compute by this contract when they are compiled for CPUs."""
    primitives = {
        cudnn_calls.library._dot_product_attention_fwd_p: forward,
        cudnn_calls.library._dot_product_attention_bwd_p: backward,
    }
    for primitive, function in primitives.items():
        lowering = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, lowering, platform="cpu")
