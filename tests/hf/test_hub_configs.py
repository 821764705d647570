"""Whole config.json files, as published on the hub, are read and exported with every field."""

import collections
from typing import Any

import pytest

from jaxsp.hf import model_config

COMMON = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
COMMON |= {"attention_bias": False, "attention_dropout": 0.0, "transformers_version": "4.45.0"}
SILU = COMMON | {"hidden_act": "silu"}
WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
YARN |= {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
PHI_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}

PHI_3 = SILU | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "bos_token_id": 1}
PHI_3 |= {"_name_or_path": "Phi-3.5-mini-instruct", "embd_pdrop": 0.0, "resid_pdrop": 0.0}
PHI_3 |= {"auto_map": PHI_CODE, "eos_token_id": 32000, "hidden_size": 3072}
PHI_3 |= {"intermediate_size": 8192, "max_position_embeddings": 131072, "num_hidden_layers": 32}
PHI_3 |= {"num_attention_heads": 32, "num_key_value_heads": 32, "pad_token_id": 32000}
PHI_3 |= {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
PHI_3 |= {"rope_scaling": LONGROPE, "sliding_window": 262144, "tie_word_embeddings": False}
PHI_3 |= {"vocab_size": 32064}

PHI_4_MINI = PHI_3 | {"auto_map": PHI_CODE | {"AutoTokenizer": "Xenova/gpt-4o"}}
PHI_4_MINI |= {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
PHI_4_MINI |= {"mlp_bias": False, "num_attention_heads": 24, "num_key_value_heads": 8}
PHI_4_MINI |= {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "vocab_size": 200064}

GEMMA_2 = COMMON | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA_2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "bos_token_id": 2}
GEMMA_2 |= {"cache_implementation": "hybrid", "eos_token_id": 1, "pad_token_id": 0}
GEMMA_2 |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
GEMMA_2 |= {"head_dim": 256, "hidden_size": 3584, "intermediate_size": 14336}
GEMMA_2 |= {"max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42}
GEMMA_2 |= {"num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6}
GEMMA_2 |= {"rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096}
GEMMA_2 |= {"vocab_size": 256000}

OLMO_3 = SILU | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
OLMO_3 |= {"eos_token_id": 100257, "pad_token_id": 100277, "hidden_size": 4096}
OLMO_3 |= {"intermediate_size": 11008, "layer_types": WINDOWS * 8, "num_hidden_layers": 32}
OLMO_3 |= {"max_position_embeddings": 65536, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
OLMO_3 |= {"num_key_value_heads": 32, "rope_scaling": YARN, "rope_theta": 500000}
OLMO_3 |= {"sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278}

SMOLLM_3 = SILU | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
SMOLLM_3 |= {"bos_token_id": None, "eos_token_id": 128012, "pad_token_id": 128004}
SMOLLM_3 |= {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
SMOLLM_3 |= {"layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536}
SMOLLM_3 |= {"max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4}
SMOLLM_3 |= {"no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16}
SMOLLM_3 |= {"num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-6}
SMOLLM_3 |= {"rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None}
SMOLLM_3 |= {"use_sliding_window": False, "vocab_size": 128256}

COMMAND_R = SILU | {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2"}
COMMAND_R |= {"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0, "head_dim": 128}
COMMAND_R |= {"cache_implementation": "hybrid", "hidden_size": 4096, "intermediate_size": 14336}
COMMAND_R |= {"layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25}
COMMAND_R |= {"max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32}
COMMAND_R |= {"num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first"}
COMMAND_R |= {"position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000}
COMMAND_R |= {"rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4}
COMMAND_R |= dict.fromkeys(("use_embedding_sharing", "use_gated_activation"), True)
COMMAND_R |= dict.fromkeys(("use_parallel_block", "use_parallel_embedding"), True)
COMMAND_R |= {"vocab_size": 256000}

QWEN_3_MOE = SILU | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN_3_MOE |= {"bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645}
QWEN_3_MOE |= {"head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144}
QWEN_3_MOE |= {"max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": []}
QWEN_3_MOE |= {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32}
QWEN_3_MOE |= {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
QWEN_3_MOE |= {"num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-6}
QWEN_3_MOE |= {"rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001}
QWEN_3_MOE |= {"sliding_window": None, "use_sliding_window": False, "vocab_size": 151936}
QWEN_3_MOE |= {"tie_word_embeddings": False}

GPT_OSS = SILU | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
GPT_OSS |= {"attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4}
GPT_OSS |= {"head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096}
GPT_OSS |= {"intermediate_size": 2880, "max_position_embeddings": 131072}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
GPT_OSS |= {"num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24}
GPT_OSS |= {"num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False}
GPT_OSS |= {"pad_token_id": 199999, "rms_norm_eps": 1e-5, "rope_theta": 150000}
GPT_OSS |= {"rope_scaling": YARN | {"factor": 32.0, "original_max_position_embeddings": 4096}}
GPT_OSS["rope_scaling"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
del GPT_OSS["rope_scaling"]["attention_factor"]
GPT_OSS |= {"router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0}
GPT_OSS |= {"tie_word_embeddings": False, "vocab_size": 201088}
GPT_OSS |= {"quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}}

PHI_ROPE = "longrope, theta 10,000, short factors (for rows of at most 4,096 tokens)"
HUB: dict[str, tuple[dict[str, Any], dict[tuple[int | None, str], int]]] = {
    "microsoft/Phi-3.5-mini-instruct": (PHI_3, {(262144, PHI_ROPE): 32}),
    "microsoft/Phi-4-mini-instruct": (
        PHI_4_MINI,
        {(262144, f"{PHI_ROPE}, 96 of 128 elements rotated"): 32},
    ),
    "google/gemma-2-9b": (
        GEMMA_2,
        {(4096, "default, theta 10,000"): 21, (None, "default, theta 10,000"): 21},
    ),
    "allenai/Olmo-3-1025-7B": (
        OLMO_3,
        {
            (4096, "default, theta 500,000"): 24,
            (None, "yarn, theta 500,000, factor 8 over 8,192 positions"): 8,
        },
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        SMOLLM_3,
        {(None, "default, theta 5,000,000"): 27, (None, "none"): 9},
    ),
    "Qwen/Qwen3-30B-A3B": (QWEN_3_MOE, {(None, "default, theta 1,000,000"): 48}),
    "openai/gpt-oss-20b": (
        GPT_OSS,
        {
            (128, "yarn, theta 150,000, factor 32 over 4,096 positions"): 12,
            (None, "yarn, theta 150,000, factor 32 over 4,096 positions"): 12,
        },
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": (
        COMMAND_R,
        {(4096, "default, theta 50,000"): 24, (None, "none"): 8},
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_windows_and_ropes_of_published_models(name):
    fields, expected = HUB[name]
    model = model_config.parse_model_config(fields)
    layers = [(layer.window, layer.rope.description) for layer in model.layers]
    assert collections.Counter(layers) == expected


@pytest.mark.parametrize("name", HUB)
def test_an_export_is_the_same_model(name):
    fields, _ = HUB[name]
    exported = model_config.make_config_json(fields, dtype="bfloat16", token_ids={})
    model = model_config.parse_model_config(fields)
    assert model_config.parse_model_config(exported) == model


def test_transformers_4_finds_the_partial_rotation_and_the_scaling_of_phi():
    """It refuses a rope_scaling of Phi-3 with other fields than these three.

    Source: Phi3Config._rope_scaling_validation in transformers 4.57.
    """
    inside = {"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "rope_type": "longrope"}
    group = {name: value for name, value in LONGROPE.items() if name != "type"} | inside
    saved = {
        name: value
        for name, value in PHI_4_MINI.items()
        if name not in ("rope_scaling", "rope_theta", "partial_rotary_factor")
    }
    for fields in (PHI_4_MINI, saved | {"rope_parameters": group}):
        exported = model_config.make_config_json(fields, dtype="bfloat16", token_ids={})
        assert exported["rope_scaling"] == LONGROPE
        assert exported["partial_rotary_factor"] == 0.75
        assert exported["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_names_of_a_rope_type_mean_the_same_where_layers_differ(key):
    """Transformers 5.23 reads the default type from `type` here."""
    sizes = {name: GEMMA_2[name] for name in ("num_hidden_layers", "num_attention_heads")}
    sizes |= {name: GEMMA_2[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    sizes |= {"num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256}
    fields = sizes | {"model_type": "gemma3_text", "rope_scaling": {key: "linear", "factor": 8.0}}
    model = model_config.parse_model_config(fields)
    ropes = [rope.description for rope in model.ropes]
    assert ropes == ["default, theta 10,000", "linear, theta 1,000,000, factor 8"]
    exported = model_config.make_config_json(fields, dtype="bfloat16", token_ids={})
    assert model_config.parse_model_config(exported) == model
