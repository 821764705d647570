"""The delta rule on a GPU equals its recurrence, for the heads of published models."""

import jax.numpy as jnp
import pytest

from jaxsp.blocks.config import DeltaNetConfig
from jaxsp.run.delta_rule_check import DeltaRuleCheck

pytestmark = pytest.mark.gpu

HEADS = {
    "Qwen3.5-9B": (16, 32, 128, 128),
    "Qwen3.6-27B": (16, 48, 128, 128),
    "Olmo-Hybrid-7B": (30, 30, 96, 192),
}
"""Key heads, value heads, and the sizes of a key and a value."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_outputs_and_gradients_are_those_of_the_recurrence(gpu, name, dtype):
    num_key_heads, num_heads, key_size, value_size = HEADS[name]
    sizes = DeltaNetConfig(
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_size=key_size,
        value_size=value_size,
        filter_size=4,
    )
    check = DeltaRuleCheck.of_model(sizes, jnp.dtype(dtype))
    errors = check.measure_errors(gpu)
    assert max(errors.values()) < check.tolerance, errors
