"""Hopper kernels of the delta rule compute what plain XLA does, in JAX's interpreter.

Nothing here shows that a GPU computes the same: a run compares them there before the first step.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.core.layout import KEPT_ORDER
from jaxsp.delta_rule import delta_rule, kernels
from jaxsp.delta_rule.spans import RowSpans
from tests import batches
from tests.delta_rule import interpreted

TOKENS = 120
HOPPER = types.SimpleNamespace(compute_capability="9.0")


def differentiate(rule, inputs):
    *arrays, dout, is_first = map(jnp.asarray, inputs)
    spans = RowSpans(seq=1, layout=KEPT_ORDER, tokens_per_device=TOKENS)
    out, pull = jax.vjp(lambda *x: rule(*x, is_first, spans=spans), *arrays)
    return out, *pull(dout.astype(out.dtype))


@pytest.fixture(scope="module")
def inputs():
    """Segments of 1 to 59 tokens, one of them in two chunks; and padding."""
    rng = np.random.default_rng(0)
    normal = lambda heads: np.array(rng.standard_normal((1, TOKENS, heads, 64)), jnp.bfloat16)
    is_first = np.isin(np.arange(TOKENS), (3, 20, 21, 80))[None]
    q, k, v, dout = map(normal, (1, 1, 2, 2))
    g, beta = rng.random((2, 1, TOKENS, 2), np.float32)
    padding = np.arange(TOKENS) < 3
    for array in (q, k, v, g, beta, dout):
        array[:, padding] = 0
    return q, k, v, -0.2 * g, beta, dout, is_first


@pytest.mark.parametrize("max_chunks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_outputs_and_gradients_are_those_of_the_recurrence(inputs, max_chunks):
    """With one section, and with two, between which states and their gradients pass."""
    hopper = pytest.importorskip("jaxsp.delta_rule.hopper", reason="needs jax-linear-attention")
    with interpreted.interpret_kernels():
        rule = functools.partial(hopper.compute, max_chunks=max_chunks)
        actual = jax.jit(functools.partial(differentiate, rule))(inputs)
    with jax.default_matmul_precision("float32"):
        wide = [x if x.dtype == bool else x.astype(np.float32) for x in inputs]
        expected = jax.jit(functools.partial(differentiate, delta_rule.compute))(wide)
    for name, *pair in zip(("out", "q", "k", "v", "g", "beta"), actual, expected, strict=True):
        assert batches.relative_error(*map(np.float32, pair)) < 8e-3, name


def test_kernels_are_chosen_where_they_run(monkeypatch):
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: "0.1.0")
    monkeypatch.setattr(kernels.jax, "__version_info__", (0, 12, 0))
    choose = functools.partial(
        kernels.choose, sizes=(128, 128), dtype="bfloat16", devices=[HOPPER] * 2
    )
    assert choose("auto") == choose("jla") == "jla"
    assert choose("xla") == "xla"
    for change, says in (
        ({"devices": [HOPPER, types.SimpleNamespace(compute_capability="10.0")]}, "Hopper"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"sizes": (96, 192)}, "96 and 192"),
    ):
        assert choose("auto", **change) == "xla"
        with pytest.raises(UserError, match=says):
            choose("jla", **change)
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: "0.2.0")
    assert choose("auto") == "xla"
