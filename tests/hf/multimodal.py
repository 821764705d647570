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
