"""DoRA of matrices with rows of zeros, which PEFT 0.21.2 divides by their norms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsp.blocks.config import Lora
from jaxsp.blocks.linear import Linear
from jaxsp.run import export_command
from tests import batches

NAME = "self_attn.o_proj"
SCALE = 2.0
MODEL = dataclasses.replace(
    batches.model(), lora=Lora(rank=2, scale=SCALE, targets=(NAME,), is_dora=True)
)

rng = np.random.default_rng(3)
WEIGHT, A, B = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 8), (2, 8), (6, 2)))


def adapted_product(weight, b, magnitude):
    """The matrix that a projection multiplies with, and gradients of the adapter."""
    linear = Linear(8, 6, hf_name=NAME, bias=False, config=MODEL)
    graphdef, _ = nnx.split(linear)
    x = jnp.eye(8)[None]

    def apply(adapter):
        values = {"weight": jnp.asarray(weight), "adapter": adapter}
        module = nnx.merge(graphdef, nnx.State(jax.tree.map(jnp.asarray, values)))
        return module(x)

    adapter = {"a": jnp.asarray(A), "b": jnp.asarray(b), "magnitude": jnp.asarray(magnitude)}
    y, pull = jax.vjp(apply, adapter)
    return y[0].T, pull(jnp.ones_like(y))[0]


def test_rows_of_zeros_stay_zero_and_have_finite_gradients():
    weight = WEIGHT.copy()
    weight[[1, 4]] = 0
    magnitude = np.linalg.norm(weight, axis=1)
    product, gradients = adapted_product(weight, np.zeros_like(B), magnitude)
    np.testing.assert_allclose(product, weight, rtol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    assert (np.asarray(gradients["b"])[[0, 2, 3, 5]] != 0).all()
    merged = export_command.merge_matrix(weight, A, 0 * B, scale=SCALE, magnitude_o=magnitude)
    np.testing.assert_allclose(merged, weight, rtol=1e-6)


def test_rows_that_the_adapter_cancels_are_finite():
    """Rounding makes the sum of the norm's terms negative in about half of these rows."""
    weight = -SCALE * (B @ A)
    product, gradients = adapted_product(weight, B, np.ones(6, np.float32))
    assert np.isfinite(product).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
