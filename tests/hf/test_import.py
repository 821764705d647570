"""Checkpoints of transformers are imported bit for bit on every mesh, and exported unchanged."""

import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxsp.blocks import layers
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, model_config, weights
from jaxsp.model import decoder
from jaxsp.sharding import sharding
from jaxsp.training import train_state
from tests import batches
from tests.hf import oracle

MESHES = [(1, 1, 1), (1, 2, 4), (1, 8, 1)]


@pytest.fixture(autouse=True)
def _sharded(monkeypatch):
    """Small models are sharded as large ones are."""
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 100)


def checkpoint(
    directory: pathlib.Path, fields: dict[str, Any], *, dtype: str = "float32", **config: Any
) -> dict[str, Any]:
    """Writes a folder with transformers, and returns its tensors by name."""
    model = oracle.torch_model(fields).to(getattr(oracle.torch, dtype))
    model.save_pretrained(directory, **config)
    return tensors(directory)


def tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Every tensor of every file, by name."""
    files = [safetensors.numpy.load_file(path) for path in directory.glob("*.safetensors")]
    assert sum(map(len, files)) == len({name for file in files for name in file})
    return {name: array for file in files for name, array in file.items()}


def read(
    directory: pathlib.Path, sizes: tuple[int, int, int] = (1, 1, 1)
) -> tuple[layers.Weights, layers.Weights]:
    """The table of a folder's model, and its weights, imported on a mesh and unsharded."""
    source = folder.find(str(directory))
    table = decoder.param_table(model_config.parse_model_config(source.config_fields))
    stored = train_state.load_weights(
        table, batches.mesh(*sizes), weights.open_folder(source, table).read
    )
    return table, jax.tree.map(
        lambda param, array: np.asarray(sharding.remove_padding(param, array)), table, stored
    )


FLOAT32_NAMES = ("A_log", "dt_bias", "e_score_correction_bias")
"""Ends of the names of tensors that are float32 in every export."""

STORED = [*itertools.product(MESHES, ("float32", "bfloat16", "float16"))]
"""Meshes, and dtypes of the files. Each model has one of them in the default tier."""


@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    [
        pytest.param(name, *stored, marks=[] if number % 9 == index else [pytest.mark.slow])
        for number, name in enumerate(oracle.TEXT_EXPORTS)
        for index, stored in enumerate(STORED)
    ],
)
def test_import_and_export_keep_every_tensor_bit_for_bit(tmp_path, name, sizes, dtype):
    several = dtype != "bfloat16"
    written = checkpoint(
        tmp_path / "in",
        oracle.MODELS[name],
        dtype=dtype,
        max_shard_size="30KB" if several else "5GB",
    )
    source = oracle.as_published(written)
    assert (len(list((tmp_path / "in").glob("*.safetensors"))) > 2) == several
    assert {array.dtype for array in source.values()} == {jnp.dtype(dtype)}
    table, master = read(tmp_path / "in", sizes)
    expected = {
        name: oracle.torch.from_numpy(array.astype(np.float32)) for name, array in source.items()
    }
    assert batches.is_bitwise_equal(master, oracle.stacked(expected, table))

    exported = "bfloat16" if dtype == "bfloat16" else "float32"
    fields = folder.find(str(tmp_path / "in")).config_fields
    weights.export_model(
        master,
        table=table,
        fields=fields,
        tokenizer=None,
        directory=tmp_path / "out",
        dtype=exported,
    )
    back = tensors(tmp_path / "out")
    assert back.keys() == source.keys()
    is_glm = name == "glm4_moe"  # transformers keeps its routers in float32
    names = (*FLOAT32_NAMES, "mlp.gate.weight") if is_glm else FLOAT32_NAMES
    for key, array in source.items():
        stored = "float32" if key.endswith(names) else exported
        assert batches.is_bitwise_equal(back[key], array.astype(jnp.dtype(stored))), key


