"""The text model of a multimodal checkpoint is imported, and exported as a text-only one."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxsp.blocks.config import ModelConfig
from jaxsp.core.errors import UserError, at
from jaxsp.hf import config_fields, model_config, published, weights
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.model import decoder
from tests import batches
from tests.hf import multimodal, oracle
from tests.hf.test_model_config import HUB
from tests.messages import assert_names

GEMMA_3_4B = HUB["google/gemma-3-4b-it"]
MISTRAL_SMALL_3_1 = HUB["mistralai/Mistral-Small-3.1-24B-Instruct-2503"]
QWEN3_5_27B = HUB["Qwen/Qwen3.5-27B"]

TEXT_CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
PARTS = dict.fromkeys(TEXT_CLASSES, ("vision_tower", "multi_modal_projector"))
PARTS |= {"qwen3_5": ("visual",), "qwen3_5_moe": ("visual",)}
PARTS |= {"gemma4": ("embed_vision", "vision_tower"), "gemma4_unified": ("embed_vision",)}


def resolve(fields: dict[str, Any], **model: Any) -> dict[str, Any]:
    source = ModelSourceConfig(config=fields, **model)
    return model_config.resolve_fields(fields, source)


def read(fields: dict[str, Any]) -> ModelConfig:
    return model_config.parse_model_config(resolve(fields))


def test_unknown_fields_of_a_written_config_are_refused_beside_and_in_text_config():
    fields = {name: x for name, x in QWEN3_5_27B.items() if name != "transformers_version"}
    with pytest.raises(UserError, match=r"^\.n_images = 2: is not a field of qwen3_5 "):
        resolve(fields | {"n_images": 2})
    text = fields["text_config"] | {"n_layers": 2}
    with pytest.raises(
        UserError, match=r"^\.text_config\.n_layers = 2: is not a field of qwen3_5_text "
    ):
        resolve(fields | {"text_config": text})
    source = ModelSourceConfig(source="file")  # which may have any
    model_config.resolve_fields(fields | {"text_config": text}, source)


def text_tensors(model: Any) -> dict[str, np.ndarray]:
    """Tensors of the text model, by their names in a text-only checkpoint."""
    named = {
        name.replace("model.language_model.", "model."): weight.detach().numpy()
        for name, weight in oracle.named_weights(model).items()
    }
    return {name: array for name, array in named.items() if not is_left_out(name)}


def is_left_out(name: str) -> bool:
    parts = ("vision_tower", "multi_modal_projector", "visual", "vision_adapter", "embed_vision")
    return any(part in name for part in (*parts, "vision_projection"))


def save(model: Any, directory: pathlib.Path, layout: str) -> None:
    """Saves with the tensor names of the hub, or with those of transformers 5's modules."""
    size = "40KB" if layout == "hub, several files" else "5GB"
    model.save_pretrained(directory, max_shard_size=size)
    if layout == "modules of transformers 5":
        named = oracle.named_weights(model)
        stored = {name: tensor.detach().numpy() for name, tensor in named.items()}
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
    if "modules" in layout or name.startswith(("qwen3_5", "gemma4")):
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
    count = sum(map(is_left_out, oracle.named_weights(model)))
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
    named = oracle.named_weights(loaded)
    back = {key: weight.detach().numpy() for key, weight in named.items()}
    assert batches.is_bitwise_equal(back, expected)
    if name == "gemma3":
        assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == [1, 106]


