"""Gemma 4: what its config.json may have, sizes by kind of layer, and kernels by size of heads."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from transformers.models.gemma4 import modeling_gemma4

from jaxsp.attention.attend import make_chosen_attend
from jaxsp.attention.selection import choose_attention, describe_choice
from jaxsp.blocks import layers
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, model_config, published, weights
from jaxsp.model import decoder
from jaxsp.training import train_state
from tests import batches
from tests.hf import oracle
from tests.messages import assert_names
from tests.unsharded import UnshardedGather

SHARED = oracle.MODELS["gemma4_shared"]


def parse(fields: dict[str, Any], **changes: Any) -> Any:
    return model_config.parse_model_config(fields | changes)


def test_layers_of_a_type_have_its_sizes():
    config = parse(oracle.MODELS["gemma4"])
    assert [layer.sizes.heads for layer in config.layers] == [(2, 8), (1, 16), (2, 8), (1, 16)]
    assert [layer.window for layer in config.layers] == [5, None, 5, None]
    rotated = [sum(map(bool, layer.rope.frequencies)) for layer in config.layers]
    assert rotated == [4, 2, 4, 2]
    assert len(config.layers[1].rope.frequencies) == 8


def test_shared_layers_use_the_keys_of_the_last_layer_of_their_type_before_them():
    types = [*2 * ["sliding_attention"], *2 * ["full_attention", "sliding_attention"]]
    config = parse(SHARED, num_hidden_layers=6, layer_types=types)
    kinds = [(layer.sizes.stored_keys, layer.sizes.shared_keys) for layer in config.layers]
    assert kinds == [
        *[(None, None), ("sliding", None), ("full", None)],
        *[(None, "sliding"), (None, "full"), (None, "full")],
    ]
    assert [layer.sizes.intermediate_size for layer in config.layers] == 3 * [56] + 3 * [112]


def test_sizes_that_transformers_writes_for_each_layer_are_read():
    fields = {x: y for x, y in oracle.MODELS["gemma4"].items() if "global" not in x}
    sizes = {"head_dim": 16, "num_key_value_heads": 1}
    written = {"per_layer_config": {"1": sizes, "3": sizes}}
    assert parse(fields | written) == parse(oracle.MODELS["gemma4"])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "vision"]),
        ({"per_layer_config": {"1": {"hidden_size": 8}}}, ["per_layer_config", "global_head_dim"]),
        ({"num_kv_shared_layers": 4}, ["num_kv_shared_layers = 4", "the first 1 of 5"]),
        ({"vocab_size_per_layer_input": 100}, ["vocab_size_per_layer_input = 100", "131"]),
        ({"enable_moe_block": True}, ["num_experts: missing", "moe_intermediate_size: missing"]),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_implemented_is_refused_by_name(changes, names):
    with pytest.raises(UserError) as caught:
        parse(SHARED, **changes)
    assert_names(str(caught.value), *names)


def test_the_scale_of_embeddings_is_rounded_to_bfloat16_as_in_transformers():
    scale = 5376**0.5
    theirs = modeling_gemma4.Gemma4TextScaledWordEmbedding(9, 16, 0, embed_scale=scale).bfloat16()
    table = jnp.asarray(theirs.weight.detach().float().numpy()).astype(jnp.bfloat16)
    expected = theirs(oracle.torch.arange(9)).detach().float().numpy()
    actual = np.asarray(layers.scale(table, scale).astype(jnp.float32))
    np.testing.assert_array_equal(actual, expected)


@dataclasses.dataclass(frozen=True)
class Gpu:
    device_kind: str = "NVIDIA H100 80GB HBM3"
    compute_capability: str = "9.0"
    platform: str = "gpu"


def test_layers_whose_heads_cudnn_does_not_compute_use_blockwise():
    model = parse(published.read_models()["google/gemma-4-31B-it"].fields)
    rows = dataclasses.replace(
        batches.make_config().step.rows, row_tokens=8192, seq=8, dtype="bfloat16"
    )
    requested = batches.make_config().step.attention
    choice = choose_attention(requested, rows, model, devices=[Gpu()], device_bytes=80 * 2**30)
    assert choice.kernel.name == "cudnn"
    assert [(x.heads, x.kernel.name) for x in choice.exceptions] == [((4, 512), "blockwise")]
    line = describe_choice(choice, model)
    assert_names(line, "10 of 60 layers", "4 K/V heads of 512", "up to 256")
    attend = make_chosen_attend(choice)
    selected = decoder.make_layers(model, attend, UnshardedGather(), 1)
    names = {kind.name: layer.attend.kernels[0][0].name for kind, layer in selected.items()}
    assert names == {"attention_mlp_sliding": "cudnn", "attention_mlp_full": "blockwise"}
    fixed = requested.model_copy(update={"kernel": "cudnn"})
    with pytest.raises(UserError, match="up to 256"):
        choose_attention(fixed, rows, model, devices=[Gpu()], device_bytes=80 * 2**30)


def test_tensors_that_shared_layers_do_not_use_are_ignored(tmp_path):
    """Files of the published models have k and v of all layers."""
    model = oracle.torch_model(SHARED)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = safetensors.numpy.load_file(path)
    for name in ("k_proj", "v_proj", "k_norm"):
        stored[f"model.layers.3.self_attn.{name}.weight"] = stored["model.norm.weight"]
    safetensors.numpy.save_file(stored, path, metadata={"format": "pt"})
    table = decoder.param_table(parse(SHARED))
    reader = weights.open_folder(folder.find(str(tmp_path)), table)
    read = train_state.load_weights(table, batches.mesh(1, 1, 1), reader.read)
    expected = oracle.stacked(oracle.named_weights(model), table)
    assert batches.is_bitwise_equal(read, expected)
