"""Our decoder is transformers' model: the same weights give the same logits, loss and gradients."""

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

PIECES = {
    "a document per row": [[(0, 24)], [(0, 24)]],
    "packed, with padding": [[(0, 9), (9, 2), (11, 13)], [(0, 17), (18, 5)]],
}


def run(name: str, layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours and transformers' loss, logits and gradients."""
    fields, pieces = oracle.MODELS[name], PIECES[layout]
    config = families.parse_model_config(fields, field="model.config")
    table = decoder.param_table(config)
    model = oracle.torch_model(fields)
    weights = oracle.stacked(dict(model.named_parameters()), table)
    arrays = oracle.rows(pieces, vocab_size=config.vocab_size)
    places = [
        (row, slice(start, start + length))
        for row, found in enumerate(pieces)
        for start, length in found
    ]
    documents = [arrays["tokens_BL"][place] for place in places]
    done = oracle.gradients(model, documents)
    right = {"loss": done.loss, "logits": np.concatenate(done.logits)}
    right |= batches.by_name(oracle.stacked(done.gradients, table))
    done = oracle.ours(config)(weights, Batch(**jax.tree.map(jnp.asarray, arrays)))
    found = {"loss": done.loss, "logits": np.concatenate([done.logits[place] for place in places])}
    found |= batches.by_name(done.gradients)
    return found, right


@pytest.mark.parametrize("layout", PIECES)
@pytest.mark.parametrize("name", oracle.MODELS)
def test_loss_logits_and_every_gradient_are_transformers(name, layout):
    found, right = run(name, layout)
    assert found.keys() == right.keys()
    apart = {key: batches.difference(found[key], right[key]) for key in right}
    worst = max(apart, key=lambda key: apart[key])
    print(
        f"{name}, {layout}: logits {apart['logits']:.1e}, worst of all {worst} {apart[worst]:.1e}"
    )
    assert apart[worst] < tolerances.FP32_PARITY, worst


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_angles_are_right_at_the_end_of_five_million_tokens(name):
    config = families.parse_model_config(oracle.MODELS[name], field="model.config")
    position = 5 * 2**20 - 1
    angles = layers.rope_angles(jnp.array([[position]], jnp.int32), config)
    right = position * layers.rope_frequencies(config)
    np.testing.assert_allclose(angles.cos[0, 0], np.cos(right), rtol=0, atol=tolerances.ANGLES)
    np.testing.assert_allclose(angles.sin[0, 0], np.sin(right), rtol=0, atol=tolerances.ANGLES)


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2"])
def test_rotation_frequencies_are_transformers(name):
    fields = oracle.MODELS[name] | {"head_dim": 128, "rope_theta": 5e5}
    model = oracle.torch_model(fields)
    found = layers.rope_frequencies(families.parse_model_config(fields, field="model.config"))
    np.testing.assert_allclose(
        found, model.model.rotary_emb.inv_freq.numpy(), rtol=tolerances.FREQUENCIES
    )
