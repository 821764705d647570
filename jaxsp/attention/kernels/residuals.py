"""Differentiable attention from a kernel's forward and backward pass.

Residuals of the backward pass have names, so that a remat policy can keep or offload them. Layers
of several kinds share the residuals: the kind only selects the functions that compute them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32

from jaxsp.attention.kernels.segments import Segments

CHECKPOINT_NAMES = ("attention_out", "attention_lse")
"""Names to keep so that the backward pass does not recompute attention."""


class Saved(NamedTuple):
    """Arrays that a backward pass starts from. The output and the log-sum-exp may include keys that
    are not in `k`."""

    q: Float[Array, "B L h K"]
    k: Float[Array, "B L g K"]
    v: Float[Array, "B L g K"]
    out: Float[Array, "B L h K"]
    dout: Float[Array, "B L h K"]
    lse: Float32[Array, "B h L"]


Gradients = tuple[Float[Array, "B L h K"], Float[Array, "B D g K"], Float[Array, "B D g K"]]
"""dq, dk and dv."""


class AttentionFunctions(NamedTuple):
    """Forward and backward pass of attention for one kind of layer."""

    forward: Callable[..., tuple[Array, Array]]
    """`(q, k, v, segments) -> out, lse`. Shapes: q_BLhK, k_BLgK, v_BLgK -> out_BLhK, lse_BhL."""
    backward: Callable[..., Gradients]
    """`(saved, segments) -> dq, dk, dv`."""


def attend(
    kinds: Sequence[AttentionFunctions],
    segment_mask: Callable[..., Bool[Array, "B L"]],
    qkv: Sequence[Array],
    segments: Segments,
    *,
    kind: Array | int = 0,
    sinks_H: Array | None = None,
) -> Array:
    """Attention whose backward pass starts from the output and the log-sum-exp.

    Args:
        kinds: functions of each kind of layer.
        segment_mask: `(starts, lengths, L)` -> mask of the tokens that are in a segment.
        kind: index into `kinds`; it may be traced.
        sinks_H: see `_add_sinks`.
    """
    if isinstance(kind, int):
        kinds = [kinds[kind]]

    def compute(functions: Sequence[Callable[..., Any]], kind: Any, *arrays: Any) -> Any:
        if len(functions) == 1:
            return functions[0](*arrays)
        branches = [lambda *arrays, f=f: tuple(f(*arrays)) for f in functions]
        return jax.lax.switch(kind, branches, *arrays)

    def save(
        q: Array, k: Array, v: Array, segments: Segments, kind: Any, sinks_H: Array | None
    ) -> tuple[Array, tuple[Any, ...]]:
        out, lse = compute([pair.forward for pair in kinds], kind, q, k, v, segments)
        if sinks_H is not None:
            mask_BL = segment_mask(*segments[:2], q.shape[1])
            out, lse = _add_sinks(out, lse, sinks_H, mask_BL)
        out, lse = map(checkpoint_name, (out, lse), CHECKPOINT_NAMES)
        return out, (q, k, v, segments, kind, sinks_H, out, lse)

    def differentiate(residuals: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
        q, k, v, segments, kind, sinks_H, out, lse = residuals
        saved = Saved(q, k, v, out, dout, lse)
        gradients = compute([pair.backward for pair in kinds], kind, saved, segments)
        dsinks_H = None
        if sinks_H is not None:
            mask_BL = segment_mask(*segments[:2], q.shape[1])
            # Summed over these tokens in float32
            delta_BhL = jnp.einsum("BLhK,BLhK->BhL", dout, out, preferred_element_type=jnp.float32)
            weight_BhL = jnp.exp(sinks_H.astype(jnp.float32)[None, :, None] - lse)
            terms_BhL = jnp.where(mask_BL[:, None], weight_BhL * delta_BhL, 0.0)
            dsinks_H = -terms_BhL.sum((0, 2)).astype(sinks_H.dtype)
        return *gradients, None, None, dsinks_H

    attend_kind = jax.custom_vjp(lambda *inputs: save(*inputs)[0])
    attend_kind.defvjp(save, differentiate)
    return attend_kind(*qkv, segments, None if len(kinds) == 1 else kind, sinks_H)


def _add_sinks(
    out_BLhK: Float[Array, "B L h K"],
    lse_BhL: Float32[Array, "B h L"],
    sinks_h: Float[Array, "h"],
    mask_BL: Bool[Array, "B L"],
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Output and log-sum-exp with one more score for each head, whose value is 0.

    A kernel's backward pass needs no change for them: its weights are exp(score - lse).

    Args: mask_BL: tokens in a segment. At the others, the log-sum-exp is ignored, and an output of
        0 stays 0.
    Source: gpt-oss (`sinks` of eager_attention_forward in transformers).
    """
    mask_B1L = mask_BL[:, None]
    new_lse_BhL = jnp.logaddexp(lse_BhL, sinks_h.astype(jnp.float32)[None, :, None])
    weight_BhL = jnp.where(mask_B1L, jnp.exp(lse_BhL - new_lse_BhL), 0.0)
    scaled_BLhK = out_BLhK.astype(jnp.float32) * weight_BhL.swapaxes(1, 2)[..., None]
    return scaled_BLhK.astype(out_BLhK.dtype), jnp.where(mask_B1L, new_lse_BhL, 0.0)
