"""Evaluation agrees with transformers, and an export returns the imported weights."""

import json
import math

import numpy as np
import pytest
import safetensors.numpy

from jaxsp import eval as evaluation
from jaxsp import export
from tests import commands, small_runs, tolerances

oracle = pytest.importorskip(
    "tests.hf.oracle", reason="transformers' models need torch, which this Python has no build of"
)

DOCUMENTS = [np.random.default_rng(n).integers(0, 131, n) for n in (2, 7, 33, 90)]


def save_model(folder, name, dtype):
    """Saves a model with transformers, in several files, and returns it as loaded in float32."""
    import torch
    import transformers

    model = oracle.torch_model(oracle.MODELS[name]).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def compute_losses(model):
    """Returns the sum of token losses and the number of correct predictions of each document."""
    import torch

    losses = []
    for document in DOCUMENTS:
        tokens = torch.from_numpy(document)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        losses.append((loss, int((logits.argmax(-1) == tokens[1:]).sum())))
    return losses


QUICK = ("llama3", "gemma3")
"""Models in the default tier; `hf/test_parity.py` compares all."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in oracle.TEXT_EXPORTS
    ],
)
def test_loss_of_each_document_is_that_of_transformers(tmp_path, capsys, name):
    dtype = "bfloat16" if name == "llama3" else "float32"
    expected = compute_losses(save_model(tmp_path / "hf", name, dtype))
    sets = []
    for number, document in enumerate(DOCUMENTS):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps({"input_ids": document.tolist()}))
        sets.append({"source": str(path), "format": "tokens", "name": str(number)})
    words = [
        "data.row_tokens=128",
        "model.compute_dtype=float32",
        f"data.eval={json.dumps(sets)}",
        "mesh.data=2",
        "mesh.seq=4",
    ]
    evaluation.main([str(tmp_path / "hf"), *words, "--out", str(tmp_path / "eval.jsonl")])
    lines = commands.read_lines(tmp_path / "eval.jsonl")
    for line, document, (loss, num_correct) in zip(lines, DOCUMENTS, expected, strict=True):
        num_loss_tokens = len(document) - 1
        assert line["num_loss_tokens"] == num_loss_tokens
        assert line["loss"] == pytest.approx(loss / num_loss_tokens, rel=tolerances.EVAL)
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert line["token_accuracy"] == pytest.approx(num_correct / num_loss_tokens)
        assert line["step"] == 0
    assert "step" not in capsys.readouterr().out, "a model has no step"


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_run_with_learning_rate_zero_exports_the_imported_weights(tmp_path, dtype):
    save_model(tmp_path / "hf", "llama3", dtype)
    (tmp_path / "hf/generation_config.json").write_text(
        '{"eos_token_id": [5, 6], "temperature": 0.25}'
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": DOCUMENTS[-1].tolist()}))
    sections = {
        "model": {"source": str(tmp_path / "hf"), "compute_dtype": dtype},
        "mesh": {"data": 2, "seq": 4},
        "data": {"row_tokens": 128},
        "batch": {"rows_per_step": 2},
        "optimizer": {"learning_rate": 0.0},
    }
    small_runs.train(small_runs.make_fields(tmp_path, "a.jsonl", **sections))
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    imported = load_tensors(tmp_path / "hf")
    exported = load_tensors(tmp_path / "out")
    assert exported.keys() == imported.keys()
    for name, tensor in imported.items():
        assert exported[name].dtype == tensor.dtype
        assert exported[name].tobytes() == tensor.tobytes(), name
    generation_config = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation_config["temperature"] == 0.25


def load_tensors(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors
