"""The decoder equals transformers' model: same weights, same logits, loss and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.core.batch import Batch
from jaxsp.core.errors import UserError
from jaxsp.hf import config_fields, model_config
from jaxsp.model import decoder
from tests import batches, tolerances
from tests.hf import oracle

SEGMENTS = {
    "a document per row": [[(0, 24)], [(0, 24)]],
    "packed, with padding": [[(0, 9), (9, 2), (11, 13)], [(0, 17), (18, 5)]],
}

LAYOUTS = [("a document per row", pytest.mark.slow), ("packed, with padding", ())]
"""Names of SEGMENTS with their marks: packed rows prove more."""


QUICK = {
    **dict.fromkeys(("llama3", "gemma2", "gemma3", "phi3", "granite", "ministral3"), ()),
    **dict.fromkeys(
        ("cohere2", "muse_glimmer", "qwen3_5", "olmo hybrid", "glm4_moe", "gpt_oss"),
        pytest.mark.e2e,
    ),
}
"""Models that have every arithmetic between them, with their marks; the others are slow."""


def run(name: str, layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loss, logits and gradients of jaxsp and of transformers.

    A token of the documents is the model's padding, whose embedding is not trained by inputs.
    """
    fields = oracle.MODELS[name]
    rows = SEGMENTS[layout]
    arrays = oracle.packed_rows(rows, vocab_size=fields["vocab_size"])
    fields = fields | {"pad_token_id": int(arrays["tokens_BL"][0, 3])}
    config = model_config.parse_model_config(fields)
    table = decoder.param_table(config)
    model = oracle.torch_model(fields)
    weights = oracle.stacked(oracle.named_weights(model), table)
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


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=marks) for layout, marks in LAYOUTS])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=QUICK.get(name, pytest.mark.slow)) for name in oracle.MODELS],
)
def test_loss_logits_and_every_gradient_equal_transformers(name, layout):
    actual, expected = run(name, layout)
    assert actual.keys() == expected.keys()
    errors = {key: batches.relative_error(actual[key], expected[key]) for key in expected}
    worst = max(errors, key=lambda key: errors[key])
    print(
        f"{name}, {layout}: logits {errors['logits']:.1e}, worst of all {worst} {errors[worst]:.1e}"
    )
    assert errors[worst] < tolerances.FP32_PARITY, worst


def parse(fields):
    return model_config.parse_model_config(fields)


@pytest.mark.parametrize(
    ("model", "fields", "padding_id"),
    [
        ("llama", {}, None),
        ("gemma2", {}, 0),  # transformers' default for the family
        ("gemma2", {"pad_token_id": None}, None),
        ("olmo3", {"pad_token_id": 7}, 7),
        ("qwen3", {"pad_token_id": -1}, 130),
        ("phi3", {"pad_token_id": None}, None),
        ("smollm3", {"pad_token_id": 130}, 130),
    ],
)
def test_the_padding_token_is_that_of_transformers_and_stays_in_exports(model, fields, padding_id):
    class Tokenizer:
        bos_token_id = eos_token_id = None
        pad_token_id = 3

    fields = oracle.MODELS[model] | fields
    assert parse(fields).padding_id == padding_id
    embedding = oracle.torch_model(fields).get_input_embeddings()
    assert embedding.padding_idx == padding_id
    resumed = config_fields.add_token_ids(fields, Tokenizer())
    exported = model_config.make_config_json(
        resumed, dtype="float32", token_ids=config_fields.choose_token_ids(resumed, Tokenizer())
    )
    assert parse(resumed).padding_id == parse(exported).padding_id == padding_id


@pytest.mark.parametrize("padding_id", [131, -132, [0, 1], "0"])
def test_a_padding_token_outside_of_the_vocabulary_is_refused(padding_id):
    with pytest.raises(UserError, match="pad_token_id"):
        parse({**oracle.MODELS["llama"], "pad_token_id": padding_id})
