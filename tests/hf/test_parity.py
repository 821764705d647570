"""The decoder equals transformers' model: same weights, same logits, loss and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.core.batch import Batch
from jaxsp.hf import families
from jaxsp.model import decoder, layers
from tests import batches, tolerances
from tests.hf import oracle

SEGMENTS = {
    "a document per row": [[(0, 24)], [(0, 24)]],
    "packed, with padding": [[(0, 9), (9, 2), (11, 13)], [(0, 17), (18, 5)]],
}


def run(name: str, layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loss, logits and gradients of jaxsp and of transformers."""
    fields = oracle.MODELS[name]
    rows = SEGMENTS[layout]
    config = families.parse_model_config(fields, field="model.config")
    table = decoder.param_table(config)
    model = oracle.torch_model(fields)
    weights = oracle.stacked(dict(model.named_parameters()), table)
    arrays = oracle.packed_rows(rows, vocab_size=config.vocab_size)
    places = [
        (row, slice(start, start + length))
        for row, segments in enumerate(rows)
        for start, length in segments
    ]
    documents = [arrays["tokens_BL"][place] for place in places]
    result = oracle.gradients(model, documents)
    expected = {"loss": result.loss, "logits": np.concatenate(result.logits)}
    expected |= batches.name_leaves(oracle.stacked(result.gradients, table))
    result = oracle.jaxsp_result(config)(weights, Batch(**jax.tree.map(jnp.asarray, arrays)))
    logits = np.concatenate([result.logits[place] for place in places])
    actual = {"loss": result.loss, "logits": logits}
    actual |= batches.name_leaves(result.gradients)
    return actual, expected


@pytest.mark.parametrize("layout", SEGMENTS)
@pytest.mark.parametrize("name", oracle.MODELS)
def test_loss_logits_and_every_gradient_equal_transformers(name, layout):
    actual, expected = run(name, layout)
    assert actual.keys() == expected.keys()
    errors = {key: batches.relative_error(actual[key], expected[key]) for key in expected}
    worst = max(errors, key=lambda key: errors[key])
    print(
        f"{name}, {layout}: logits {errors['logits']:.1e}, worst of all {worst} {errors[worst]:.1e}"
    )
    assert errors[worst] < tolerances.FP32_PARITY, worst


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_angles_are_right_at_the_end_of_five_million_tokens(name):
    config = families.parse_model_config(oracle.MODELS[name], field="model.config")
    position = 5 * 2**20 - 1
    angles = layers.rope_angles(jnp.array([[position]], jnp.int32), config)
    exact = position * layers.rope_frequencies(config)
    np.testing.assert_allclose(angles.cos[0, 0], np.cos(exact), rtol=0, atol=tolerances.ANGLES)
    np.testing.assert_allclose(angles.sin[0, 0], np.sin(exact), rtol=0, atol=tolerances.ANGLES)


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2"])
def test_rotation_frequencies_equal_transformers(name):
    fields = oracle.MODELS[name] | {"head_dim": 128, "rope_theta": 5e5}
    model = oracle.torch_model(fields)
    frequencies = layers.rope_frequencies(families.parse_model_config(fields, field="model.config"))
    np.testing.assert_allclose(
        frequencies, model.model.rotary_emb.inv_freq.numpy(), rtol=tolerances.FREQUENCIES
    )
