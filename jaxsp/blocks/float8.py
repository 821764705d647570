"""Products of activations and matrices in 8-bit floats (e4m3), which GPUs multiply at twice the
rate of bfloat16.

    y  = x W^T       in 8 bits
    dx = dy W        in 8 bits
    dW = dy^T x      in the dtype of x, with a float32 result

Each token has its own scale, and so has each matrix. No scale depends on other tokens or on the
step before, so that results do not depend on the mesh. The scales of matrices are computed once per
step, as maxima over all shards, so that shards are gathered in 8 bits: see `sharding.Gather`. The
gradient of a matrix is a sum over tokens, whose scales differ: its product is not in 8 bits.

Scales are powers of two. Source: the recipe `rowwise_with_gw_hp` of pytorch/ao's float8 training,
whose matrices have a scale for each row.
"""

import dataclasses
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledMatrix:
    """A matrix, all of its layers, or shards of them, with the scale of each matrix."""

    values: Any
    """Array of the matrix, or of its codes, which are the matrix divided by the scale."""
    scale: Any
    """Float32 power of two, of each layer if there are several."""


def can_multiply(*dims: int) -> bool:
    """True if matrices of these dims are multiplied in 8 bits."""
    return all(dim % DIM_MULTIPLE == 0 for dim in dims)


def multiply(
    x: Float[Array, "... i"], weight: Float[Array, "o i"] | ScaledMatrix
) -> Float[Array, "... o"]:
    """x W^T in the dtype of x; the gradient of W is float32: see `layers.Gather`.

    Args: weight: the matrix, or its codes.
    """
    matrix = weight if isinstance(weight, ScaledMatrix) else _encode_matrix(weight)
    return checkpoint_name(_multiply(x, matrix), layers.PRODUCT_NAME)


@jax.custom_vjp
def _encode_matrix(weight_oi: Array) -> ScaledMatrix:
    """Codes, as float32 so that their gradient is; it is the gradient of the matrix."""
    scale = choose_scale(jnp.max(jnp.abs(weight_oi.astype(jnp.float32))))
    return ScaledMatrix(values=encode(weight_oi, scale).astype(jnp.float32), scale=scale)


_encode_matrix.defvjp(
    lambda weight_oi: (_encode_matrix(weight_oi), weight_oi[:0]),
    lambda empty, gradient: (gradient.values.astype(empty.dtype),),
)


@jax.custom_vjp
def _multiply(x: Array, matrix: ScaledMatrix) -> Array:
    return _multiply_codes("...i,oi->...o", x, matrix)


def _multiply_forward(x: Array, matrix: ScaledMatrix) -> tuple[Array, tuple[Array, ScaledMatrix]]:
    return _multiply(x, matrix), (x, matrix)


def _multiply_backward(
    residuals: tuple[Array, ScaledMatrix], dy: Array
) -> tuple[Array, ScaledMatrix]:
    x, matrix = residuals
    dx = _multiply_codes("...o,oi->...i", dy, matrix, precision=jax.lax.Precision.HIGHEST)
    dweight = jnp.einsum("...o,...i->oi", dy, x, preferred_element_type=matrix.values.dtype)
    return dx, ScaledMatrix(values=dweight, scale=jnp.zeros_like(matrix.scale))


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _multiply_codes(
    dims: str, x: Array, matrix: ScaledMatrix, precision: jax.lax.Precision | None = None
) -> Array:
    """Product in 8 bits. Args: precision: HIGHEST: GPUs add up in float32 without shortcuts."""
    codes, scales = _quantize(x)
    weight_codes = matrix.values.astype(_CODES)
    products = jnp.einsum(
        dims, codes, weight_codes, precision=precision, preferred_element_type=x.dtype
    )
    return (products.astype(jnp.float32) * (scales * matrix.scale)).astype(x.dtype)


def _quantize(x: Array) -> tuple[Array, Float32[Array, "..."]]:
    """Codes, and the scale of each token."""
    scales = choose_scale(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True))
    return encode(x, scales), scales


def choose_scale(largest: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Smallest power of two for which these magnitudes have codes."""
    _, exponent = jnp.frexp(largest / _MAX_CODE)  # largest / _MAX_CODE < 2 ** exponent
    return jnp.ldexp(jnp.float32(1), exponent)


def encode(x: Array, scale: Float32[Array, "..."]) -> Array:
    """Codes of x / scale."""
    return (x.astype(jnp.float32) * (1 / scale)).astype(_CODES)


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