@pytest.mark.parametrize("naming", ["published", "modules"])
def test_tensors_of_olmo_hybrid_are_read_under_all_their_names(tmp_path, naming):
    """Files on the hub have three convolutions, and modules have one. In files of transformers, the
    three have other rows, and norms have other names."""
    fields = oracle.MODELS["olmo hybrid"] | {"linear_value_head_dim": 16}
    model = oracle.torch_model(fields)
    written = checkpoint(tmp_path, fields)
    rows = [len(written[f"model.layers.0.linear_attn.{part}_conv1d.weight"]) for part in "qkv"]
    assert rows == [54, 54, 52]  # of q and k: 48
    assert "model.layers.2.feedforward_layer_norm.weight" in written
    _, expected = read(tmp_path)
    stored = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    if naming == "published":
        stored = oracle.as_published(stored)
    assert stored.keys() & written.keys() < written.keys()
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    for sizes in ((1, 1, 1), (1, 8, 1)):
        assert batches.is_bitwise_equal(read(tmp_path, sizes)[1], expected)

    first = "model.layers.0.linear_attn."
    del stored[first + ("q_conv1d.weight" if naming == "published" else "conv1d.weight")]
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"missing tensors: .*{first}q_conv1d\.weight"):
        read(tmp_path)
    stored["model.layers.0.attention_layer_norm.weight"] = np.ones(48, np.float32)
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.0\.input_layernorm\.weight: stored twice"):
        read(tmp_path)


def check_slices(directory: pathlib.Path, table: layers.Weights, master: layers.Weights) -> None:
    """Slices of experts' weights are those of the whole weights, also empty ones."""
    reader = weights.open_folder(folder.find(str(directory)), table)
    for param, array in zip(jax.tree.leaves(table), jax.tree.leaves(master), strict=True):
        if param.num_experts is not None:
            for experts in (slice(1, 3), slice(6, 6)):
                index = (experts, slice(5, 38), slice(33, 99))[: len(param.shape)]
                part = reader.read(param, param.layers[-1], index)
                assert batches.is_bitwise_equal(part, array[-1][index]), param.hf_name


@pytest.mark.slow
def test_tensors_of_all_experts_give_the_same_bits_as_one_for_each(tmp_path):
    fields = oracle.MODELS["qwen3_moe"] | {"num_hidden_layers": 2}
    model = oracle.torch_model(fields)
    written = checkpoint(tmp_path, fields)
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in written
    expected = [read(tmp_path, sizes)[1] for sizes in MESHES]
    fused = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    first = "model.layers.0.mlp.experts."
    assert fused[f"{first}gate_up_proj"].shape == (6, 80, 48)
    names = {f"{name.removeprefix('model.')}": array for name, array in fused.items()}  # AutoModel
    for stored in (fused, names):
        safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
        for sizes, same in zip(MESHES, expected, strict=True):
            assert batches.is_bitwise_equal(read(tmp_path, sizes)[1], same)
        check_slices(tmp_path, *read(tmp_path))

    gate_up = fused[f"{first}gate_up_proj"]
    problems = {
        rf"missing tensors: {first}5\.gate_proj\.weight, {first}5\.up_proj\.weight\.": gate_up[:5],
        rf"another shape .*: {first}0\.gate_proj\.weight \[40, 47\]": gate_up[..., :-1],
        rf"does not have: {first}6\.gate_proj\.weight": np.concatenate([gate_up, gate_up[:1]]),
        rf"does not have: {first}gate_up_proj\.": gate_up[:, 1:],
    }
    for problem, array in problems.items():
        changed = fused | {f"{first}gate_up_proj": np.ascontiguousarray(array)}
        safetensors.numpy.save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=problem):
            read(tmp_path)
    both = fused | {f"{first}0.down_proj.weight": fused[f"{first}down_proj"][0]}
    safetensors.numpy.save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"does not have: {first}down_proj\."):
        read(tmp_path)


