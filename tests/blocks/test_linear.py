"""Linear layers: the compiled backward pass."""

import jax
import jax.numpy as jnp

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
