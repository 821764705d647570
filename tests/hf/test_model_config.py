"""A config.json becomes the decoder that it describes, or is refused with all problems."""

import collections
import copy
import pathlib
from typing import Any

import pytest
import transformers
import yaml

from jaxsp.blocks.config import DeltaNetConfig, LayerConfig, ModelConfig, QueryScale
from jaxsp.core.errors import UserError, at
from jaxsp.hf import config_fields, families, model_config, published
from jaxsp.hf.model_source import ModelSourceConfig
from scripts.bench import configs
from tests import batches
from tests.messages import assert_names, assert_refused

PUBLISHED = {name: model.fields for name, model in published.read_models().items()}
"""Fields that change a model, by name on the hub."""

HUB: dict[str, dict[str, Any]] = yaml.safe_load(
    (pathlib.Path(__file__).parent / "hub_configs.yaml").read_text()
)
"""Whole config.json files, by name on the hub."""

LLAMA = {name: value for name, value in configs.LLAMA_8B.items() if name != "rope_theta"}
LLAMA_3_1 = HUB["meta-llama/Llama-3.1-8B-Instruct"]
SCALING = LLAMA_3_1["rope_scaling"]
MISTRAL = HUB["mistralai/Mistral-7B-Instruct-v0.3"]
QWEN2 = HUB["Qwen/Qwen2.5-0.5B-Instruct"]
QWEN3 = HUB["Qwen/Qwen3-0.6B"]
QWEN3_5 = HUB["Qwen/Qwen3.5-27B"]["text_config"]
QWEN3_MOE = PUBLISHED["Qwen/Qwen3-30B-A3B"]
QWEN3_5_MOE = PUBLISHED["Qwen/Qwen3.5-35B-A3B"]
GLM_4_5 = PUBLISHED["zai-org/GLM-4.5-Air"]
GPT_OSS = PUBLISHED["openai/gpt-oss-20b"]
OLMO_HYBRID = PUBLISHED["allenai/Olmo-Hybrid-7B"]
MUSE_GLIMMER = PUBLISHED["meta-models/Muse-Glimmer-30B"]
PHI_4_MINI = HUB["microsoft/Phi-4-mini-instruct"]
MIXTRAL = MISTRAL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
MIXTRAL = {name: value for name, value in MIXTRAL.items() if name != "architectures"}


def read(fields: dict[str, Any], **changes: Any) -> ModelConfig:
    """The model of a config.json, as one that is written in a config."""
    fields = fields | changes
    source = ModelSourceConfig(config=fields)
    return model_config.parse_model_config(model_config.resolve_fields(fields, source))


def problems(fields: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as raised, at("model.config"):
        model_config.parse_model_config(fields)
    assert all("\n" not in x and x.startswith("model.config") for x in raised.value.problems)
    return raised.value.problems


def export(fields: dict[str, Any]) -> dict[str, Any]:
    return model_config.make_config_json(fields, dtype="bfloat16", token_ids={})


PHI_ROPE = "longrope, theta 10,000, short factors (for rows of at most 4,096 tokens)"
YARN_ROPE = "yarn, theta 150,000, factor 32 over 4,096 positions"
LLAMA_3_1_ROPE = "llama3, theta 500,000, factor 8 over 8,192 positions"
LAYERS: dict[str, dict[tuple[int | None, str], int]] = {
    "microsoft/Phi-3.5-mini-instruct": {(262144, PHI_ROPE): 32},
    "microsoft/Phi-4-mini-instruct": {(262144, f"{PHI_ROPE}, 96 of 128 elements rotated"): 32},
    "google/gemma-2-9b": {(4096, "default, theta 10,000"): 21, (None, "default, theta 10,000"): 21},
    "allenai/Olmo-3-1025-7B": {
        (4096, "default, theta 500,000"): 24,
        (None, "yarn, theta 500,000, factor 8 over 8,192 positions"): 8,
    },
    "HuggingFaceTB/SmolLM3-3B": {(None, "default, theta 5,000,000"): 27, (None, "none"): 9},
    "Qwen/Qwen3-30B-A3B": {(None, "default, theta 1,000,000"): 48},
    "openai/gpt-oss-20b": {(128, YARN_ROPE): 12, (None, YARN_ROPE): 12},
    "CohereLabs/c4ai-command-r7b-12-2024": {(4096, "default, theta 50,000"): 24, (None, "none"): 8},
    "meta-llama/Llama-3.1-8B-Instruct": {(None, LLAMA_3_1_ROPE): 32},
    "mistralai/Mistral-7B-Instruct-v0.3": {(None, "default, theta 1,000,000"): 32},
    "Qwen/Qwen2.5-0.5B-Instruct": {(None, "default, theta 1,000,000"): 24},
    "Qwen/Qwen3-0.6B": {(None, "default, theta 1,000,000"): 28},
}
"""Windows and RoPE of the layers of published models."""


@pytest.mark.parametrize("name", LAYERS)
def test_a_published_config_json_is_read_whole_and_exported_as_the_same_model(name):
    fields = copy.deepcopy(HUB[name])
    model = read(fields)
    assert fields == HUB[name], "it is not changed"
    layers = [(layer.window, layer.rope.description) for layer in model.layers]
    assert collections.Counter(layers) == LAYERS[name]
    assert model_config.parse_model_config(export(fields)) == model


def test_llama_3_1():
    rope = batches.make_rope(128, rope_theta=5e5, **SCALING)
    assert read(LLAMA_3_1) == ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        layers=(LayerConfig(window=None, rope=rope),) * 32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        norm_eps=1e-5,
        tie_embeddings=False,
        initializer_range=0.02,
    )


