"""Products of activations and matrices in 8-bit floats (e4m3), which GPUs multiply at twice the
rate of bfloat16.

    y  = x W^T       in 8 bits
    dx = dy W        in 8 bits
    dW = dy^T x      in the dtype of x, with a float32 result; in 8 bits with `float8_all`

Each token has its own scale, and so has each matrix. No scale depends on other tokens or on the
step before, so that results do not depend on the mesh. The scales of matrices are computed once per
step, as maxima over all shards, so that shards are gathered in 8 bits: see `sharding.Gather`. The
gradient of a matrix is a sum over tokens, whose scales differ. With `float8_all`, the scale of x of
each token moves into its dy, which gets one scale for all tokens of a product.

Scales are powers of two, so that this one rounds no code otherwise, except for codes 2 ** 15 times
smaller than the largest: gradients do not depend on the mesh. Source: the recipe
`rowwise_with_gw_hp` of pytorch/ao's float8 training, whose matrices have a scale for each row.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from jaxsp.blocks import layers
from jaxsp.core.errors import UserError

NAME = "float8"

ALL = "float8_all"
"""Also the products that are gradients of matrices."""

_CODES = jnp.float8_e4m3fn

_MAX_CODE = float(jnp.finfo(_CODES).max)

_MIN_SCALE = 2.0**-120
"""Scale of zeros; its inverse is finite."""

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
    x: Float[Array, "... i"],
    weight: Float[Array, "o i"] | ScaledMatrix,
    *,
    is_gradient_float8: bool = False,
) -> Float[Array, "... o"]:
    """x W^T in the dtype of x; the gradient of W is float32: see `layers.Gather`.

    Args: weight: the matrix, or its codes. is_gradient_float8: True for `float8_all`.
    """
    matrix = weight if isinstance(weight, ScaledMatrix) else _encode_matrix(weight)
    return checkpoint_name(_multiply(is_gradient_float8, x, matrix), layers.PRODUCT_NAME)


@jax.custom_vjp
def _encode_matrix(weight_oi: Array) -> ScaledMatrix:
    """Codes, as float32 so that their gradient is; it is the gradient of the matrix."""
    scale = choose_scale(jnp.max(jnp.abs(weight_oi.astype(jnp.float32))))
    return ScaledMatrix(values=encode(weight_oi, scale).astype(jnp.float32), scale=scale)


_encode_matrix.defvjp(
    lambda weight_oi: (_encode_matrix(weight_oi), weight_oi[:0]),
    lambda empty, gradient: (gradient.values.astype(empty.dtype),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(is_gradient_float8: bool, x: Array, matrix: ScaledMatrix) -> Array:
    return _multiply_codes("...i,oi->...o", x, matrix)


def _multiply_forward(
    is_gradient_float8: bool, x: Array, matrix: ScaledMatrix
) -> tuple[Array, tuple[Array, ScaledMatrix]]:
    return _multiply(is_gradient_float8, x, matrix), (x, matrix)


def _multiply_backward(
    is_gradient_float8: bool, residuals: tuple[Array, ScaledMatrix], dy: Array
) -> tuple[Array, ScaledMatrix]:
    x, matrix = residuals
    dx = _multiply_codes("...o,oi->...i", dy, matrix, precision=jax.lax.Precision.HIGHEST)
    if is_gradient_float8:
        dweight = _multiply_tokens(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
    else:
        dweight = jnp.einsum("...o,...i->oi", dy, x, preferred_element_type=matrix.values.dtype)
    return dx, ScaledMatrix(values=dweight, scale=jnp.zeros_like(matrix.scale))


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _multiply_tokens(dy_To: Array, x_Ti: Array) -> Float32[Array, "o i"]:
    """dy^T x in 8 bits: (dy s / S)^T (x / s) S, with the scales s of the tokens of x."""
    codes_Ti, scales_T1 = _quantize(x_Ti)
    _, dy_scales_T1 = _quantize(dy_To)
    scale = jnp.maximum(jnp.max(scales_T1 * dy_scales_T1), _MIN_SCALE)
    dy_codes_To = encode(dy_To.astype(jnp.float32) * scales_T1, scale)
    product = jnp.einsum(
        "To,Ti->oi",
        dy_codes_To,
        codes_Ti,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product * scale


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
    # Zeros have the smallest scale, so that it is not the largest of several tokens
    largest = jnp.maximum(largest / _MAX_CODE, _MIN_SCALE / 2)
    _, exponent = jnp.frexp(largest)  # largest < 2 ** exponent
    return jnp.ldexp(jnp.float32(1), exponent)


def encode(x: Array, scale: Float32[Array, "..."]) -> Array:
    """Codes of x / scale."""
    return (x.astype(jnp.float32) * (1 / scale)).astype(_CODES)


def check_model(hidden_size: int, name: str = NAME) -> None:
    """Raises: UserError if no matrix of the model would be multiplied in 8 bits."""
    if not can_multiply(hidden_size):
        raise UserError(
            f"model.linear_dtype = {name}: the model's hidden_size, {hidden_size}, must be a "
            f"multiple of {DIM_MULTIPLE}. Leave it out."
        )


def check_devices(devices: Sequence[Any], name: str = NAME) -> None:
    """Raises: UserError if they cannot multiply 8-bit floats."""
    device = devices[0]
    if device.platform != "gpu":
        return
    capability = tuple(map(int, str(device.compute_capability).split(".")))
    if capability < MIN_COMPUTE_CAPABILITY:
        raise UserError(
            f"model.linear_dtype = {name}: {device.device_kind} has no products of 8-bit floats. "
            "Leave it out, or use Ada, Hopper or Blackwell GPUs."
        )
