"""Residuals of attention's backward pass, named so that a remat policy can keep or offload them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

CHECKPOINT_NAMES = ("attention_out", "attention_lse")
"""Names to keep so that the backward pass does not recompute attention."""


def with_saved_residuals(
    forward: Callable[..., tuple[Array, Array]],
    backward: Callable[..., tuple[Array, Array, Array]],
) -> Callable[..., Array]:
    """Attention whose backward pass starts from the output and the log-sum-exp.

    Args:
        forward: `(q, k, v, *segments) -> out, lse`.
        backward: `(q, k, v, out, lse, dout, *segments) -> dq, dk, dv`.
    Returns: `(q, k, v, *segments) -> out`.
    """

    def save(q: Array, k: Array, v: Array, *segments: Any) -> tuple[Array, tuple[Any, ...]]:
        results = forward(q, k, v, *segments)
        out, lse = map(checkpoint_name, results, CHECKPOINT_NAMES)
        return out, (q, k, v, segments, out, lse)

    def differentiate(residuals: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
        q, k, v, segments, out, lse = residuals
        gradients = backward(q, k, v, out, lse, dout, *segments)
        return *gradients, *(None for _ in segments)

    attend = jax.custom_vjp(lambda *inputs: save(*inputs)[0])
    attend.defvjp(save, differentiate)
    return attend
