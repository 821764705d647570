"""Linear layers: their compiled backward pass, and frozen matrix and adapter as one product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks import linear


def test_the_gradient_of_a_weight_needs_no_transposed_copy_on_cpus():
    """Copies took half of the time of an MLP's backward pass."""
    x = jax.ShapeDtypeStruct((1, 64, 32), jnp.float32)
    weight_oi = jax.ShapeDtypeStruct((48, 32), jnp.float32)
    dy = jax.ShapeDtypeStruct((1, 64, 48), jnp.float32)

    def differentiate(x, weight_oi, dy):
        return jax.vjp(linear.multiply, x, weight_oi)[1](2 * dy)

    program = jax.jit(differentiate).lower(x, weight_oi, dy).compile().as_text()
    assert " dot(" in program
    assert " transpose(" not in program
    assert " copy(" not in program


SCALE = 0.7
RANK = 8


def separate(x, weight, a, b):
    return x @ weight.T + SCALE * ((x @ a.T) @ b.T)


@pytest.mark.parametrize(("o", "i"), [(48, 20), (20, 48)], ids=["wide", "tall"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_product_is_the_sum_of_two(o, i, dtype):
    """With bfloat16 activations, gradients of A and B are float32."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    x, weight, dy = (y.astype(dtype) for y in (draw(2, 30, i), draw(o, i), draw(2, 30, o)))
    a = draw(RANK, i)
    b = draw(o, RANK)
    assert linear.is_joined_faster(x, weight, RANK)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, *inputs):
        dy, *inputs = inputs
        y, pull = jax.vjp(function, *inputs)
        return y, *pull(dy)

    joined = run(functools.partial(linear.multiply_adapted, scale=SCALE), dy, x, weight, a, b)
    inputs = [y.astype(jnp.float32) for y in (dy, x, weight, a, b)]
    with jax.default_matmul_precision("float32"):
        expected = run(separate, *inputs)
    limit = 1e-6 if dtype == "float32" else 2e-2
    for actual, other in zip(joined, expected, strict=True):
        difference = np.linalg.norm(np.asarray(actual, np.float32) - other)
        assert difference < limit * np.linalg.norm(other)
    assert [y.dtype.name for y in joined] == [dtype, dtype, dtype, "float32", "float32"]


def test_few_tokens_square_matrices_and_odd_ranks_have_two_products():
    wide = jnp.zeros((100, 50))
    assert linear.is_joined_faster(jnp.zeros((5, 10, 50)), wide, 16)
    assert not linear.is_joined_faster(jnp.zeros((4, 10, 50)), wide, 16)
    assert not linear.is_joined_faster(jnp.zeros((50, 10, 60)), jnp.zeros((100, 60)), 16)
    assert not linear.is_joined_faster(jnp.zeros((50, 10, 50)), wide, 12)
