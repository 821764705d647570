"""Products of activations and matrices in 8-bit floats (e4m3), which GPUs multiply at twice the
rate of bfloat16.

    y  = x W^T       in 8 bits
    dx = dy W        in 8 bits
    dW = dy^T x      in the dtype of x, with a float32 result

Each token has its own scale, and so has each matrix. No scale depends on other tokens or on the
step before, so that results do not depend on the mesh, and nothing is communicated or stored. The
gradient of a matrix is a sum over tokens, whose scales differ: its product is not in 8 bits.

Scales are powers of two. Source: the recipe `rowwise_with_gw_hp` of pytorch/ao's float8 training,
whose matrices have a scale for each row.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from jaxsp.blocks import layers
from jaxsp.core.errors import UserError

NAME = "float8"

_CODES = jnp.float8_e4m3fn

_MAX_CODE = float(jnp.finfo(_CODES).max)

DIM_MULTIPLE = 16
"""Divisor of the dims of matrices that cuBLAS multiplies in 8 bits."""

MIN_COMPUTE_CAPABILITY = (8, 9)
"""Oldest GPUs that multiply 8-bit floats: Ada, before Hopper."""


def can_multiply(*dims: int) -> bool:
    """True if matrices of these dims are multiplied in 8 bits."""
    return all(dim % DIM_MULTIPLE == 0 for dim in dims)


def multiply(x: Float[Array, "... i"], weight_oi: Float[Array, "o i"]) -> Float[Array, "... o"]:
    """x W^T in the dtype of x; the gradient of W has the dtype of W: see `layers.Gather`."""
    return checkpoint_name(_multiply(x, weight_oi), layers.PRODUCT_NAME)


@jax.custom_vjp
def _multiply(x: Array, weight_oi: Array) -> Array:
    return _multiply_codes("...i,oi->...o", x, weight_oi)


def _multiply_forward(x: Array, weight_oi: Array) -> tuple[Array, tuple[Array, Array]]:
    return _multiply(x, weight_oi), (x, weight_oi)


def _multiply_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight_oi = residuals
    dx = _multiply_codes("...o,oi->...i", dy, weight_oi, precision=jax.lax.Precision.HIGHEST)
    return dx, jnp.einsum("...o,...i->oi", dy, x, preferred_element_type=weight_oi.dtype)


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _multiply_codes(
    dims: str, x: Array, weight_oi: Array, precision: jax.lax.Precision | None = None
) -> Array:
    """Product in 8 bits. Args: precision: HIGHEST: GPUs add up in float32 without shortcuts."""
    codes, scales = _quantize(x, axis=-1)
    weight_codes, weight_scale = _quantize(weight_oi, axis=None)
    products = jnp.einsum(
        dims, codes, weight_codes, precision=precision, preferred_element_type=x.dtype
    )
    return (products.astype(jnp.float32) * (scales * weight_scale)).astype(x.dtype)


def _quantize(x: Array, *, axis: int | None) -> tuple[Array, Float32[Array, "..."]]:
    """Codes, and the scale of each vector along `axis`, or of the whole array."""
    x32 = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x32), axis=axis, keepdims=axis is not None)
    _, exponent = jnp.frexp(largest / _MAX_CODE)  # largest / _MAX_CODE < 2 ** exponent
    inverse = jnp.ldexp(jnp.float32(1), -exponent)
    return (x32 * inverse).astype(_CODES), jnp.ldexp(jnp.float32(1), exponent)


def check_model(hidden_size: int) -> None:
    """Raises: UserError if no matrix of the model would be multiplied in 8 bits."""
    if not can_multiply(hidden_size):
        raise UserError(
            f"model.linear_dtype = {NAME}: the model's hidden_size, {hidden_size}, must be a "
            f"multiple of {DIM_MULTIPLE}. Leave it out."
        )


def check_devices(devices: Sequence[Any]) -> None:
    """Raises: UserError if they cannot multiply 8-bit floats."""
    device = devices[0]
    if device.platform != "gpu":
        return
    capability = tuple(map(int, str(device.compute_capability).split(".")))
    if capability < MIN_COMPUTE_CAPABILITY:
        raise UserError(
            f"model.linear_dtype = {NAME}: {device.device_kind} has no products of 8-bit floats. "
            "Leave it out, or use Ada, Hopper or Blackwell GPUs."
        )
