"""Comparison of a kernel for experts with XLA's loop over tiles, on one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsp.blocks.config import ModelConfig
from jaxsp.experts import kernels

TOLERANCE = 2e-2
"""Maximum of `ExpertsCheck.measure_errors`. Rounding to bfloat16 gives up to 5e-3 on a CPU; an
expert's tile that is multiplied with another expert's matrix gives more than 0.1."""

_CHOSEN = [[0, 2]] * 70 + [[2, 3]] * 90 + [[3, 0]]
"""Experts of each token: one of them has two tiles, and one has no tokens. No last tile is full."""

_NUM_EXPERTS = 4

_RANK = 8
"""Rank of an adapter beside the last matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsCheck:
    """Kernel, and sizes of experts' matrices, that are checked on a few tokens."""

    kernel: str
    width: int
    size: int
    has_bias: bool

    @classmethod
    def of_model(cls, model: ModelConfig) -> "ExpertsCheck":
        assert model.experts is not None, "has experts"
        sizes = model.experts
        return cls(
            kernel=sizes.kernel, width=model.hidden_size, size=sizes.size, has_bias=sizes.has_bias
        )

    def measure_errors(self, device: jax.Device) -> dict[str, float]:
        """Relative root mean square errors of the output and the gradients, by name.

        The reference computes in float32.
        """
        inputs = jax.device_put(self._make_inputs(), device)
        actual = self._compute(self.kernel, inputs)
        in_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
        expected = self._compute("xla", in_float32)
        return {name: _find_error(actual[name], expected[name]) for name in expected}

    def _compute(self, kernel: str, inputs: dict[str, Any]) -> dict[str, Array]:
        experts_TK = jnp.asarray(_CHOSEN, jnp.int32)
        apply = functools.partial(kernels.find(kernel), _run_block)

        def run(inputs: dict[str, Any]) -> dict[str, Array]:
            compute = lambda weights, x, shares: apply(weights, x, shares, experts_TK)
            out, pull = jax.vjp(compute, inputs["weights"], inputs["x"], inputs["shares"])
            dweights, dx, dshares = pull(inputs["dout"])
            gradients = {f"d{name}": gradient for name, gradient in dweights.items()}
            return {"out": out, "dx": dx, "dshares": dshares, **gradients}

        # The reference is float32 in float32
        with jax.default_matmul_precision("float32" if kernel == "xla" else None):
            return jax.jit(run)(inputs)

    def _make_inputs(self) -> dict[str, Any]:
        """Inputs and the output's gradient, as bfloat16 has them; shares in float32."""
        rng = np.random.default_rng(0)
        draw = lambda *shape: np.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
        D = self.width
        F = self.size
        weights = {
            "up": draw(_NUM_EXPERTS, F, D) * np.asarray(D**-0.5, jnp.bfloat16),
            "down": draw(_NUM_EXPERTS, D, F) * np.asarray(F**-0.5, jnp.bfloat16),
            "down_a": draw(_NUM_EXPERTS, _RANK, F) * np.asarray(F**-0.5, jnp.bfloat16),
            "down_b": draw(_NUM_EXPERTS, D, _RANK) * np.asarray(_RANK**-0.5, jnp.bfloat16),
        }
        if self.has_bias:
            weights["up_bias"] = draw(_NUM_EXPERTS, F)
        num_tokens = len(_CHOSEN)
        shares = rng.random((num_tokens, 2), np.float32)
        return {
            "weights": weights,
            "x": draw(num_tokens, D),
            "shares": shares,
            "dout": draw(num_tokens, D),
        }


def _run_block(x: Array, weights: dict[str, Any]) -> Array:
    hidden = weights["up"].multiply(x)
    if "up_bias" in weights:
        hidden = weights["up_bias"].add_to(hidden)
    hidden = jax.nn.silu(hidden)
    adapted = weights["down_b"].multiply(weights["down_a"].multiply(hidden))
    return weights["down"].multiply(hidden) + adapted


def _find_error(actual: Array, expected: Array) -> float:
    """Relative root mean square error; infinite if a value is NaN."""
    difference = np.float64(actual) - np.float64(expected)
    error = np.linalg.norm(difference) / np.linalg.norm(np.float64(expected))
    return float(np.nan_to_num(error, nan=np.inf))
