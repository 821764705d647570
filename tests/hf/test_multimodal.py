"""The text model of a multimodal checkpoint is imported, and exported as a text-only one."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxsp.blocks.config import ModelConfig
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config, weights
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.model import decoder
from tests import batches
from tests.hf import multimodal, oracle
from tests.messages import assert_names

TEXT_CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
PARTS = dict.fromkeys(TEXT_CLASSES, ("vision_tower", "multi_modal_projector"))
PARTS |= {"qwen3_5": ("visual",), "qwen3_5_moe": ("visual",)}


def resolve(fields: dict[str, Any], **model: Any) -> dict[str, Any]:
    source = ModelSourceConfig(config=fields, **model)
    return model_config.resolve_fields(fields, source)


def read(fields: dict[str, Any]) -> ModelConfig:
    return model_config.parse_model_config(resolve(fields))


def text_tensors(model: Any) -> dict[str, np.ndarray]:
    """Tensors of the text model, by their names in a text-only checkpoint."""
    named = {
        name.replace("model.language_model.", "model."): weight.detach().numpy()
        for name, weight in model.named_parameters()
    }
    return {name: array for name, array in named.items() if not is_left_out(name)}


def is_left_out(name: str) -> bool:
    parts = ("vision_tower", "multi_modal_projector", "visual", "vision_adapter")
    return any(part in name for part in (*parts, "vision_projection"))


def save(model: Any, directory: pathlib.Path, layout: str) -> None:
    """Saves with the tensor names of the hub, or with those of transformers 5's modules."""
    size = "40KB" if layout == "hub, several files" else "5GB"
    model.save_pretrained(directory, max_shard_size=size)
    if layout == "modules of transformers 5":
        stored = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
        assert "model.language_model.norm.weight" in stored
        path = directory / "model.safetensors"
        safetensors.numpy.save_file(stored, path, metadata={"format": "pt"})


@pytest.mark.parametrize("layout", ["hub, several files", "modules of transformers 5"])
@pytest.mark.parametrize("name", TEXT_CLASSES)
def test_the_text_model_is_imported_and_exported_bit_for_bit(tmp_path, name, layout):
    model = multimodal.torch_model(multimodal.MODELS[name])
    save(model, tmp_path / "in", layout)
    files = list((tmp_path / "in").glob("*.safetensors"))
    names = [name for file in files for name in safetensors.numpy.load_file(file)]
    prefix = "language_model.model."
    if "modules" in layout or name.startswith("qwen3_5"):
        prefix = "model.language_model."
    assert f"{prefix}norm.weight" in names
    assert (len(files) > 1) == ("several" in layout)
    source, fields, master = multimodal.import_folder(tmp_path / "in")
    config = model_config.parse_model_config(fields)
    table = decoder.param_table(config)
    expected = text_tensors(model)
    assert batches.is_bitwise_equal(
        master, oracle.stacked(jax.tree.map(oracle.torch.from_numpy, expected), table)
    )
    count = sum(is_left_out(name) for name, _ in model.named_parameters())
    left_out = weights.open_folder(source, table).left_out
    assert_names(left_out, "text model only", str(count), *PARTS[name])

    weights.export_model(
        master,
        table=table,
        fields=fields,
        tokenizer=None,
        directory=tmp_path / "out",
        dtype="float32",
    )
    loaded, info = oracle.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert not any(info.values()), info
    assert type(loaded).__name__ == TEXT_CLASSES[name]
    back = {key: weight.detach().numpy() for key, weight in loaded.named_parameters()}
    assert batches.is_bitwise_equal(back, expected)
    if name == "gemma3":
        assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == [1, 106]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_text"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path, name):
    """transformers ignores them too."""
    model = (
        oracle.torch_model(oracle.MODELS["qwen3_5"])
        if name == "qwen3_5_text"
        else multimodal.torch_model(multimodal.MODELS["qwen3_5"])
    )
    save(model, tmp_path, "hub")
    rewrite(
        tmp_path,
        **{f"mtp.{name}": np.zeros((2, 2), np.float32) for name in ("fc.weight", "norm.weight")},
    )
    source, fields, master = multimodal.import_folder(tmp_path)
    table = decoder.param_table(model_config.parse_model_config(fields))
    expected = jax.tree.map(oracle.torch.from_numpy, text_tensors(model))
    assert batches.is_bitwise_equal(master, oracle.stacked(expected, table))
    left_out = weights.open_folder(source, table).left_out
    count = 2 + sum("visual" in name for name, _ in model.named_parameters())
    if name == "qwen3_5_text":
        assert left_out == "without 2 tensors of mtp"
    else:
        assert left_out == f"text model only, without {count} tensors of mtp and visual"
    rewrite(tmp_path, **{"mtq.weight": np.zeros(2, np.float32)})
    with pytest.raises(UserError, match=r"mtq\.weight"):
        weights.open_folder(source, table)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gemma3" else [pytest.mark.slow])
        for name in multimodal.MODELS
    ],
)
def test_logits_equal_those_of_the_multimodal_model_without_images(tmp_path, name):
    model = multimodal.torch_model(multimodal.MODELS[name])
    save(model, tmp_path, "hub")
    _, fields, master = multimodal.import_folder(tmp_path)
    config = model_config.parse_model_config(fields)
    multimodal.check_logits(model, config, master)


@pytest.mark.parametrize(
    ("outer", "text", "tied"),
    [
        (None, None, False),  # Ministral 3 8B; the default of the text model's family
        (None, True, True),  # Ministral 3 3B
        (True, False, False),  # Ministral 3 8B, saved by transformers 5
        (True, None, True),
        (False, True, False),
        (True, True, True),
    ],
)
def test_embeddings_are_tied_unless_one_of_the_configs_has_false(outer, text, tied):
    text_config = {**oracle.MODELS["ministral3"], "tie_word_embeddings": text}
    fields = {
        **multimodal.MODELS["ministral3"],
        "text_config": text_config,
        "tie_word_embeddings": outer,
    }
    assert read(fields).tie_embeddings == tied


def change(fields: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {**fields, "text_config": {**fields["text_config"], **text}}


REFUSED = [
    (multimodal.GEMMA_3_4B | {"hidden_size": 64}, "hidden_size = 64: ", ["gemma3"]),
    (multimodal.GEMMA_3_4B | {"text_config": None}, "text_config = null: ", ["fields"]),
    (
        change(multimodal.GEMMA_3_4B, model_type="gemma3n_text"),
        "text_config.model_type = gemma3n_text: ",
        ["gemma3_text"],
    ),
    (change(multimodal.GEMMA_3_4B, hidden_size=0), "text_config.hidden_size = 0: ", ["1"]),
    (
        multimodal.QWEN3_5_27B | {"language_model_only": True},
        "language_model_only = true: ",
        ["Qwen3_5ForConditionalGeneration", "false"],
    ),
]


def rewrite(directory: pathlib.Path, **changes: np.ndarray | None) -> None:
    """Adds tensors to a checkpoint, or removes them."""
    path = directory / "model.safetensors"
    stored = safetensors.numpy.load_file(path) | changes
    kept = {name: array for name, array in stored.items() if array is not None}
    safetensors.numpy.save_file(kept, path, metadata={"format": "pt"})
