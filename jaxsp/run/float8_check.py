"""Comparison of products in 8-bit floats with products in float32, on one device."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.blocks import float8
from jaxsp.training import compile_options

TOLERANCE = 0.08
"""Maximum of `measure_errors`. Rounding of both factors gives up to 0.04."""

_NUM_TOKENS = 256


def measure_errors(device: jax.Device, dim_in: int, dim_out: int) -> dict[str, float]:
    """Largest relative errors of a token's product, of its gradient and of a row of the matrix's
    gradient, by name.

    The tokens have very different sizes, so that each needs its own scale.
    """
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-20, 20, (_NUM_TOKENS, 1)))
    shapes = (_NUM_TOKENS, dim_in), (dim_out, dim_in), (_NUM_TOKENS, dim_out)
    drawn = [rng.standard_normal(shape) for shape in shapes]
    drawn[0] *= sizes
    drawn[2] /= sizes
    inputs = [jax.device_put(np.asarray(a, jnp.bfloat16), device) for a in drawn]

    def run(x: jax.Array, weight: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(float8.multiply, x, weight.astype(jnp.float32))
        return y, *pull(dy)

    # The kernels of the training step
    options = compile_options.NO_TRITON if device.platform == "gpu" else None
    compiled = jax.jit(run, compiler_options=options)
    x, weight, dy = (np.asarray(a, np.float32) for a in inputs)
    expected = x @ weight.T, dy @ weight, dy.T @ x
    actual = (np.asarray(a, np.float32) for a in compiled(*inputs))
    return {
        name: _find_error(own, other)
        for name, own, other in zip(("y", "dx", "dW"), actual, expected, strict=True)
    }


def _find_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest relative error of a row."""
    difference = np.linalg.norm(actual - expected, axis=-1)
    return float(np.max(difference / np.linalg.norm(expected, axis=-1)))