def test_experts_in_mxfp4_are_read_as_transformers_reads_them_and_exported_in_bfloat16(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    fields = oracle.MODELS["gpt_oss"] | {"hidden_size": 96, "intermediate_size": 64}
    plain = checkpoint(tmp_path, fields)
    rng = np.random.default_rng(5)
    quantized = dict(plain)
    for name in [name for name in plain if name.endswith("experts.gate_up_proj")] + [
        name for name in plain if name.endswith("experts.down_proj")
    ]:
        num_experts, num_columns, num_rows = quantized.pop(name).shape
        shape = (num_experts, num_rows, num_columns // 32)
        blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
        scales = rng.integers(120, 131, shape, np.uint8)
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parts = map(oracle.torch.from_numpy, (blocks, scales))
        plain[name] = mxfp4.convert_moe_packed_tensors(*parts).float().numpy()
    safetensors.numpy.save_file(plain, tmp_path / "model.safetensors")
    expected = [read(tmp_path, sizes)[1] for sizes in MESHES]
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(quantized, tmp_path / "model.safetensors")
    for sizes, same in zip(MESHES, expected, strict=True):
        assert batches.is_bitwise_equal(read(tmp_path, sizes)[1], same)

    table, master = read(tmp_path)
    check_slices(tmp_path, table, master)
    weights.export_model(
        master, table=table, fields=config, tokenizer=None, directory=tmp_path / "out"
    )
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    exported = tensors(tmp_path / "out")
    assert exported.keys() == plain.keys()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert batches.is_bitwise_equal(exported[name], plain[name].astype(jnp.bfloat16))

    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(UserError, match=r"quantization_config = .*must not be quantized"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    del quantized[f"{name}_scales"]
    safetensors.numpy.save_file(quantized, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"missing tensors: {name}\.[^$]*{name}_blocks"):
        read(tmp_path)


def test_one_tensor_is_enough_for_a_tied_embedding_and_head_under_either_name(tmp_path):
    """safetensors.torch.save_model keeps the first name in the alphabet, which is the head's."""
    source = checkpoint(tmp_path, oracle.MODELS["llama tied"])
    assert "lm_head.weight" not in source
    both = source | {"lm_head.weight": source["model.embed_tokens.weight"]}
    head_only = dict(both)
    del head_only["model.embed_tokens.weight"]
    _, expected = read(tmp_path)
    for stored in (both, head_only):
        safetensors.numpy.save_file(
            stored, tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        model = oracle.transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert batches.is_bitwise_equal(
            model.model.embed_tokens.weight.detach().numpy(), expected["embedding"]
        )
        _, imported = read(tmp_path)
        assert batches.is_bitwise_equal(imported, expected)


def test_rotary_frequencies_of_old_llamas_are_ignored(tmp_path):
    source = checkpoint(tmp_path, oracle.MODELS["llama"])
    _, expected = read(tmp_path)
    extra = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)
        for layer in range(2)
    }
    safetensors.numpy.save_file(
        source | extra, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    assert batches.is_bitwise_equal(read(tmp_path)[1], expected)


def test_exports_contain_the_small_files_of_their_source(tmp_path):
    checkpoint(tmp_path / "in", oracle.MODELS["mistral"] | {"sliding_window": None})
    (tmp_path / "in/generation_config.json").write_text(
        '{"temperature": 0.6, "eos_token_id": [2, 7]}'
    )
    (tmp_path / "in/tokenizer.json").write_text("{}")
    (tmp_path / "in/chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "in/modeling.py").write_text("raise SystemExit")
    source = folder.find(str(tmp_path / "in"))
    folder.copy_small_files(source.path, tmp_path / "kept")
    names = {"chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == names
    table, master = read(tmp_path / "in")
    weights.export_model(
        master,
        table=table,
        fields=source.config_fields,
        tokenizer=None,
        directory=tmp_path / "out",
        small_files=tmp_path / "kept",
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "model.safetensors"}
    for name in names - {"config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["sliding_window"] is None
