"""Linear layers, the adapters beside them, and dropout before adapters.

Dims: i and o, a matrix's inputs and outputs; r and s, an adapter's rank; else as in
`blocks.layers`.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jaxsp.blocks import float8, layers
from jaxsp.blocks.config import Lora, ModelConfig
from jaxsp.blocks.layers import Parameter, RowGroups, declare_param, scale

Keys = UInt32[Array, "B l two"]
"""Data of one random key for each token, as of `jax.random.key_data`."""


class Linear(nnx.Module):
    """x -> x W^T + b, with an adapter if it is one of `Lora.targets`."""

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        hf_name: str,
        bias: bool,
        config: ModelConfig,
        hf_rows: RowGroups | None = None,
        fused_with: "Linear | None" = None,
    ):
        """Args: fused_with: another part of the same tensor in Hugging Face's files."""
        is_float8 = config.linear_dtype is not None and float8.can_multiply(dim_in, dim_out)
        lora = config.lora if config.lora and hf_name in config.lora.targets else None
        matrix = Parameter(
            shape=(dim_out, dim_in),
            hf_name=f"{hf_name}.weight",
            hf_rows=hf_rows,
            std=config.initializer_range,
            is_projection=True,
            # DoRA needs the norms of the matrix itself
            is_float8=is_float8 and not (lora and lora.is_dora),
        )
        self.weight = declare_param(matrix)
        self.multiply: Callable[[Array, Any], Array] = multiply
        if is_float8:
            self.multiply = functools.partial(
                float8.multiply, is_gradient_float8=config.linear_dtype == float8.ALL
            )
        vector = Parameter(shape=(dim_out,), hf_name=f"{hf_name}.bias", hf_rows=hf_rows)
        self.bias = declare_param(vector) if bias else None
        adapter: LoraAdapter | None = None
        if lora is not None:
            shared = None if fused_with is None else fused_with.adapter
            adapter = LoraAdapter(matrix, lora, shared=shared)
        self.adapter: LoraAdapter | None = adapter

    def __call__(self, x: Float[Array, "B l i"], keys: Keys | None = None) -> Float[Array, "B l o"]:
        """Args: keys: of the tokens, for dropout before the adapter; None: no dropout."""
        if self.adapter is None:
            y = self.multiply(x, self.weight.get_value())
        else:
            y = self.adapter(x, self.weight.get_value(), keys, product=self.multiply)
        if self.bias is None:
            return y
        # In float32, so that the bias's gradient, a sum over tokens, is summed in float32.
        y32 = y.astype(jnp.float32)
        bias = jnp.broadcast_to(self.bias[...].astype(jnp.float32), y.shape)
        return (y32 + bias).astype(y.dtype)


@jax.custom_vjp
def multiply(x: Float[Array, "... i"], weight_oi: Float[Array, "o i"]) -> Float[Array, "... o"]:
    """x W^T in the dtype of x; the gradient of W has the dtype of W: see `layers.Gather`."""
    return jnp.einsum("...i,oi->...o", x, weight_oi.astype(x.dtype))


def _multiply_forward(x: Array, weight_oi: Array) -> tuple[Array, tuple[Array, Array]]:
    product = jnp.einsum("...i,oi->...o", x, weight_oi.astype(x.dtype))
    return checkpoint_name(product, layers.PRODUCT_NAME), (x, weight_oi)


def _multiply_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight_oi = residuals
    dx = jnp.einsum("...o,oi->...i", dy, weight_oi.astype(x.dtype))
    # As matrices: in a sum over several dims, XLA for CPUs writes a transposed copy of dy
    dy_To, x_Ti = (y.reshape(-1, y.shape[-1]) for y in (dy, x))
    return dx, jnp.einsum("To,Ti->oi", dy_To, x_Ti, preferred_element_type=weight_oi.dtype)


multiply.defvjp(_multiply_forward, _multiply_backward)


# Products of activations with a frozen matrix and the adapter beside it, as one product:
#
#     y  = x W^T + s (x A^T) B^T
#     dx = dy W + s (dy B) A
#
# The second terms are little arithmetic, but each reads and writes an array as large as the first.
# So the wider side of a matrix is multiplied once: x and s x A^T beside each other with W and B
# beside each other, and the same for dx. Beside each other is a copy of the narrower side.

_MIN_RATIO = 2
"""Minimum ratio of the sides of a matrix for which the copy pays."""

_RANK_MULTIPLE = 8
"""Divisor of ranks that GPUs multiply fast beside the matrix."""


