"""Products of tiles of tokens with the matrices of their experts, in XLA on any device.

A loop multiplies a block of tiles at a time, so that copies of their experts' matrices exist for
that block only. Sums over tokens are float32, in a fixed order.

Dims: N tiles, t places of a tile, E experts, i and o of a matrix, b tiles of a block.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(
    block: int,
    x_Nti: Float[Array, "N t i"],
    matrices_Eoi: Float[Array, "E o i"],
    experts_N: Int32[Array, "N"],
) -> Float[Array, "N t o"]:
    """Each tile times the transposed matrix of its expert. Args: block: number of tiles of a block."""
    return _map_blocks("bti,boi->bto", block, x_Nti, matrices_Eoi, experts_N)


def _multiply_forward(
    block: int, x_Nti: Array, matrices_Eoi: Array, experts_N: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return multiply(block, x_Nti, matrices_Eoi, experts_N), (x_Nti, matrices_Eoi, experts_N)


def _multiply_backward(
    block: int, residuals: tuple[Array, Array, Array], dy_Nto: Array
) -> tuple[Array, Array, None]:
    x_Nti, matrices_Eoi, experts_N = residuals
    dx_Nti = _map_blocks("bto,boi->bti", block, dy_Nto, matrices_Eoi, experts_N)
    return dx_Nti, _sum_outer_products(dy_Nto, x_Nti, matrices_Eoi, experts_N), None


multiply.defvjp(_multiply_forward, _multiply_backward)


def add_biases(
    y_Nto: Float[Array, "N t o"], biases_Eo: Float[Array, "E o"], experts_N: Int32[Array, "N"]
) -> Float[Array, "N t o"]:
    """Adds the bias of its expert to each tile, in float32; products with 0 and 1 in place of a
    gather, so that the gradient has a fixed order of additions."""
    is_expert_NE = jax.nn.one_hot(experts_N, len(biases_Eo))
    bias_No = jnp.einsum(
        "NE,Eo->No",
        is_expert_NE,
        biases_Eo.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    y32 = y_Nto.astype(jnp.float32) + jnp.broadcast_to(bias_No[:, None], y_Nto.shape)
    return y32.astype(y_Nto.dtype)


def _map_blocks(
    equation: str, block: int, x_Nti: Array, matrices_Eoi: Array, experts_N: Array
) -> Float[Array, "N t o"]:
    """The product of each tile with its matrix."""
    num_tiles, tile, _ = x_Nti.shape
    read = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=block)

    def multiply_block(number: Array, y: Array) -> Array:
        first = number * block
        matrices = matrices_Eoi[read(experts_N, first)]
        product = jnp.einsum(equation, read(x_Nti, first), matrices)
        return jax.lax.dynamic_update_slice_in_dim(y, product, first, 0)

    width = matrices_Eoi.shape[1 if equation.endswith("o") else 2]
    y = jax.lax.empty((num_tiles, tile, width), x_Nti.dtype)
    return jax.lax.fori_loop(0, num_tiles // block, multiply_block, y)


def _sum_outer_products(
    dy_Nto: Array, x_Nti: Array, matrices_Eoi: Array, experts_N: Array
) -> Float[Array, "E o i"]:
    """Gradients of the matrices."""

    def add_tile(tile: Array, sums: Array) -> Array:
        product = jnp.einsum(
            "to,ti->oi", dy_Nto[tile], x_Nti[tile], preferred_element_type=jnp.float32
        )
        return sums.at[experts_N[tile]].add(product)

    zeros = jnp.zeros(matrices_Eoi.shape, jnp.float32)
    sums = jax.lax.fori_loop(0, len(experts_N), add_tile, zeros)
    return sums.astype(matrices_Eoi.dtype)
