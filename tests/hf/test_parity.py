"""The decoder equals transformers' model: same weights, same logits, loss and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.core.batch import Batch
from jaxsp.hf import model_config
from jaxsp.model import decoder
from tests import batches, tolerances
from tests.hf import oracle

SEGMENTS = {
    "a document per row": [[(0, 24)], [(0, 24)]],
    "packed, with padding": [[(0, 9), (9, 2), (11, 13)], [(0, 17), (18, 5)]],
}


def run(name: str, layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loss, logits and gradients of jaxsp and of transformers.

    A token of the documents is the model's padding, whose embedding is not trained by inputs.
    """
    fields = oracle.MODELS[name]
    rows = SEGMENTS[layout]
    arrays = oracle.packed_rows(rows, vocab_size=fields["vocab_size"])
    fields = fields | {"pad_token_id": int(arrays["tokens_BL"][0, 3])}
    config = model_config.parse_model_config(fields, field="model.config")
    table = decoder.param_table(config)
    model = oracle.torch_model(fields)
    weights = oracle.stacked(dict(model.named_parameters()), table)
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


def test_layer_patterns_of_the_families():
    def describe(name: str) -> list[str]:
        config = model_config.parse_model_config(oracle.MODELS[name], field="model.config")
        return [f"{layer.window} {layer.rope.description}" for layer in config.layers]

    local = "5 default, theta 100"
    full = "None linear, theta 1,000,000, factor 8"
    assert describe("gemma3") == [local, local, full, local, local, full, local, local]
    local = "5 default, theta 500,000"
    assert describe("olmo3")[:3] == [local] * 3
    assert "yarn" in describe("olmo3")[3]
    # layers without RoPE attend to whole documents
    assert describe("cohere2") == ["5 default, theta 10,000"] * 3 + ["None none"] + [
        "5 default, theta 10,000"
    ]
    rotated = "default, theta 2,000,000"
    assert [layer.split(" ", 1)[1] for layer in describe("smollm3")] == [
        *(rotated, "none", rotated, "none", rotated)
    ]
