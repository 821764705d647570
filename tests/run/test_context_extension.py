"""A model whose context is extended by a run: its loss, its export, and resuming it."""

import json

import numpy as np
import pytest

from jaxsp import export
from jaxsp.run import config_file
from tests import commands, messages, tolerances
from tests.hf import oracle
from tests.small_runs import make_fields, train

ROW_TOKENS = 64
QWEN3 = {
    **oracle.MODELS["qwen3"],
    "use_sliding_window": False,
    "rope_theta": 1e4,
    "max_position_embeddings": 16,
}
YARN = "model.rope={type: yarn, factor: 4}"
GROUP = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    "original_max_position_embeddings": 16,
}


def settings(folder, *words, steps=1):
    sections = {
        "run": {"steps": steps},
        "model": {"source": str(folder / "model")},
        "mesh": {"data": 1, "seq": 2},
        "data": {"row_tokens": ROW_TOKENS},
        "batch": {"rows_per_step": 4},
        "optimizer": {"learning_rate": 0.0},
    }
    return config_file.parse(make_fields(folder, **sections), words)


def mean_loss(model, documents):
    return oracle.gradients(model, [np.array(document) for document in documents]).loss


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """Folder of a model, four documents of a row each, and a run of one step with YaRN.

    Its documents are four times as long as the model's range.
    """
    folder = tmp_path_factory.mktemp("extension")
    oracle.torch_model(QWEN3).save_pretrained(folder / "model")
    tokens = np.random.default_rng(0).integers(0, 131, (4, ROW_TOKENS)).tolist()
    lines = [json.dumps({"input_ids": document}) + "\n" for document in tokens]
    (folder / "train.jsonl").write_text("".join(lines))
    train(settings(folder, YARN))
    export.main([str(folder / "run"), str(folder / "out"), "--dtype", "float32"])
    return folder


def read_documents(folder):
    return [line["input_ids"] for line in commands.read_lines(folder / "train.jsonl")]


@pytest.mark.e2e
def test_the_loss_is_that_of_transformers_with_the_changed_config(extended):
    (line,) = commands.read_lines(extended / "run/metrics.jsonl")
    changed = {name: value for name, value in QWEN3.items() if name != "rope_theta"}
    changed |= {"rope_parameters": GROUP, "max_position_embeddings": 64}
    documents = read_documents(extended)
    expected = mean_loss(oracle.torch_model(changed), documents)
    assert line["loss"] == pytest.approx(expected, rel=tolerances.FP32_PARITY)
    own = mean_loss(oracle.torch_model(QWEN3), documents)
    assert abs(own - expected) > 10 * tolerances.FP32_PARITY * expected
    banner = messages.read_banner(extended / "run")
    messages.assert_names(banner, "yarn, theta 10,000, factor 4 over 16 positions")
    assert "untrained" not in banner


@pytest.mark.e2e
def test_the_export_has_the_changed_config_and_its_loss_in_transformers(extended):
    written = json.loads((extended / "out/config.json").read_text())
    assert written["rope_parameters"] == GROUP
    assert written["max_position_embeddings"] == 64
    model = oracle.transformers.AutoModelForCausalLM.from_pretrained(
        extended / "out", attn_implementation="eager"
    )
    rotary = model.model.rotary_emb
    config = oracle.transformers.AutoConfig.for_model(
        **{name: value for name, value in QWEN3.items() if name != "rope_theta"}
        | {"rope_parameters": dict(GROUP), "max_position_embeddings": 64}
    )
    expected = type(rotary)(config)
    assert oracle.torch.equal(rotary.inv_freq, expected.inv_freq)
    assert rotary.attention_scaling == expected.attention_scaling > 1
    (line,) = commands.read_lines(extended / "run/metrics.jsonl")
    loss = mean_loss(model, read_documents(extended))
    assert loss == pytest.approx(line["loss"], rel=tolerances.FP32_PARITY)
