"""Exported folders load in transformers bit for bit; a failed export leaves no folder."""

import json
import pathlib
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxsp.blocks import layers
from jaxsp.core.errors import UserError
from jaxsp.data import tokenizers
from jaxsp.hf import model_config, weights
from jaxsp.model import decoder
from tests import batches
from tests.hf import oracle
from tests.messages import assert_names

TINY = {**oracle.MODELS["llama3"], "vocab_size": 257}
"""Model with biases, scaled rotations, an explicit head_dim and the byte tokenizer's vocabulary."""


def random_master(config: Any) -> layers.Weights:
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda param: rng.normal(0, 0.3, param.stacked_shape).astype(np.float32),
        decoder.param_table(config),
    )


def export(directory: pathlib.Path, fields: dict[str, Any], **changes: Any) -> layers.Weights:
    """Exports random weights, and returns them."""
    config = model_config.parse_model_config(fields)
    master = changes.pop("master", None) or random_master(config)
    options = {"tokenizer": None, "dtype": "float32"} | changes
    weights.export_model(
        master, table=decoder.param_table(config), fields=fields, directory=directory, **options
    )
    return master


def load(directory: pathlib.Path) -> Any:
    """The model as transformers loads it, in the dtype that the folder names."""
    model, info = oracle.transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("name", oracle.TEXT_EXPORTS)
def test_an_export_is_the_same_model_in_transformers_and_when_it_is_read_back(tmp_path, name):
    fields = oracle.MODELS[name]
    config = model_config.parse_model_config(fields)
    master = export(tmp_path / "out", fields)
    model = load(tmp_path / "out")
    back = oracle.stacked(oracle.named_weights(model), decoder.param_table(config))
    assert batches.is_bitwise_equal(back, master)

    path = tmp_path / "out/config.json"
    written = json.loads(path.read_text())
    assert written["architectures"] == [type(model).__name__]
    assert model_config.parse_model_config(written) == config
    assert model_config.parse_model_config(model.config.to_dict()) == config
    if "proportional" in str(written["rope_parameters"]):
        return  # transformers 4 has no such family
    # the fields that transformers 4 wrote
    legacy = {name: x for name, x in written.items() if name not in ("rope_parameters", "dtype")}
    assert model_config.parse_model_config(legacy) == config
    path.write_text(json.dumps(legacy))
    old = oracle.transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert old.dtype == model.config.dtype
    assert old.rope_parameters == model.config.rope_parameters


def test_the_default_dtype_is_bfloat16_with_rounded_weights_except_decays(tmp_path):
    """Published files have float32 decays of delta nets among bfloat16 tensors too."""
    fields = oracle.MODELS["qwen3_5"]
    config = model_config.parse_model_config(fields)
    table = decoder.param_table(config)
    master = jax.tree.map(jnp.asarray, random_master(config))  # as at the end of a run
    out = tmp_path / "out"
    weights.export_model(master, table=table, fields=fields, tokenizer=None, directory=out)
    stored = safetensors.numpy.load_file(out / "model.safetensors")
    back = oracle.stacked(
        {name: oracle.torch.from_numpy(x.astype(np.float32)) for name, x in stored.items()}, table
    )
    in_float32 = {name for name, array in stored.items() if array.dtype == np.float32}
    assert {name.rpartition(".")[2] for name in in_float32} == {"A_log", "dt_bias"}
    for param, value, expected in zip(*map(jax.tree.leaves, (table, back, master)), strict=True):
        dtype = param.file_dtype or "bfloat16"
        assert batches.is_bitwise_equal(value, np.asarray(expected.astype(dtype), np.float32))
    dtypes = {weight.dtype for weight in load(out).parameters()}
    assert dtypes == {oracle.torch.bfloat16}


def test_weights_in_several_files_have_an_index_and_load(tmp_path):
    master = export(tmp_path / "out", TINY, max_shard_size="60KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in jax.tree.leaves(master))
    names = {}
    for file in files:
        with safetensors.safe_open(tmp_path / "out" / file, "np") as tensors:
            names |= dict.fromkeys(tensors.keys(), file)
            assert tensors.metadata() == {"format": "pt"}
    assert names == index["weight_map"]
    table = decoder.param_table(model_config.parse_model_config(TINY))
    back = oracle.stacked(dict(load(tmp_path / "out").named_parameters()), table)
    assert batches.is_bitwise_equal(back, master)


def test_views_are_written_in_the_order_of_their_elements(tmp_path):
    """safetensors silently ignores the strides of a transposed view."""
    config = model_config.parse_model_config(TINY)
    master = random_master(config)
    views = jax.tree.map(lambda array: np.ascontiguousarray(array.T).T, master)
    export(tmp_path / "views", TINY, master=views)
    export(tmp_path / "plain", TINY, master=master)
    assert (tmp_path / "views/model.safetensors").read_bytes() == (
        tmp_path / "plain/model.safetensors"
    ).read_bytes()


def test_host_memory_holds_one_file_at_a_time(tmp_path):
    fields = {
        **TINY,
        "vocab_size": 300,
        "num_hidden_layers": 24,
        "hidden_size": 128,
        "intermediate_size": 256,
    }
    config = model_config.parse_model_config(fields)
    master = random_master(config)
    export(tmp_path / "warm", TINY)
    tracemalloc.start()
    try:
        export(tmp_path / "out", fields, master=master, max_shard_size=10**6)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(array.nbytes for array in jax.tree.leaves(master)) > 10 * 10**6
    assert peak < 2 * 10**6


def test_the_tokenizer_and_its_special_tokens_are_exported(tmp_path):
    tokenizer = tokenizers.make_byte_tokenizer()
    export(tmp_path / "out", {**TINY, "bos_token_id": 7, "eos_token_id": 2}, tokenizer=tokenizer)
    loaded = oracle.transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("naïve <eos>")["input_ids"] == list("naïve <eos>".encode())
    model = load(tmp_path / "out")
    for config in (model.generation_config, model.config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (7, 256, None)


def test_without_a_tokenizer_there_are_no_special_tokens(tmp_path):
    """The default of transformers for llama is eos_token_id = 2, whatever token 2 is."""
    export(tmp_path / "out", TINY)
    files = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    model = load(tmp_path / "out")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (None, None)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["out", "new/parent/out"])
def test_a_failed_export_leaves_no_files_and_no_folders(tmp_path, monkeypatch, error, name):
    save = safetensors.numpy.save_file
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise error
        save(*args, **kwargs)

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises((UserError, KeyboardInterrupt)) as raised:
        export(tmp_path / name, TINY, max_shard_size="60KB")
    if isinstance(error, OSError):
        assert_names(
            raised.value, "[Errno 28] No space left on device", start=f"{tmp_path}/{name}: "
        )
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


def test_only_a_new_or_an_empty_folder_is_written_to(tmp_path):
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", TINY)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for name in ("empty", "empty/config.json"):
        with pytest.raises(UserError, match=rf"^{tmp_path}/{name}: .*empty folder"):
            export(tmp_path / name, TINY)
    with pytest.raises(UserError, match=rf"^{tmp_path}/empty/config\.json/out: .*\[Errno"):
        export(tmp_path / "empty/config.json/out", TINY)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
