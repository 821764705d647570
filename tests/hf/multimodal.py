"""Small multimodal models with random weights, and config.json of published ones."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformers

from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Weights
from jaxsp.core.batch import Batch
from jaxsp.hf import folder, model_config, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.model import decoder
from jaxsp.training import train_state
from tests import batches, tolerances
from tests.hf import oracle

VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 8}

MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**oracle.MODELS["gemma3"], "final_logit_softcapping": None},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 130,
        "eos_token_id": [1, 106],
    },
    "mistral": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": oracle.MODELS["mistral"],
        "vision_config": PIXTRAL,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {**oracle.MODELS["ministral3"], "tie_word_embeddings": True},
        "vision_config": PIXTRAL,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": oracle.MODELS["qwen3_5"],
        "vision_config": {
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2},
            **{"out_hidden_size": 48, "num_position_embeddings": 16, "patch_size": 4},
        },
        "image_token_id": 127,
        "video_token_id": 128,
        "vision_start_token_id": 129,
        "vision_end_token_id": 130,
    },
    "gemma4": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": oracle.MODELS["gemma4_shared"] | {"tie_word_embeddings": True},
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
        },
        "audio_config": None,
        "image_token_id": 127,
        "video_token_id": 128,
        "audio_token_id": 129,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": oracle.MODELS["gemma4_unified"],
        "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 48},
        "audio_config": None,
        "image_token_id": 127,
        "video_token_id": 128,
        "audio_token_id": 129,
    },
    "muse_glimmer": oracle.add_other_parts(oracle.MODELS["muse_glimmer"]),
}
MODELS["qwen3_5_moe"] = MODELS["qwen3_5"] | {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": oracle.MODELS["qwen3_5_moe"],
}
"""Fields of a config.json: seven families, and the text models of each."""

GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""The config.json of gemma-3-4b-it, which leaves out what is transformers' default."""

MISTRAL_SMALL_3_1: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}
"""The config.json of Mistral-Small-3.1-24B-Instruct-2503."""

QWEN3_5_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "layer_types": [*3 * ["linear_attention"], "full_attention"] * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
"""Every field that the config.json of a Qwen3.5 or Qwen3.6 of 27B has, and of its vision tower
three."""

_DENSE_ONLY = ("intermediate_size", "output_gate_type", "partial_rotary_factor", "pad_token_id")

QWEN3_5_35B_A3B: dict[str, Any] = QWEN3_5_27B | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{k: v for k, v in QWEN3_5_27B["text_config"].items() if k not in _DENSE_ONLY},
        "hidden_size": 2048,
        "layer_types": [*3 * ["linear_attention"], "full_attention"] * 10,
        "linear_num_value_heads": 32,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe"},
}
"""The config.json of Qwen3.5-35B-A3B, of the vision tower three fields."""


def torch_model(fields: dict[str, Any]) -> Any:
    """The multimodal model with random weights."""
    return oracle.torch_model(fields, transformers.AutoModelForImageTextToText)


def import_folder(
    directory: pathlib.Path, **model: Any
) -> tuple[ModelFolder, dict[str, Any], Weights]:
    """Folder, fields of the text model, and its weights. Args: model: other fields of `model`."""
    source = folder.find(str(directory))
    config = ModelSourceConfig(source=str(directory), **model)
    fields = model_config.resolve_fields(source.config_fields, config)
    table = decoder.param_table(model_config.parse_model_config(fields))
    reader = weights.open_folder(source, table)
    return source, fields, train_state.load_weights(table, batches.mesh(1, 1, 1), reader.read)


def check_logits(model: Any, config: ModelConfig, master: Weights) -> None:
    """Checks the logits of a text model against those of transformers' model without images."""
    arrays = oracle.packed_rows([[(0, 24)], [(0, 24)]], vocab_size=config.vocab_size)
    result = oracle.jaxsp_result(config)(master, Batch(**jax.tree.map(jnp.asarray, arrays)))
    with oracle.torch.no_grad():
        tokens = oracle.torch.from_numpy(arrays["tokens_BL"].astype(np.int64))
        expected = model(input_ids=tokens).logits.numpy()
    assert batches.relative_error(result.logits, expected) < tolerances.FP32_PARITY
