"""Exports of a multimodal model whose text model has no class of its own in transformers."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import jaxsp
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, model_config, weights
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.hf.multimodal import describe_missing
from jaxsp.model import decoder
from tests import batches
from tests.hf import multimodal, oracle
from tests.messages import assert_names, assert_refused

FIELDS = multimodal.MODELS["muse_glimmer"]

PREFIX = "model.language_model."

CONFIG = {
    **{"run": {"steps": 1}, "mesh": {"seq": 2}, "data": {"row_tokens": 32}},
    **{"batch": {"rows_per_step": 4}, "optimizer": {"learning_rate": 0.1}},
}


def save(directory: pathlib.Path, dtype: str) -> dict[str, np.ndarray]:
    """Saves the whole model with transformers, and returns its tensors."""
    model = multimodal.torch_model(FIELDS).to(getattr(oracle.torch, dtype))
    model.save_pretrained(directory, max_shard_size="60KB")
    (directory / "processor_config.json").write_text('{"size": 4}')
    return tensors(directory)


def tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    return {name: x for file in files for name, x in safetensors.numpy.load_file(file).items()}


def is_text(name: str) -> bool:
    return name.startswith(PREFIX) or name == "lm_head.weight"


def export(source: pathlib.Path, out: pathlib.Path, **model: Any) -> tuple[Any, Any]:
    """Exports the text model with doubled embeddings in float32, and returns it."""
    found, fields, master = multimodal.import_folder(source, **model)
    parsed = model_config.parse_model_config(fields)
    table = decoder.param_table(parsed)
    master["embedding"] = 2 * master["embedding"]
    weights.export_model(
        master,
        table=table,
        fields=fields,
        tokenizer=None,
        directory=out,
        dtype="float32",
        max_shard_size="60KB",
        other_parts=weights.open_other_parts(found, parsed),
    )
    return parsed, master


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_has_the_trained_text_model_and_unchanged_other_parts(tmp_path, dtype):
    before = save(tmp_path / "in", dtype)
    export(tmp_path / "in", tmp_path / "out")
    after = tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    parts = {name.split(".")[1] for name in before if not is_text(name)}
    assert parts == {"vision_tower", "vision_adapter", "vision_projection"}
    for name, array in before.items():
        expected = array.astype(np.float32) if is_text(name) else array
        factor = 2 if name == f"{PREFIX}embed_tokens.weight" else 1
        assert after[name].dtype == expected.dtype
        assert batches.is_bitwise_equal(after[name], factor * expected), name
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in after.values())
    assert (tmp_path / "out/processor_config.json").read_text() == '{"size": 4}'


@pytest.mark.slow
def test_transformers_loads_an_export_with_a_changed_rope_and_computes_the_same(tmp_path):
    save(tmp_path / "in", "float32")
    config, master = export(tmp_path / "in", tmp_path / "out", rope={"theta": 77.0})
    loaded, info = oracle.transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(info.values()), info
    multimodal.check_logits(loaded, config, master)

    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "out")
    )
    text = after["text_config"]
    assert text["rope_parameters"]["rope_theta"] == 77.0
    assert text["layer_rope_theta"] == [77.0, 0, 77.0, 77.0, 0]
    changed = {"text_config", "dtype", "torch_dtype"}
    assert {name: x for name, x in after.items() if name not in changed} == {
        name: x for name, x in before.items() if name not in changed
    }
    fields = folder.find(str(tmp_path / "out")).config_fields
    again = model_config.resolve_fields(fields, ModelSourceConfig(config=fields))
    assert model_config.parse_model_config(again) == config


def test_a_model_that_the_library_has_loaded_is_saved_with_all_parts(tmp_path):
    before = save(tmp_path / "in", "float32")
    jaxsp.Trainer(CONFIG | {"model": {"source": str(tmp_path / "in")}}).save(
        tmp_path / "out", dtype="float32"
    )
    after = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert batches.is_bitwise_equal(after, before)


def test_a_text_model_is_saved_with_the_parts_of_another_folder(tmp_path):
    before = save(tmp_path / "whole", "float32")
    text = {
        f"model.{name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else name: x
        for name, x in before.items()
        if is_text(name)
    }
    (tmp_path / "text").mkdir()
    safetensors.numpy.save_file(text, tmp_path / "text/model.safetensors")
    (tmp_path / "text/config.json").write_text(json.dumps(FIELDS["text_config"]))
    trainer = jaxsp.Trainer(CONFIG | {"model": {"source": str(tmp_path / "text")}})
    with pytest.raises(UserError) as raised:
        trainer.save(tmp_path / "out")
    parts = ("multimodal checkpoint", "--source", "Trainer.save(..., source=...)")
    assert_names(raised.value, *parts, start=f"model.source = {tmp_path / 'text'}: ")
    source = str(tmp_path / "whole")
    trainer.save(tmp_path / "out", dtype="float32", source=source)
    after = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert batches.is_bitwise_equal(after, before)


def test_a_source_that_no_part_is_read_from_is_refused(tmp_path):
    oracle.torch_model(oracle.MODELS["llama3"]).save_pretrained(tmp_path / "in")
    trainer = jaxsp.Trainer(CONFIG | {"model": {"source": str(tmp_path / "in")}})
    with assert_refused("llama", "Leave it out", start="source = elsewhere: "):
        trainer.save(tmp_path / "out", source="elsewhere")


def test_the_parts_that_an_export_needs_are_described_if_the_run_does_not_have_them(tmp_path):
    for name, fields in (("whole", FIELDS), ("text", FIELDS["text_config"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    describe = describe_missing
    assert describe(FIELDS["text_config"], tmp_path / "whole") == ""
    for directory in (None, tmp_path, tmp_path / "text"):
        assert describe(oracle.MODELS["llama3"], directory) == ""
        assert_names(describe(FIELDS["text_config"], directory), "muse_glimmer_text", "--source")
