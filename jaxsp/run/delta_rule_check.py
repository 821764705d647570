"""Comparison of the delta rule with its recurrence, token by token, on one device."""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsp.blocks.block_config import DeltaNetConfig
from jaxsp.core.layout import KEPT_ORDER
from jaxsp.delta_rule import delta_rule
from jaxsp.delta_rule.spans import RowSpans, find_segments
from jaxsp.run import segment_errors

TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-4}
"""Maximum of `DeltaRuleCheck.measure_errors`, by compute dtype.

Rounding gives up to 5.1e-3 in bfloat16 and 7.7e-7 in float32 on a CPU, for keys of 16 and of 128;
with strengths up to 2, 6.5e-3 and 5.7e-7 for keys of 16 and of 96. A GPU adds up in another order.
A state that passes to the next segment gives more than 0.1.
"""

_ROW_TOKENS = 1100
"""Tokens of a row: more than one section, the last of which is padded."""

_STARTS_BM = np.array([[3, 40, 41, 700]], np.int32)
_LENGTHS_BM = np.array([[37, 1, 600, 390]], np.int32)
"""Segments within a chunk, of one token and over two sections; with padding around them."""

_NAMES = ("q", "k", "v", "g", "beta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRuleCheck:
    """Sizes of the heads, and the dtype, that are checked on one small packed row."""

    num_key_heads: int
    heads_per_key_head: int
    key_size: int
    value_size: int
    strength_scale: float
    """Maximum of the strengths."""
    dtype: jnp.dtype
    """Dtype in which the rule computes; results are float32."""

    @classmethod
    def of_model(cls, sizes: DeltaNetConfig, dtype: jnp.dtype) -> "DeltaRuleCheck":
        """Makes a check with few of a model's heads."""
        return cls(
            num_key_heads=min(2, sizes.num_key_heads),
            heads_per_key_head=sizes.num_heads // sizes.num_key_heads,
            key_size=sizes.key_size,
            value_size=sizes.value_size,
            strength_scale=sizes.strength_scale,
            dtype=dtype,
        )

    @property
    def tolerance(self) -> float:
        return TOLERANCES[str(self.dtype)]

    def measure_errors(
        self, device: jax.Device, options: Mapping[str, Any] = types.MappingProxyType({})
    ) -> dict[str, float]:
        """Errors of the output and the gradients, by name: see `segment_errors`.

        Args: options: XLA's compile options.
        """
        spans = RowSpans(seq=1, layout=KEPT_ORDER, tokens_per_device=_ROW_TOKENS)
        rule = functools.partial(delta_rule.compute, spans=spans)
        segment_BL = np.full((1, _ROW_TOKENS), -1)
        for number, (start, length) in enumerate(zip(_STARTS_BM[0], _LENGTHS_BM[0], strict=True)):
            segment_BL[0, start : start + length] = number
        actual, expected = (
            self._compute(function, device, dtype, options)
            for function, dtype in ((rule, self.dtype), (_recur, jnp.dtype(jnp.float32)))
        )
        return {
            name: segment_errors.find_largest_error(actual[name], expected[name], segment_BL)
            for name in expected
        }

    def _compute(
        self,
        function: Callable[..., Array],
        device: jax.Device,
        dtype: jnp.dtype,
        options: Mapping[str, Any],
    ) -> dict[str, np.ndarray]:
        """Output and gradients of a function of the signature of `delta_rule.compute`."""

        def run(inputs: Mapping[str, Array]) -> list[Array]:
            tokens = jnp.arange(_ROW_TOKENS, dtype=jnp.int32)
            segments = find_segments(jnp.asarray(_STARTS_BM), jnp.asarray(_LENGTHS_BM), tokens)
            inside = lambda x: segments.inside_Bl.reshape(1, -1, *(1,) * (x.ndim - 2))
            clear = lambda x: jnp.where(inside(x), x, jnp.zeros((), x.dtype))
            cast = lambda x: x.astype(dtype if x.dtype == jnp.bfloat16 else jnp.float32)
            *arrays, dout = (cast(inputs[name]) for name in (*_NAMES, "dout"))
            out, pull = jax.vjp(lambda *x: function(*map(clear, x), segments.is_first_Bl), *arrays)
            return [x.astype(jnp.float32) for x in (out, *pull(clear(dout)))]

        inputs = jax.device_put(self._make_inputs(), device)
        # As in a step
        with jax.default_matmul_precision("float32" if dtype == jnp.float32 else None):
            compiled = jax.jit(run).lower(inputs).compile(compiler_options=dict(options))
        names = ("out", *(f"d{name}" for name in _NAMES))
        return dict(zip(names, map(np.asarray, compiled(inputs)), strict=True))

    def _make_inputs(self) -> dict[str, np.ndarray]:
        """Inputs and the output's gradient, as bfloat16 has them; decays and strengths in
        float32."""
        rng = np.random.default_rng(0)
        G = self.num_key_heads
        H = self.heads_per_key_head * G
        normal = lambda *dims: np.asarray(
            rng.standard_normal((1, _ROW_TOKENS, *dims), np.float32), jnp.bfloat16
        )
        uniform = lambda: rng.random((1, _ROW_TOKENS, H), np.float32)
        return {
            "q": normal(G, self.key_size),
            "k": normal(G, self.key_size),
            "v": normal(H, self.value_size),
            "g": -0.1 * uniform(),
            "beta": np.float32(self.strength_scale) * uniform(),
            "dout": normal(H, self.value_size),
        }


def _recur(q: Array, k: Array, v: Array, g: Array, beta: Array, is_first: Array) -> Array:
    """Outputs of rows, token by token: see `delta_rule.chunk`."""
    num_values = v.shape[2] // k.shape[2]

    def prepare(x: Array) -> Array:
        unit = x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
        return jnp.repeat(unit, num_values, axis=2)

    @jax.checkpoint  # keeps one state for each token
    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta, is_first = token
        old = jnp.where(is_first[:, None, None, None], 0, state) * jnp.exp(g)[..., None, None]
        found = jnp.einsum("bhkv,bhk->bhv", old, k)
        state = old + jnp.einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - found))
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    tokens = (prepare(q) * q.shape[-1] ** -0.5, prepare(k), v, g, beta, is_first)
    first = jnp.zeros((*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]), v.dtype)
    _, out = jax.lax.scan(step, first, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(out, 0, 1)
