"""A config.json becomes the decoder that it describes, or is refused with all problems."""

import copy
from typing import Any

import pytest
import transformers

from jaxsp.blocks.block_config import DeltaNetConfig, NormNames
from jaxsp.blocks.config import LayerConfig, ModelConfig, Rope
from jaxsp.core.errors import UserError, at
from jaxsp.hf import families, model_config, published, token_ids
from scripts.bench import configs
from tests import batches

LLAMA: dict[str, Any] = {
    name: value for name, value in configs.LLAMA_8B.items() if name != "rope_theta"
}

PUBLISHED = {name: model.fields for name, model in published.read_models().items()}
"""Fields that change a model, by name on the hub."""

OTHERS = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
}
"""Fields that every config.json has."""

LLAMA_3_1 = OTHERS | PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
LLAMA_3_1 |= {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False}
LLAMA_3_1 |= {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
LLAMA_3_1 |= {"max_position_embeddings": 131072, "pretraining_tp": 1}
SCALING = LLAMA_3_1["rope_scaling"]

MISTRAL = OTHERS | PUBLISHED["mistralai/Mistral-7B-Instruct-v0.3"]
MISTRAL |= {"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2}
MISTRAL |= {"max_position_embeddings": 32768}

QWEN = OTHERS | {"bos_token_id": 151643, "eos_token_id": 151645, "use_sliding_window": False}
QWEN2 = QWEN | PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"]
QWEN2 |= {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
QWEN2 |= {"max_window_layers": 21, "sliding_window": 32768}

QWEN3 = QWEN | PUBLISHED["Qwen/Qwen3-0.6B"]
QWEN3 |= {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "max_window_layers": 28}
QWEN3 |= {"rope_scaling": None, "sliding_window": None}

MUSE_GLIMMER = PUBLISHED["meta-models/Muse-Glimmer-30B"]


def read(fields: dict[str, Any]) -> ModelConfig:
    return model_config.parse_model_config(fields)


def problems(fields: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as raised, at("model.config"):
        read(fields)
    assert all(
        "\n" not in problem and problem.startswith("model.config")
        for problem in raised.value.problems
    )
    return raised.value.problems


LLAMA_3_1_ROPE = batches.make_rope(128, rope_theta=5e5, **SCALING)


def test_llama_3_1():
    assert read(LLAMA_3_1) == ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        layers=(LayerConfig(window=None, rope=LLAMA_3_1_ROPE),) * 32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        norm_eps=1e-5,
        tie_embeddings=False,
        initializer_range=0.02,
    )


def test_qwen_2_5():
    config = read(QWEN2)
    assert (config.qkv_bias, config.qk_norm) == (True, "none")
    assert {config.output_bias, config.mlp_bias} == {False}
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (14, 2, 64)
    assert config.layers[0].rope.description == "default, theta 1,000,000"
    assert config.tie_embeddings


def test_qwen_3():
    config = read(QWEN3)
    assert config.qk_norm == "head"
    assert {config.qkv_bias, config.output_bias, config.mlp_bias} == {False}
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 8, 128)


def test_mistral():
    config = read(MISTRAL)
    assert {config.qkv_bias, config.output_bias, config.mlp_bias} == {False}
    assert (config.qk_norm, config.tie_embeddings) == ("none", False)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    # Mistral-Nemo's heads are not hidden_size / num_attention_heads
    assert read({**MISTRAL, "hidden_size": 5120, "head_dim": 128}).head_dim == 128


def read_windows(fields: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in read(fields).layers]


def test_windows_are_read_as_transformers_reads_them():
    without = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    sliding = {**MISTRAL, "sliding_window": 512}
    assert read_windows(MISTRAL) == [None] * 32
    assert read_windows(sliding) == [512] * 32
    assert read_windows({**sliding, "layer_types": ["sliding_attention"] * 32}) == [512] * 32
    assert read_windows(without) == [4096] * 32  # transformers' default
    assert read_windows(QWEN2) == [None] * 24
    on = {**QWEN2, "use_sliding_window": True}
    assert read_windows({**on, "max_window_layers": 24}) == [None] * 24
    assert read_windows({**on, "max_window_layers": 0}) == [32768] * 24
    assert read_windows({**on, "max_window_layers": 20}) == [None] * 20 + [32768] * 4
    assert read_windows({**on, "max_window_layers": 0, "sliding_window": None}) == [None] * 24
    mixed = ["sliding_attention", "full_attention"] * 12
    assert read_windows({**on, "layer_types": mixed}) == [32768, None] * 12
    assert read_windows({**on, "layer_types": ["full_attention"] * 24}) == [None] * 24
    assert read(
        {**LLAMA, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 3}
    ) == read(LLAMA)


def test_each_family_has_its_own_biases():
    llama = read({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    assert not read({**LLAMA, "mlp_bias": True}).qkv_bias
    qwen3 = read({**QWEN3, "attention_bias": True})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.mlp_bias) == (True, True, False)


def test_fields_that_are_left_out_are_derived():
    fields = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    config = read(fields)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (32, 128, 1e-6)
    assert config.layers[0].rope == batches.make_rope(128)
    assert (
        read({**fields, "num_key_value_heads": None, "head_dim": None, "rope_scaling": None})
        == config
    )
    assert read({**QWEN2, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": SCALING},
        {"rope_parameters": {**SCALING, "rope_theta": 5e5}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                ("type" if key == "rope_type" else key): x for key, x in SCALING.items()
            },
        },
        {
            "rope_theta": 5e5,
            "rope_parameters": {**SCALING, "rope_theta": 5e5},
            "rope_scaling": SCALING,
        },
    ],
)
def test_every_form_of_the_rotation_gives_the_same_config(rope):
    assert read({**LLAMA, **rope, "rms_norm_eps": 1e-5}) == read(LLAMA_3_1)


QWEN3_MOE = PUBLISHED["Qwen/Qwen3-30B-A3B"]
QWEN3_5_MOE = PUBLISHED["Qwen/Qwen3.5-35B-A3B"]
GLM_4_5 = PUBLISHED["zai-org/GLM-4.5-Air"]


@pytest.mark.parametrize(
    ("fields", "has_experts"),
    [
        (QWEN3_MOE | {"mlp_only_layers": [1, 3], "decoder_sparse_step": 2}, [5, 7]),
        (GLM_4_5 | {"first_k_dense_replace": 3}, [3, 4, 5, 6, 7]),
        (QWEN3_5_MOE, list(range(8))),
    ],
)
def test_layers_with_experts(fields, has_experts):
    model = read(fields | {"num_hidden_layers": 8})
    layers = [n for n, layer in enumerate(model.layers) if layer.feed_forward == "experts"]
    assert layers == has_experts


OLMO_HYBRID = PUBLISHED["allenai/Olmo-Hybrid-7B"]


def test_olmo_hybrid():
    model = read(OLMO_HYBRID)
    norms = NormNames(
        pre_attention=None,
        post_attention="post_attention_layernorm",
        pre_mlp=None,
        post_mlp="post_feedforward_layernorm",
    )
    assert (model.norm_names, model.qk_norm, model.norm_eps) == (norms, "projection", 1e-6)
    assert model.delta_net == DeltaNetConfig(
        num_key_heads=30,
        num_heads=30,
        key_size=96,
        value_size=192,
        filter_size=4,
        strength_scale=2.0,
        norm_eps=1e-5,
        names=families.OLMO_DELTA_NET_NAMES,
        decay_range=(1e-4, 16.0),
        step_range=(0.001, 0.1),
    )
    assert [layer.mixer for layer in model.layers] == 8 * [*3 * ["delta_net"], "attention"]
    assert model.ropes == (Rope(frequencies=(), description="none"),)
    # transformers derives the sizes of delta nets
    derived = {name: x for name, x in OLMO_HYBRID.items() if not name.startswith("linear_")}
    assert read(derived) == model
    positive = read(OLMO_HYBRID | {"linear_allow_neg_eigval": False})
    assert positive.delta_net.strength_scale == 1


@pytest.mark.parametrize(
    ("changes", "description"),
    [
        ({"rope_theta": None}, "none"),
        ({"rope_parameters": {"rope_theta": None}}, "none"),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 5e5}, "none"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, "none"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None}, "default, theta 500,000"),
        ({"rope_theta": 5e5, "rope_scaling": None}, "default, theta 500,000"),
    ],
)
def test_a_theta_of_null_means_no_rope_where_transformers_reads_it(changes, description):
    fields = OLMO_HYBRID | {"rope_parameters": None} | changes
    (rope,) = read(fields).ropes
    assert rope.description == description
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(fields)).rope_parameters
    assert (theirs["rope_theta"] is None) == (description == "none")