@pytest.mark.parametrize(
    ("name", "prefix", "wrong", "left_out"),
    [
        ("glm4_moe", "model.layers.3", "model.layers.4", "without 2 tensors of layers.3"),
        ("qwen3_5", "mtp", "mtq", "without 2 tensors of mtp"),
        ("with vision", "mtp", "mtq", "text model only, without 23 tensors of mtp and visual"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(tmp_path, name, prefix, wrong, left_out):
    """transformers ignores them too."""
    if name == "with vision":
        model = multimodal.torch_model(multimodal.MODELS["qwen3_5"])
    else:
        model = oracle.torch_model(oracle.MODELS[name])
    save(model, tmp_path, "hub")
    extra = np.zeros((2, 2), np.float32)
    rewrite(tmp_path, **{f"{prefix}.fc.weight": extra, f"{prefix}.norm.weight": extra})
    source, fields, master = multimodal.import_folder(tmp_path)
    table = decoder.param_table(model_config.parse_model_config(fields))
    expected = jax.tree.map(oracle.torch.from_numpy, text_tensors(model))
    assert batches.is_bitwise_equal(master, oracle.stacked(expected, table))
    assert weights.open_folder(source, table).left_out == left_out
    rewrite(tmp_path, **{f"{wrong}.weight": extra})
    with pytest.raises(UserError, match=rf"does not have: {wrong}\.weight"):
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


def test_sizes_that_gemma_leaves_out_are_those_of_transformers():
    config = read(GEMMA_3_4B)
    assert (config.vocab_size, config.num_layers, config.hidden_size) == (262208, 34, 2560)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.tie_embeddings
    assert [layer.window for layer in config.layers[:6]] == [1024] * 5 + [None]
    assert config.layers[5].rope.description == "linear, theta 1,000,000, factor 8"
    fields = resolve(GEMMA_3_4B)
    assert fields["max_position_embeddings"] == 131072
    # text-only fields, which describe the same model
    assert "vision_config" not in fields
    assert resolve(fields) is fields
    assert read(fields) == config


def test_mistral_small_is_read_as_its_text_model():
    config = read(MISTRAL_SMALL_3_1)
    assert config == read({**MISTRAL_SMALL_3_1["text_config"], "tie_word_embeddings": False})
    assert (config.head_dim, config.num_heads, config.layers[0].window) == (128, 32, None)
    assert not config.tie_embeddings


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.5-35B-A3B"])
def test_qwen_3_5_is_read_as_its_text_model_and_exported_with_its_layers(name):
    fields = resolve(HUB[f"Qwen/{name}"])
    config = read(HUB[f"Qwen/{name}"])
    assert config == read(published.read_models()[f"Qwen/{name}"].fields)
    swapped = fields["layer_types"][::-1]
    exported = model_config.make_config_json(
        fields | {"layer_types": swapped}, dtype="bfloat16", token_ids={}
    )
    kind = "Moe" if config.experts else ""
    assert exported["architectures"] == [f"Qwen3_5{kind}ForCausalLM"]
    back = model_config.parse_model_config(exported)
    assert back == dataclasses.replace(config, layers=config.layers[::-1])


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


def test_special_tokens_beside_the_text_config_replace_those_in_it():
    text = {**GEMMA_3_4B["text_config"], "eos_token_id": 1, "bos_token_id": 2}
    ids = config_fields.choose_token_ids(resolve(GEMMA_3_4B | {"text_config": text}), None)
    assert ids == {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": None}


def test_the_context_is_extended_and_planned():
    yarn = {"type": "yarn", "factor": 4}
    sizes = published.read_sizes(ModelSourceConfig(config=MISTRAL_SMALL_3_1, rope=yarn))
    assert sizes.fields["max_position_embeddings"] == 4 * 131072
    assert sizes.fields["model_type"] == "mistral"
    assert "yarn" in sizes.model.layers[0].rope.description
    again = resolve(sizes.fields, rope=yarn)
    assert again == sizes.fields


def change(fields: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {**fields, "text_config": {**fields["text_config"], **text}}


REFUSED = [
    (GEMMA_3_4B | {"hidden_size": 64}, "hidden_size = 64: ", ["gemma3"]),
    (GEMMA_3_4B | {"text_config": None}, "text_config = null: ", ["fields"]),
    (
        change(GEMMA_3_4B, model_type="gemma3n_text"),
        "text_config.model_type = gemma3n_text: ",
        ["gemma3_text"],
    ),
    (change(GEMMA_3_4B, hidden_size=0), "text_config.hidden_size = 0: ", ["1"]),
    (
        change(GEMMA_3_4B, final_logit_softcapping=3.0),
        "text_config.final_logit_softcapping = 3.0: ",
        ["null"],
    ),
    (
        QWEN3_5_27B | {"language_model_only": True},
        "language_model_only = true: ",
        ["Qwen3_5ForConditionalGeneration", "false"],
    ),
]


@pytest.mark.parametrize(("fields", "start", "parts"), REFUSED)
def test_unsupported_fields_are_refused_by_name(fields, start, parts):
    with pytest.raises(UserError) as raised, at("model.config"):
        read(fields)
    (problem,) = raised.value.problems
    assert_names(problem.removeprefix("model.config."), *parts, start=start)


def rewrite(directory: pathlib.Path, **changes: np.ndarray | None) -> None:
    """Adds tensors to a checkpoint, or removes them."""
    path = directory / "model.safetensors"
    stored = safetensors.numpy.load_file(path) | changes
    kept = {name: array for name, array in stored.items() if array is not None}
    safetensors.numpy.save_file(kept, path, metadata={"format": "pt"})


def test_other_tensors_than_those_of_the_text_model_and_the_images_are_refused(tmp_path):
    save(multimodal.torch_model(multimodal.MODELS["mistral"]), tmp_path, "hub")
    extra = np.zeros(2, np.float32)
    for changes, parts in (
        ({"audio_tower.weight": extra}, ["audio_tower.weight"]),
        ({"language_model.model.norm.weight": None}, ["model.norm.weight"]),
        ({"model.language_model.norm.weight": extra}, ["model.norm.weight", "twice"]),
        (
            {"language_model.lm_head.weight": None},
            ["lm_head.weight", "tie_word_embeddings", "text_config"],
        ),
    ):
        before = (tmp_path / "model.safetensors").read_bytes()
        rewrite(tmp_path, **changes)
        with pytest.raises(UserError) as raised:
            multimodal.import_folder(tmp_path)
        (problem,) = raised.value.problems
        assert_names(problem, *parts)
        (tmp_path / "model.safetensors").write_bytes(before)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "llava"}))
    with pytest.raises(
        UserError, match=r"gemma3, gemma4, .*mistral3, qwen3_5, qwen3_5_moe or muse_glimmer"
    ):
        multimodal.import_folder(tmp_path)