@pytest.mark.parametrize(
    ("fields", "changes", "biases", "qk_norm", "heads"),
    [
        (QWEN2, {}, (True, False, False), "none", (14, 2, 64)),
        (QWEN2, {"head_dim": 32}, (True, False, False), "none", (14, 2, 32)),
        (QWEN3, {}, (False, False, False), "head", (16, 8, 128)),
        (QWEN3, {"attention_bias": True}, (True, True, False), "head", (16, 8, 128)),
        (MISTRAL, {}, (False, False, False), "none", (32, 8, 128)),
        # Mistral-Nemo's heads are not hidden_size / num_attention_heads
        (MISTRAL, {"hidden_size": 5120, "head_dim": 128}, 3 * (False,), "none", (32, 8, 128)),
        (LLAMA_3_1, {"attention_bias": True}, (True, True, False), "none", (32, 8, 128)),
        (LLAMA_3_1, {"mlp_bias": True}, (False, False, True), "none", (32, 8, 128)),
    ],
)
def test_each_family_has_its_own_biases_and_sizes_of_heads(fields, changes, biases, qk_norm, heads):
    model = read(fields, **changes)
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == biases
    assert (model.qk_norm, (model.num_heads, model.num_kv_heads, model.head_dim)) == (
        qk_norm,
        heads,
    )


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


ON = {"use_sliding_window": True, "max_window_layers": 0}
WITHOUT_WINDOW = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}


@pytest.mark.parametrize(
    ("fields", "changes", "windows"),
    [
        (MISTRAL, {"sliding_window": 512}, [512] * 32),
        (MISTRAL, {"sliding_window": 512, "layer_types": ["sliding_attention"] * 32}, [512] * 32),
        (WITHOUT_WINDOW, {}, [4096] * 32),  # transformers' default
        (QWEN2, ON | {"max_window_layers": 24}, [None] * 24),
        (QWEN2, ON, [32768] * 24),
        (QWEN2, ON | {"max_window_layers": 20}, [None] * 20 + [32768] * 4),
        (QWEN2, ON | {"sliding_window": None}, [None] * 24),
        (QWEN2, ON | {"layer_types": ["sliding_attention", "full_attention"] * 12}, None),
        (QWEN2, ON | {"layer_types": ["full_attention"] * 24}, [None] * 24),
    ],
)
def test_windows_are_read_as_transformers_reads_them(fields, changes, windows):
    layers = read(fields, **changes).layers
    assert [layer.window for layer in layers] == (windows or [32768, None] * 12)


def test_fields_that_are_left_out_or_null_are_derived():
    fields = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    config = read(fields)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (32, 128, 1e-6)
    assert config.layers[0].rope == batches.make_rope(128)
    nulls = dict.fromkeys(("num_key_value_heads", "head_dim", "rope_scaling", "architectures"))
    assert read(fields, **nulls) == config


