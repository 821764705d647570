"""LongPPL: that of a plain program of torch."""

import json
import math

import numpy as np
import pytest

from jaxsp import eval as evaluation
from jaxsp.core.errors import UserError
from jaxsp.data import tokenizers
from jaxsp.evaluation import long_ppl
from tests import tolerances

oracle = pytest.importorskip(
    "tests.hf.oracle", reason="transformers' models need torch, which this Python has no build of"
)

ROW_TOKENS = 192


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model with the tokenizer of bytes, whose losses differ from token to token."""
    import torch
    import transformers

    path = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizers.make_byte_tokenizer().save_pretrained(path)
    return path


def compute_losses(model, ids):
    """Loss of each token but the first."""
    import torch

    tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none").numpy()


def run_eval(folder, out, *words):
    words = [f"data.row_tokens={ROW_TOKENS}", "model.compute_dtype=float32", *words]
    evaluation.main([str(folder), *words, "--out", str(out)])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_long_ppl_is_that_of_a_plain_program(folder, tmp_path, monkeypatch):
    """With smaller numbers than the published ones, for a small model."""
    import torch
    import transformers

    for name, value in (("CONTEXT_TOKENS", 40), ("BLOCK_TOKENS", 16)):
        monkeypatch.setattr(long_ppl, name, value)
    for name, value in (("MIN_GAIN", 0.05), ("MAX_LOSS", 6.0)):
        monkeypatch.setattr(long_ppl, name, value)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 257, length) for length in (20, 41, 56, 57, 100, 191)]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"input_ids": ids.tolist()}) for ids in documents)
    )
    source = {"source": str(tmp_path / "a.jsonl"), "format": "tokens", "name": "a"}
    words = [f"data.eval={json.dumps([source])}", "mesh.data=2", "mesh.seq=4"]
    (line,) = run_eval(folder, tmp_path / "out.jsonl", *words, "eval.long_ppl=true")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    key_losses = []
    for ids in documents:
        full = compute_losses(model, ids)
        for start in range(0, len(ids) - 40, 16):  # of the short text
            short = compute_losses(model, ids[start : start + 56])[39:]
            with_all = full[start + 39 : start + 39 + len(short)]
            key_losses += with_all[(short - with_all > 0.05) & (with_all < 6)].tolist()
    assert len(key_losses) > 20
    assert line["num_key_tokens"] == len(key_losses)
    assert line["long_ppl"] == pytest.approx(math.exp(np.mean(key_losses)), rel=tolerances.EVAL)


def test_long_ppl_needs_rows_with_far_context(folder, tmp_path):
    with pytest.raises(UserError, match=r"eval\.long_ppl = true: .*data\.row_tokens=10240"):
        run_eval(folder, tmp_path / "out.jsonl", "data.eval_fraction=0.5", "eval.long_ppl=true")