def test_muse_glimmer_has_windows_and_rope_in_three_of_four_layers():
    config = read(MUSE_GLIMMER)
    assert [(layer.window, layer.rope.description) for layer in config.layers] == [
        *3 * [(2048, "default, theta 10,000")],
        (None, "none"),
    ] * 13
    assert config.attention_scale == 3.87 * 128**-0.5
    assert (config.norm_eps, config.post_norm_eps, config.logit_softcap) == (1e-5, 1e-8, 20.0)
    # transformers counts the layers of its defaults from the last one
    five = read(MUSE_GLIMMER | {"num_hidden_layers": 5})
    assert [layer.window for layer in five.layers] == [None, *3 * [2048], None]
    thetas = [0, *51 * [10000]]
    given = read(MUSE_GLIMMER | {"layer_rope_theta": thetas})
    assert given.layers[0].window == 2048
    descriptions = [layer.rope.description for layer in given.layers]
    assert descriptions == ["none", *51 * ["default, theta 10,000"]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query_pre_attn_scalar", 64),
        ("num_experts", 8),
        ("layer_norm_eps", 1e-5),
        ("use_bidirectional_attention", True),
        ("clip_qkv", 8.0),
        ("router_jitter_noise", 0.1),
        ("rope_local_base_freq", 1e4),
    ],
)
def test_fields_that_change_arithmetic_in_another_family_are_refused(name, value):
    (problem,) = problems(LLAMA_3_1 | {name: value})
    assert problem.startswith(f"model.config.{name} = ")


def test_special_tokens_of_the_tokenizer_come_before_those_of_the_config():
    class Tokenizer:
        bos_token_id = None
        eos_token_id = 5
        pad_token_id = None

    ids = token_ids.choose({"bos_token_id": 1, "eos_token_id": 2}, Tokenizer())
    assert ids == {"bos_token_id": 1, "eos_token_id": 5, "pad_token_id": None}
    assert token_ids.choose({"eos_token_id": [1, 5]}, Tokenizer())["eos_token_id"] == [1, 5]
    assert token_ids.choose({"eos_token_id": [1, 2]}, Tokenizer())["eos_token_id"] == 5
    assert token_ids.choose({"eos_token_id": [1, 2]}, None)["eos_token_id"] == [1, 2]
