"""A config.json becomes the decoder that it describes, or is refused with all problems."""

import copy
from typing import Any

import pytest
import transformers

from jaxsp.blocks.config import (
    DeltaNetConfig,
    LayerConfig,
    ModelConfig,
    NormNames,
    QueryScale,
    Rope,
)
from jaxsp.core.errors import UserError, at
from jaxsp.hf import families, model_config, published, token_ids
from jaxsp.hf.model_source import ModelSourceConfig
from scripts.bench import configs
from tests import batches
from tests.hf import multimodal

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

QWEN3_5: dict[str, Any] = multimodal.QWEN3_5_27B["text_config"]
"""The text_config of Qwen3.5-27B."""

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


def test_ministral_3_scales_queries_beyond_the_original_range():
    group = {"rope_type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1}
    fields = {**MISTRAL, "model_type": "ministral3", "architectures": None, "head_dim": 128}
    fields |= {"rope_theta": None, "rope_parameters": group}
    # as in transformers, max_position_embeddings is the default
    assert read(fields).query_scale == QueryScale(beta=0.1, original_max_position_embeddings=32768)
    group["original_max_position_embeddings"] = 16384
    assert read(fields).query_scale == QueryScale(beta=0.1, original_max_position_embeddings=16384)
    del fields["rope_parameters"]
    assert read(fields).query_scale == QueryScale(beta=0.1, original_max_position_embeddings=16384)


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


def test_the_input_fields_are_not_changed():
    fields = {**LLAMA, "rope_scaling": dict(SCALING), "rope_theta": 5e5}
    read(fields)
    assert fields == {**LLAMA, "rope_scaling": SCALING, "rope_theta": 5e5}


QWEN3_MOE = PUBLISHED["Qwen/Qwen3-30B-A3B"]
QWEN3_5_MOE = PUBLISHED["Qwen/Qwen3.5-35B-A3B"]
GLM_4_5 = PUBLISHED["zai-org/GLM-4.5-Air"]
GPT_OSS = PUBLISHED["openai/gpt-oss-20b"]
MIXTRAL = MISTRAL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
MIXTRAL = {name: value for name, value in MIXTRAL.items() if name != "architectures"}


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


NEXTN = "num_nextn_predict_layers"


@pytest.mark.parametrize(
    ("fields", "counts"),
    [(GLM_4_5 | {NEXTN: 2}, {NEXTN: 0}), (GLM_4_5 | {NEXTN: None}, {NEXTN: 0}), (QWEN3_5, {})],
)
def test_exports_count_no_layers_that_predict_further_tokens(fields, counts):
    """Transformers has 1 layer by default for GLM."""
    exported = model_config.make_config_json(fields, dtype="bfloat16", token_ids={})
    found = {name: exported[name] for name in exported if "nextn" in name or "mtp" in name}
    assert found == counts
    loaded = transformers.AutoConfig.for_model(**exported)
    assert all(getattr(loaded, name) == 0 for name in counts)


def test_names_of_fields_that_transformers_5_writes_are_read():
    renamed = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    assert read(renamed | {"num_local_experts": 128}) == read(QWEN3_MOE)
    assert read(QWEN3_MOE | {"num_local_experts": 128}) == read(QWEN3_MOE)


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


@pytest.mark.parametrize("name", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_a_limit_of_null_is_no_limit_in_gemma2(name):
    """transformers' default is a limit."""
    sizes = {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
    model = read({**LLAMA, "model_type": "gemma2", **sizes, name: None})
    limits = {
        "final_logit_softcapping": model.logit_softcap,
        "attn_logit_softcapping": model.attention_softcap,
    }
    assert [key for key, limit in limits.items() if limit is None] == [name]


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


def test_a_changed_theta_is_that_of_all_layers_with_rope():
    fields = MUSE_GLIMMER | {"layer_rope_theta": [0, *51 * [10000]]}
    source = ModelSourceConfig(config=fields, rope={"theta": 5e5})
    for _ in range(2):
        fields = model_config.resolve_fields(fields, source)
        assert fields["layer_rope_theta"] == [0, *51 * [5e5]]
    assert [layer.rope.description for layer in read(fields).layers[:2]] == [
        "none",
        "default, theta 500,000",
    ]


HEAD_DIM = (
    *("qwen3", "qwen3_5_text", "muse_glimmer_text"),
    *("qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "glm4_moe"),
)
"""Families whose head_dim has no default."""

EXPERT_SIZES = (
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
)


@pytest.mark.parametrize(
    "fields",
    [
        *(LLAMA_3_1, MISTRAL, QWEN2, QWEN3, QWEN3_5, MUSE_GLIMMER),
        *(MIXTRAL, QWEN3_MOE, QWEN3_5_MOE, GPT_OSS, GLM_4_5),
    ],
)
def test_sizes_have_no_default(fields):
    sizes = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    ]
    sizes += ["num_key_value_heads"] if fields["model_type"] != "llama" else []
    sizes += ["head_dim"] if fields["model_type"] in HEAD_DIM else []
    sizes += [name for name in fields if name.startswith("linear_") or name in EXPERT_SIZES]
    if fields["intermediate_size"] is None:
        sizes.remove("intermediate_size")
    missing = problems({name: value for name, value in fields.items() if name not in sizes})
    assert sorted(problem.partition(":")[0] for problem in missing) == sorted(
        f"model.config.{name}" for name in sizes
    )


def test_all_problems_are_reported_together():
    wrong = {
        "hidden_act": "gelu",
        "hiden_size": 1,
        "rope_scaling": {"type": "yarn"},
        "vocab_size": 0,
        "mlp_bias": 1,
    }
    names = [
        problem.removeprefix("model.config.").split(" =")[0].split(":")[0]
        for problem in problems({**LLAMA, **wrong, "num_attention_heads": None})
    ]
    assert sorted(names) == sorted(
        [
            "hidden_act",
            "hiden_size",
            "rope_scaling.rope_type",
            "vocab_size",
            "mlp_bias",
            "num_attention_heads",
        ]
    )


def test_fields_without_effect_are_accepted():
    idle = {
        "_name_or_path": "x",
        "temperature": 0.6,
        "top_p": 0.9,
        "use_cache": False,
        "rope_interleaved": False,
        "new": None,
        "rope_parameters": {"rope_theta": None},
    }
    assert read(
        {**LLAMA, **idle, "architectures": None, "layer_types": ["full_attention"] * 32}
    ) == read(LLAMA)


def test_fields_that_are_not_known_to_change_arithmetic_are_kept_and_written_back():
    extra = {"unsloth_version": "2025.1", "layer_switch": 4, "use_cache": False}
    assert read(LLAMA_3_1 | extra) == read(LLAMA_3_1)
    fields = LLAMA_3_1 | extra | {"quantization_config": None, "mtp_loss": 1, "new": None}
    exported = model_config.make_config_json(fields, dtype="bfloat16", token_ids={})
    assert exported.items() >= extra.items()
    assert not {"quantization_config", "mtp_loss", "new"} & exported.keys()


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


def test_a_model_whose_layers_all_have_an_mlp_has_no_experts():
    fields = QWEN3_MOE | {"num_hidden_layers": 2, "mlp_only_layers": [0, 1]}
    assert model_config.parse_model_config(fields).experts is None
    fields |= {"mlp_only_layers": [0]}
    assert model_config.parse_model_config(fields).experts is not None
