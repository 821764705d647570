"""Memory of traced programs: peaks of small functions, and what layers save."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxsp.planning import estimate, live_bytes
from tests import batches
from tests.training import runs

X = jax.ShapeDtypeStruct((100, 100), jnp.float32)
SIZE = 40_000


def run_loop(x):
    return jax.lax.scan(lambda state, _: (jnp.tanh(state @ x), None), x, length=3)[0]


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda x: jnp.exp(x) + 1, 1),
        (lambda x: x @ x, 1),
        (lambda x: jnp.exp(x) @ x, 2),  # both operands are in memory
        (lambda x: jnp.tanh(x @ x), 1),  # in place
        (lambda x: (x @ x).T @ x, 2),
        (lambda x: ((x @ x) @ x) @ x, 2),
        (run_loop, 2),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x), 2),
        (lambda x: (x @ x).at[3].set(0), 1),
        (jax.jit(lambda x: jnp.sum(jnp.exp(x) * x)), 0),
    ],
)
def test_the_peak_counts_arrays_that_are_in_memory_at_once(function, arrays):
    assert live_bytes.find_peak(jax.make_jaxpr(function)(X)) // SIZE == arrays


MODEL = batches.model(qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm="none")
D = MODEL.hidden_size
F = MODEL.intermediate_size
ATTENTION = 4 * MODEL.num_heads * (MODEL.head_dim + 1)


@pytest.mark.parametrize(
    ("memory", "per_token"),
    [
        ({"remat": "full"}, 4 * D),
        ({"remat": "save_attention"}, 4 * D + ATTENTION),
        ({"remat": "save_attention_and_mlp", "mlp_tile_tokens": 64}, 4 * D + ATTENTION + 8 * F),
        ({"remat": "save_attention_and_mlp", "kept_mlp_layers": 0}, 4 * D + ATTENTION),
    ],
    ids=str,
)
def test_layers_save_their_inputs_and_what_remat_names(memory, per_token):
    spec = runs.make_spec(memory, model=MODEL)
    spec = dataclasses.replace(spec, config=spec.config.change(memory={"mlp_tile_tokens": 64}))
    assert estimate.saved_bytes(spec) == spec.tokens_per_device * MODEL.num_layers * per_token
