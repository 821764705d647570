"""Hugging Face folders: what jaxsp finds a document's loss to be is what transformers finds, and what goes in comes out."""

import json
import math

import jax
import numpy as np
import pytest
import rich.console
import safetensors.numpy

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.config import config_file
from jaxsp.core.errors import UserError
from jaxsp.run import build, trainer
from tests import messages, tolerances

oracle = pytest.importorskip(
    "tests.hf.oracle", reason="transformers' models need torch, which this Python has no build of"
)

DOCUMENTS = [
    np.random.default_rng(n).integers(0, 131, n) for n in (2, 7, 33, 90)
]  # the last is longer than a row


def checkpoint(folder, name, dtype):
    """A checkpoint as transformers writes it, in several files, and what it reads there, in float32."""
    import torch
    import transformers

    model = oracle.torch_model(oracle.MODELS[name]).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def losses(model):
    """Sum of each document's token losses, and how many tokens were the likeliest."""
    import torch

    found = []
    for document in DOCUMENTS:
        tokens = torch.from_numpy(document)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        found.append((loss, int((logits.argmax(-1) == tokens[1:]).sum())))
    return found


@pytest.mark.parametrize("name", oracle.MODELS)
def test_each_document_has_the_loss_that_transformers_gives_it(tmp_path, name):
    expected = losses(
        checkpoint(tmp_path / "hf", name, "bfloat16" if name == "llama3" else "float32")
    )
    sets = []
    for number, document in enumerate(DOCUMENTS):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"input_ids": document.tolist()}))
        sets.append(
            {"source": str(tmp_path / f"{number}.jsonl"), "format": "tokens", "name": str(number)}
        )
    words = [
        "data.row_tokens=128",
        "model.compute_dtype=float32",
        f"data.eval={json.dumps(sets)}",
        "mesh.data=2",
        "mesh.seq=4",
    ]
    evaluation.main([str(tmp_path / "hf"), *words, "--out", str(tmp_path / "eval.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    for line, document, (loss, num_correct) in zip(lines, DOCUMENTS, expected, strict=True):
        assert line["num_loss_tokens"] == len(document) - 1
        assert line["loss"] == pytest.approx(loss / (len(document) - 1), rel=tolerances.EVAL), len(
            document
        )
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert line["token_accuracy"] == pytest.approx(num_correct / (len(document) - 1))
        assert line["step"] == 0


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_that_learns_nothing_exports_what_it_imported(tmp_path, dtype):
    checkpoint(tmp_path / "hf", "llama3", dtype)
    (tmp_path / "hf/generation_config.json").write_text(
        '{"eos_token_id": [5, 6], "temperature": 0.25}'
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": DOCUMENTS[-1].tolist()}))
    chosen = config_file.parse(
        {
            "run": {"directory": str(tmp_path / "run"), "steps": 1},
            "model": {"source": str(tmp_path / "hf"), "compute_dtype": dtype},
            "mesh": {"data": 2, "seq": 4},
            "data": {
                "train": [{"source": str(tmp_path / "a.jsonl"), "format": "tokens"}],
                "row_tokens": 128,
            },
            "batch": {"rows_per_step": 2},
            "optimizer": {"learning_rate": 0.0},
            "logging": {"tensorboard": False},
        }
    )
    program, material = build.build_training(chosen, devices=jax.devices())
    assert "hf" in material.weights_origin
    trainer.train(program, material, rich.console.Console(quiet=True))
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    expected, found = (
        {
            name: tensor
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in safetensors.numpy.load_file(file).items()
        }
        for folder in (tmp_path / "hf", tmp_path / "out")
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tobytes() == tensor.tobytes(), name
    assert (
        json.loads((tmp_path / "out/generation_config.json").read_text())["temperature"] == 0.25
    ), "comes along"


def test_all_that_is_missing_is_said_at_once(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    suggestion = "data.eval='[{source: "
    with pytest.raises(UserError, match=messages.holding("data.eval", suggestion)) as found:
        evaluation.main([str(tmp_path), "mesh.sq=4"])
    assert [problem.split(":")[0] for problem in found.value.problems] == [
        "mesh.sq = 4",
        "data.row_tokens",
        "data.eval",
    ]


def test_what_is_nothing_to_evaluate_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    says = messages.holding(tmp_path / "run", "run.save_every")
    with pytest.raises(UserError, match=says):
        evaluation.main([str(tmp_path / "run")])
    for what in (tmp_path / "run/checkpoints/249", tmp_path / "nothing", tmp_path, "runs/nothing"):
        with pytest.raises(UserError) as raised:
            evaluation.main([str(what)])
        (problem,) = raised.value.problems
        assert all(part in problem for part in (str(what), "run", "checkpoint", "config.json"))
        assert "cache" not in problem