OLD_SCALING = {("type" if key == "rope_type" else key): x for key, x in SCALING.items()}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {**SCALING, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": OLD_SCALING},
        {
            "rope_theta": 5e5,
            "rope_parameters": {**SCALING, "rope_theta": 5e5},
            "rope_scaling": SCALING,
        },
    ],
)
def test_every_form_of_the_rotation_gives_the_same_config(rope):
    assert read({**LLAMA, **rope, "rms_norm_eps": 1e-5}) == read(LLAMA_3_1)


@pytest.mark.parametrize(
    ("fields", "has_experts"),
    [
        (QWEN3_MOE | {"mlp_only_layers": [1, 3], "decoder_sparse_step": 2}, [5, 7]),
        (QWEN3_MOE | {"mlp_only_layers": [*range(8)]}, []),
        (GLM_4_5 | {"first_k_dense_replace": 3}, [3, 4, 5, 6, 7]),
        (QWEN3_5_MOE, list(range(8))),
    ],
)
def test_layers_with_experts(fields, has_experts):
    model = read(fields, num_hidden_layers=8)
    layers = [n for n, layer in enumerate(model.layers) if layer.feed_forward == "experts"]
    assert layers == has_experts
    assert (model.experts is None) == (not has_experts)


NEXTN = "num_nextn_predict_layers"


@pytest.mark.parametrize(
    ("fields", "counts"),
    [(GLM_4_5 | {NEXTN: 2}, {NEXTN: 0}), (GLM_4_5 | {NEXTN: None}, {NEXTN: 0}), (QWEN3_5, {})],
)
def test_exports_count_no_layers_that_predict_further_tokens(fields, counts):
    """Transformers has 1 layer by default for GLM."""
    exported = export(fields)
    found = {name: exported[name] for name in exported if "nextn" in name or "mtp" in name}
    assert found == counts
    loaded = transformers.AutoConfig.for_model(**exported)
    assert all(getattr(loaded, name) == 0 for name in counts)


def test_names_of_fields_that_transformers_5_writes_are_read():
    renamed = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    assert read(renamed, num_local_experts=128) == read(QWEN3_MOE)
    assert read(QWEN3_MOE, num_local_experts=128) == read(QWEN3_MOE)
    with assert_refused("num_experts", "the same field", start=".num_local_experts = 64"):
        read(QWEN3_MOE, num_local_experts=64)


def test_olmo_hybrid():
    model = read(OLMO_HYBRID)
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
    # transformers derives the sizes of delta nets
    derived = {name: x for name, x in OLMO_HYBRID.items() if not name.startswith("linear_")}
    assert read(derived) == model
    assert read(OLMO_HYBRID, linear_allow_neg_eigval=False).delta_net.strength_scale == 1