def is_joined_faster(x: Float[Array, "... i"], weight_oi: Float[Array, "o i"], rank: int) -> bool:
    """True if one product is faster: for gate, up and down of most models and many tokens."""
    narrow, wide = sorted(weight_oi.shape)
    num_tokens = math.prod(x.shape[:-1])
    # The copy of the matrix is small beside the activations
    return rank % _RANK_MULTIPLE == 0 and wide >= _MIN_RATIO * narrow and 2 * num_tokens >= wide


def multiply_adapted(
    x: Float[Array, "... i"],
    weight_oi: Float[Array, "o i"],
    a_ri: Float[Array, "r i"],
    b_or: Float[Array, "o r"],
    scale: float,
) -> Float[Array, "... o"]:
    """x W^T + scale * (x A^T) B^T in the dtype of x; gradients of A and B have their dtypes.

    Precision: like the frozen product's; intermediate values of dim r are in the dtype of x.
    """
    product = _multiply_adapted(x, weight_oi, a_ri, b_or, scale)
    return checkpoint_name(product, layers.PRODUCT_NAME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _multiply_adapted(x: Array, weight_oi: Array, a_ri: Array, b_or: Array, scale: float) -> Array:
    return _adapted_forward(x, weight_oi, a_ri, b_or, scale)[0]


def _adapted_forward(
    x: Array, weight_oi: Array, a_ri: Array, b_or: Array, scale: float
) -> tuple[Array, tuple[Array, ...]]:
    dtype = x.dtype
    reduced = layers.scale(jnp.einsum("...i,ri->...r", x, a_ri.astype(dtype)), scale)
    o, i = weight_oi.shape
    if o > i:
        joined = jnp.concatenate([x, reduced], axis=-1)
        y = jnp.einsum("...i,oi->...o", joined, _beside(weight_oi, b_or, dtype))
    else:
        y = jnp.einsum("...i,oi->...o", x, weight_oi.astype(dtype))
        y = y + jnp.einsum("...r,or->...o", reduced, b_or.astype(dtype))
    return y, (x, weight_oi, a_ri, b_or, reduced)


def _adapted_backward(
    scale: float, residuals: tuple[Array, ...], dy: Array
) -> tuple[Array, Array, Array, Array]:
    x, weight_oi, a_ri, b_or, reduced = residuals
    dtype = x.dtype
    o, i = weight_oi.shape
    if o > i:
        joined = jnp.einsum("...o,oi->...i", dy, _beside(weight_oi, b_or, dtype))
        dreduced = layers.scale(joined[..., i:], scale)
        dx = joined[..., :i] + jnp.einsum("...r,ri->...i", dreduced, a_ri.astype(dtype))
    else:
        dreduced = layers.scale(jnp.einsum("...o,or->...r", dy, b_or.astype(dtype)), scale)
        joined = jnp.concatenate([dy, dreduced], axis=-1)
        below = jnp.concatenate([weight_oi.astype(dtype), a_ri.astype(dtype)])
        dx = jnp.einsum("...o,oi->...i", joined, below)
    return (
        dx,
        jnp.einsum("...o,...i->oi", dy, x, preferred_element_type=weight_oi.dtype),
        jnp.einsum("...r,...i->ri", dreduced, x, preferred_element_type=a_ri.dtype),
        jnp.einsum("...o,...r->or", dy, reduced, preferred_element_type=b_or.dtype),
    )


_multiply_adapted.defvjp(_adapted_forward, _adapted_backward)


def _beside(weight_oi: Array, b_or: Array, dtype: jnp.dtype) -> Array:
    return jnp.concatenate([weight_oi.astype(dtype), b_or.astype(dtype)], axis=1)


class LoraAdapter(nnx.Module):
    """Adapter of a projection: see `blocks.config.Lora`. Names are those of PEFT.

    A has random weights of the variance that PEFT gives them, B is 0, and DoRA's magnitudes are the
    norms of the rows of W (`training.train_state.init_magnitudes`).
    """

    def __init__(self, weight: Parameter, lora: Lora, *, shared: "LoraAdapter | None"):
        """Args: shared: adapter of another part of the same tensor, which has the same A."""
        dim_out, dim_in = weight.shape
        name = weight.hf_name.removesuffix(".weight")
        a = Parameter(
            shape=(lora.rank, dim_in),
            hf_name=f"{name}.lora_A.weight",
            std=(3 * dim_in) ** -0.5,
            is_adapter=True,
        )
        b = Parameter(
            shape=(dim_out, lora.rank),
            hf_name=f"{name}.lora_B.weight",
            hf_rows=weight.hf_rows,
            is_adapter=True,
        )
        self.a: nnx.Param = declare_param(a) if shared is None else shared.a
        self.b = declare_param(b)
        magnitude = Parameter(
            shape=(dim_out,),
            hf_name=f"{name}.lora_magnitude_vector",
            hf_rows=weight.hf_rows,
            is_adapter=True,
        )
        self.magnitude = declare_param(magnitude) if lora.is_dora else None
        self.scale = lora.scale
        self.dropout = lora.dropout
        self.name = name

    def __call__(
        self,
        x: Float[Array, "B l i"],
        weight_oi: Any,
        keys: Keys | None,
        *,
        product: Callable[[Array, Any], Array],
    ) -> Float[Array, "B l o"]:
        """The adapted product.

        Args:
            weight_oi: the frozen weight, in a form that `product` takes.
            keys: of the tokens, for dropout; None: no dropout.
            product: function that multiplies x and the frozen weight.
        """
        a_ri = self.a[...]
        b_or = self.b[...]
        is_plain = keys is None and product is multiply
        if is_plain and is_joined_faster(x, weight_oi, a_ri.shape[0]):
            y = multiply_adapted(x, weight_oi, a_ri, b_or, self.scale)
        else:
            y = product(x, weight_oi)
            if keys is not None:
                x = drop(x, keys, name=self.name, rate=self.dropout)
            y = y + scale(multiply(multiply(x, a_ri), b_or), self.scale)
        if self.magnitude is None:
            return y
        norm_o = jax.lax.stop_gradient(self._row_norms(weight_oi, a_ri, b_or))
        # A row of zeros has no direction: it stays zero
        is_zero_o = norm_o == 0
        divisor_o = jnp.where(is_zero_o, 1, norm_o)
        factor_o = self.magnitude[...].astype(jnp.float32) / divisor_o
        factor_o = jnp.where(is_zero_o, 0, factor_o)
        # In float32 and broadcast, so that the gradient is summed over tokens in float32
        return (y.astype(jnp.float32) * jnp.broadcast_to(factor_o, y.shape)).astype(y.dtype)

    def _row_norms(self, weight_oi: Array, a_ri: Array, b_or: Array) -> Float32[Array, "o"]:
        """Norms of the rows of W + scale * B A, without that matrix."""
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        a_ri = a_ri.astype(weight_oi.dtype)
        b_or = self.scale * b_or.astype(jnp.float32)
        weight_squares_o = jnp.sum(jnp.square(weight_oi.astype(jnp.float32)), axis=-1)
        mixed_or = product("oi,ri->or", weight_oi, a_ri)
        a_squares_rs = product("ri,si->rs", a_ri, a_ri)
        rest_o = jnp.sum(b_or * (2 * mixed_or + b_or @ a_squares_rs), axis=-1)
        # Rounding makes the sum slightly negative where W + scale * B A nearly cancels
        return jnp.sqrt(jnp.maximum(weight_squares_o + rest_o, 0))


def declare_fused(linear: functools.partial, rows: list[int], *, hf_name: str) -> list[Linear]:
    """Matrices that are parts of one tensor in Hugging Face's files, below each other."""
    parts: list[Linear] = []
    for index, size in enumerate(rows):
        part = linear(
            size,
            hf_name=hf_name,
            hf_rows=RowGroups(sum(rows[:index]), size, sum(rows)),
            fused_with=parts[0] if parts else None,
        )
        parts.append(part)
    return parts


# Dropout, whose mask depends on the step, the row and the token, and not on the mesh


def make_token_keys(
    *,
    seed: int,
    step: Int32[Array, ""],
    rows_B: Int32[Array, "B"],
    tokens_l: Int32[Array, "l"],
) -> Keys:
    """Keys of tokens in a step. Args: rows_B: rows' indices in the step. tokens_l: in the row."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    row_keys_B = jax.vmap(jax.random.fold_in, (None, 0))(step_key, rows_B)
    return jax.random.key_data(fold(row_keys_B, tokens_l))


def fold_layer(keys: Keys | None, layer: Int32[Array, ""] | None) -> Keys | None:
    """Keys of the tokens in a layer; None without dropout."""
    if keys is None or layer is None:
        return None
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))
    return jax.random.key_data(fold(jax.random.wrap_key_data(keys), layer))


def drop(x: Float[Array, "B l i"], keys: Keys, *, name: str, rate: float) -> Float[Array, "B l i"]:
    """x with a fraction `rate` of its elements set to 0, and the others divided by 1 - rate.

    Args: name: what is dropped; different names have different masks.
    """
    salt = zlib.crc32(name.encode())

    def draw(key_data: UInt32[Array, "two"]) -> UInt32[Array, "i"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), salt)
        return jax.random.bits(key, x.shape[-1:], jnp.uint32)

    bits = jax.vmap(jax.vmap(draw))(keys)
    is_kept = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(is_kept, x / jnp.asarray(1 - rate, x.dtype), 0)
