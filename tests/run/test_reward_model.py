"""Reward models: trained as in torch, on every mesh, and exported for transformers and PEFT."""

import json

import datasets
import jax
import numpy as np
import pytest
import transformers

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.core.errors import UserError
from jaxsp.data import tokenizers
from jaxsp.run import build, config_file
from jaxsp.run.given_model import GivenModel
from tests import batches, commands
from tests.hf import oracle
from tests.run import test_preference_runs

pytestmark = pytest.mark.e2e

torch = oracle.torch

STEPS = 3

RATE = 0.5

# without a padding token transformers would score the token before the end token in batches
MODEL = {**batches.SMALL_LLAMA, "num_hidden_layers": 2, "eos_token_id": 256, "pad_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs, a reward model and a language model of transformers."""
    folder = tmp_path_factory.mktemp("rewards")
    rng = np.random.default_rng(3)
    records = []
    for _ in range(10):
        prompt, chosen, rejected = (
            bytes(rng.integers(97, 123, rng.integers(1, 20)).tolist()).decode() for _ in "pcr"
        )
        records.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenizer = tokenizers.load(tokenizers.BYTE_TOKENIZER)
    for seed, (name, auto, fields) in enumerate(
        (
            ("scores", transformers.AutoModelForSequenceClassification, {"num_labels": 1}),
            ("language", transformers.AutoModelForCausalLM, {}),
        )
    ):
        torch.manual_seed(seed)
        auto.from_config(transformers.LlamaConfig(**MODEL, **fields)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


def settings(folder, name, *words, source="scores", sizes=(1, 1), **sections):
    source = {"model": {"source": str(folder / source), "config": None, "tokenizer": None}}
    return test_preference_runs.settings(
        folder,
        name,
        "run.steps=null",
        f"run.epochs={STEPS}",
        "data.row_tokens=1024",  # all pairs in a row
        "batch.rows_per_step=1",
        *words,
        sizes=sizes,
        objective={"type": "reward"},
        optimizer={"name": "sgd", "learning_rate": RATE, "max_grad_norm": None},
        **source,
        **sections,
    )


def read_pairs(folder):
    """Token ids of both documents of each pair."""
    return [
        [[*(record["prompt"] + record[name]).encode(), 256] for name in ("chosen", "rejected")]
        for record in commands.read_lines(folder / "train.jsonl")
    ]


def compute_scores(model, folder):
    documents = [ids for pair in read_pairs(folder) for ids in pair]
    scores = [model(torch.tensor([ids])).logits[0, 0] for ids in documents]
    return torch.stack(scores).reshape(-1, 2)


def train_in_torch(folder, center):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "scores")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        scores = compute_scores(model, folder)
        loss = -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean()
        loss = loss + center * (scores.sum(1) ** 2).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, losses


@pytest.mark.parametrize(("sizes", "center"), [((1, 1), 0.0), ((1, 4), 0.01)])
def test_losses_and_exported_weights_are_those_of_torch(folder, sizes, center):
    name = f"torch {sizes}"
    word = f"objective.center_rewards_coefficient={center}"
    config = settings(folder, name, word, sizes=sizes)
    lines, _ = test_preference_runs.run(config, sizes[0] * sizes[1])
    model, losses = train_in_torch(folder, center)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["num_pairs"] for line in lines] == [10] * STEPS
    assert "token_accuracy" not in lines[0]
    export.main([str(folder / name), str(folder / f"{name} hf")])
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / f"{name} hf", dtype=torch.float32
    )
    before = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "scores")
    expected = model.state_dict()
    for key, start in before.state_dict().items():
        change = (expected[key] - start).abs().max()
        difference = (exported.state_dict()[key] - expected[key]).abs().max()
        assert difference <= 1e-4 * change + 1e-7, key


def test_a_language_model_gets_a_new_head(folder):
    lines, _ = test_preference_runs.run(settings(folder, "new head", source="language"))
    assert lines[-1]["loss"] < lines[0]["loss"]
    inputs = build.build_training(
        settings(folder, "another", source="language"), devices=jax.devices()[:1]
    )
    spec = inputs.spec
    assert inputs.weights.reader.left_out.endswith("a new head, which is random")
    head = np.asarray(inputs.weights.make()["head"])
    assert head.shape == (1, MODEL["hidden_size"])
    assert 0.01 < head.std() < 0.03
    assert spec.model.num_logits == 1


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_adapters_train_the_head_too_and_load_in_peft(folder, capsys):
    peft = pytest.importorskip("peft")
    name = "lora"
    adapter = {"type": "lora", "rank": 4}
    words = [f"data.eval=[{{source: {folder}/train.jsonl, format: preference, name: same}}]"]
    test_preference_runs.run(settings(folder, name, *words, source="language", adapter=adapter))
    export.main([str(folder / name), str(folder / "adapter")])
    assert "AutoPeftModelForSequenceClassification" in capsys.readouterr().out
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(
        folder / "adapter", num_labels=1, dtype=torch.float32
    )
    scores = compute_scores(model, folder).mean(0).tolist()
    line = commands.read_lines(folder / name / "eval.jsonl")[-1]
    actual = [line["chosen_reward"], line["rejected_reward"]]
    assert actual == pytest.approx(scores, rel=1e-4)


def test_models_that_do_not_fit_the_objective_are_refused(folder):
    config = settings(folder, "sft").model_dump()
    sft = config_file.parse(
        config | {"objective": {"type": "dpo"}, "run": {"directory": "x", "steps": 1}}
    )
    with pytest.raises(UserError, match=r"objective.type = dpo: .* is that of a reward model"):
        build.build_training(sft, devices=jax.devices()[:1])


def test_the_harness_needs_a_model_of_tokens_and_says_so_before_the_weights_are_read(
    folder, monkeypatch
):
    harness = pytest.importorskip("jaxsp.evaluation.harness", exc_type=ImportError)
    monkeypatch.setattr(harness, "find_tasks", lambda *_, **__: "tasks")
    monkeypatch.setattr(GivenModel, "load_weights", None)
    changes = ["objective.type=reward", "data.row_tokens=64"]
    with pytest.raises(UserError, match="a reward model scores texts"):
        evaluation.main([str(folder / "scores"), *changes, "--lm-eval", "tasks"])