@pytest.mark.parametrize(
    ("changes", "description"),
    [
        ({"rope_theta": None}, "none"),
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
    model = read(HUB["google/gemma-2-9b"], **{name: None})
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
    five = read(MUSE_GLIMMER, num_hidden_layers=5)
    assert [layer.window for layer in five.layers] == [None, *3 * [2048], None]


def test_a_changed_theta_is_that_of_all_layers_with_rope():
    fields = MUSE_GLIMMER | {"layer_rope_theta": [0, *51 * [10000]]}
    source = ModelSourceConfig(config=fields, rope={"theta": 5e5})
    for _ in range(2):
        fields = model_config.resolve_fields(fields, source)
        assert fields["layer_rope_theta"] == [0, *51 * [5e5]]
    descriptions = [layer.rope.description for layer in read(fields).layers[:2]]
    assert descriptions == ["none", "default, theta 500,000"]


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
    sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    sizes += ["intermediate_size"] if fields["intermediate_size"] is not None else []
    sizes += ["num_key_value_heads"] if fields["model_type"] != "llama" else []
    sizes += ["head_dim"] if fields["model_type"] in HEAD_DIM else []
    sizes += [name for name in fields if name.startswith("linear_") or name in EXPERT_SIZES]
    missing = problems({name: value for name, value in fields.items() if name not in sizes})
    assert sorted(problem.partition(":")[0] for problem in missing) == sorted(
        f"model.config.{name}" for name in sizes
    )


def test_all_problems_are_reported_together():
    wrong = {
        "hidden_act": "gelu",
        "hiden_size": 1,
        "vocab_size": 0,
        "mlp_bias": 1,
        "num_attention_heads": None,
        # these change arithmetic in another family
        "query_pre_attn_scalar": 64,
        "num_experts": 8,
        "layer_norm_eps": 1e-5,
        "use_bidirectional_attention": True,
        "clip_qkv": 8.0,
    }
    found = problems({**LLAMA, **wrong})
    names = [x.removeprefix("model.config.").split(" =")[0].split(":")[0] for x in found]
    assert sorted(names) == sorted(wrong)


def test_fields_that_are_not_known_to_change_arithmetic_are_kept_and_written_back():
    extra = {"unsloth_version": "2025.1", "layer_switch": 4, "use_cache": False}
    assert read(LLAMA_3_1 | extra) == read(LLAMA_3_1)
    fields = LLAMA_3_1 | extra | {"quantization_config": None, "mtp_loss": 1, "new": None}
    exported = export(fields)
    assert exported.items() >= extra.items()
    assert not {"quantization_config", "mtp_loss", "new"} & exported.keys()


def test_names_in_a_written_config_are_those_of_transformers_and_jaxsp():
    idle = {"_name_or_path": "x", "temperature": 0.6, "cache_implementation": "hybrid"}
    idle |= {"_attn_implementation_autoset": True, "return_dict": True, "rope_interleaved": False}
    idle |= {"rope_parameters": {"rope_theta": None}, "layer_types": ["full_attention"] * 32}
    assert read(LLAMA | idle) == read(LLAMA)
    with assert_refused("Did you mean hidden_size?", start=".hiden_size = 1"):
        read(LLAMA, hiden_size=1)
    with assert_refused("Leave it out", "hidden_size", start=".n_layers = 2"):
        read(LLAMA, n_layers=2)
    with assert_refused("Did you mean rope_theta?", start=".rope_teta = 1"):
        read(LLAMA_3_1, rope_teta=1)  # also in the whole config.json of a model
    for fields in HUB.values():
        read(fields)


def test_special_tokens_of_the_tokenizer_come_before_those_of_the_config():
    class Tokenizer:
        bos_token_id = None
        eos_token_id = 5
        pad_token_id = None

    choose = config_fields.choose_token_ids
    ids = choose({"bos_token_id": 1, "eos_token_id": 2}, Tokenizer())
    assert ids == {"bos_token_id": 1, "eos_token_id": 5, "pad_token_id": None}
    assert choose({"eos_token_id": [1, 5]}, Tokenizer())["eos_token_id"] == [1, 5]
    assert choose({"eos_token_id": [1, 2]}, Tokenizer())["eos_token_id"] == 5
    assert choose({"eos_token_id": [1, 2]}, None)["eos_token_id"] == [1, 2]


def test_transformers_4_finds_the_partial_rotation_and_the_scaling_of_phi():
    """It refuses a rope_scaling of Phi-3 with other fields than these three.

    Source: Phi3Config._rope_scaling_validation in transformers 4.57.
    """
    scaling = PHI_4_MINI["rope_scaling"]
    inside = {"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "rope_type": "longrope"}
    group = {name: value for name, value in scaling.items() if name != "type"} | inside
    outside = {"rope_scaling", "rope_theta", "partial_rotary_factor"}
    saved = {name: value for name, value in PHI_4_MINI.items() if name not in outside}
    for fields in (PHI_4_MINI, saved | {"rope_parameters": group}):
        exported = export(fields)
        assert exported["rope_scaling"] == scaling
        assert exported["partial_rotary_factor"] == 0.75
        assert exported["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_names_of_a_rope_type_mean_the_same_where_layers_differ(key):
    """Transformers 5.23 reads the default type from `type` here."""
    gemma = HUB["google/gemma-2-9b"]
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
    sizes += ("vocab_size", "num_key_value_heads", "head_dim", "query_pre_attn_scalar")
    fields = {name: gemma[name] for name in sizes} | {"model_type": "gemma3_text"}
    fields["rope_scaling"] = {key: "linear", "factor": 8.0}
    model = read(fields)
    ropes = [rope.description for rope in model.ropes]
    assert ropes == ["default, theta 10,000", "linear, theta 1,000,000, factor 8"]
    assert model_config.parse_model_config(export(fields)) == model


def test_the_problem_of_an_unknown_family_has_the_nearest_one():
    assert_names(problems({"model_type": "qwen4"})[0], "is not implemented", "llama")
