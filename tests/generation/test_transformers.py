"""Greedy answers and their logits equal those of transformers' `generate`."""

import numpy as np
import pytest

from jaxsp.generation.generator import Generator
from jaxsp.hf import model_config
from jaxsp.model import decoder
from tests import batches, tolerances
from tests.generation import models
from tests.training import runs

oracle = pytest.importorskip(
    "tests.hf.oracle", reason="transformers' models need torch, which this Python has no build of"
)

NUM_TOKENS = 12
PROMPTS = models.draw_texts([3, 40, 11], oracle.MODELS["llama"]["vocab_size"])

CASES = [
    pytest.param("llama3", (1, 1, 1), id="llama"),
    pytest.param("gemma3", (1, 1, 2), id="windows", marks=pytest.mark.slow),
    pytest.param("gemma4", (1, 1, 2), id="sizes of kinds of layers", marks=pytest.mark.e2e),
    pytest.param("gemma4_shared", (1, 1, 2), id="shared keys", marks=pytest.mark.e2e),
    pytest.param("gpt_oss", (1, 2, 1), id="sinks and experts", marks=pytest.mark.slow),
    pytest.param("qwen3_5", (1, 1, 2), id="delta nets", marks=pytest.mark.e2e),
    pytest.param("olmo hybrid", (1, 1, 1), id="delta nets without RoPE", marks=pytest.mark.slow),
]


def expect(model, prompt):
    """Tokens of the answer, and the logits that they were chosen from."""
    import torch

    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = result.sequences[0, len(prompt) :].tolist()
    return tokens, torch.cat(result.logits).numpy()


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_greedy_tokens_and_logits_are_those_of_transformers(name, sizes):
    fields = oracle.MODELS[name] | {"eos_token_id": None, "bos_token_id": None}
    model = oracle.torch_model(fields)
    config = model_config.parse_model_config(fields, row_tokens=models.ROW_TOKENS)
    spec = models.make_spec(config, sizes)
    weights = oracle.stacked(oracle.named_weights(model), decoder.param_table(config))
    master = runs.put_weights(spec.table, weights, spec.mesh)
    expected = [expect(model, prompt) for prompt in PROMPTS]
    tokens = [answer for answer, _ in expected]
    generator = Generator(spec)
    assert generator.generate(master, PROMPTS, max_new_tokens=NUM_TOKENS) == tokens
    logits = models.compute_logits(generator, master, PROMPTS, tokens)
    for actual, (_, steps) in zip(logits, expected, strict=True):
        assert batches.relative_error(actual, steps) < tolerances.FP32_PARITY
    assert len(set(np.ravel(tokens))) > len(PROMPTS), "different tokens are compared"
