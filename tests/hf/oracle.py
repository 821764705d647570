"""Small models of every family in transformers and torch, with the same weights for both sides."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jaxsp.attention.attend import make_attend
from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.hf import families
from jaxsp.hf.families import FAMILIES, MULTIMODAL_FAMILIES
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from jaxsp.training import loss
from tests import batches, unsharded

torch = pytest.importorskip(
    "torch", reason="torch is not installed: it is what transformers computes with (extra `test`)"
)

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

OLMO_HYBRID = {
    **SIZES,
    "model_type": "olmo_hybrid",
    "num_hidden_layers": 4,
    "layer_types": [*2 * ["linear_attention"], "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,  # with less, some outputs are small, and gradients ill-conditioned
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}

QWEN3_5 = {
    **SIZES,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": [*2 * ["linear_attention"], "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,  # with less, small outputs of a head make gradients ill-conditioned
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}

GEMMA4: dict[str, Any] = {
    **SIZES,
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 8,  # with larger heads, scores are sharp, and gradients ill-conditioned
    "global_head_dim": 16,
    # transformers makes the last layer a full one
    "layer_types": ["sliding_attention", "full_attention", *2 * ["sliding_attention"]],
    "sliding_window": 5,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
    },
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **SIZES,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "initializer_range": 0.1,  # with less, gradients of keys are small sums of large terms
    },
    "mixtral": {
        **SIZES,
        "model_type": "mixtral",
        "sliding_window": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
    },
    "olmoe": {
        **SIZES,
        "model_type": "olmoe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "eos_token_id": 1,
    },
    "qwen3_5": QWEN3_5,
    "muse_glimmer": {
        **SIZES,
        "model_type": "muse_glimmer_text",
        "num_hidden_layers": 5,
        "head_dim": 16,
        "attention_bias": True,
        "sliding_window": 5,
        # a layer with a window has no RoPE, and one without a window has it
        "layer_rope_theta": [500.0, 0, 500.0, 500.0, 0],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "qk_scale_factor": 1.7,
        "output_multiplier": 0.4,
        "final_logit_softcapping": 3.0,
        "post_norm_eps": 0.1,
    },
    "llama": {**SIZES, "model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama3": {
        **SIZES,
        "model_type": "llama",
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 500.0,
        "rope_scaling": LLAMA3,
    },
    "llama tied": {**SIZES, "model_type": "llama", "tie_word_embeddings": True},
    "mistral": {
        **SIZES,
        "model_type": "mistral",
        "head_dim": 16,
        "sliding_window": 5,
        "rope_theta": 1e6,
    },
    "qwen2": {
        **SIZES,
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 8,
    },
    "qwen3": {
        **SIZES,
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 0,
    },
    "gemma2": {
        **SIZES,
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        **SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "final_logit_softcapping": 3.0,
        "rope_local_base_freq": 100.0,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4": GEMMA4
    | {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "attention_bias": True,
    },
    "gemma4_unified": GEMMA4 | {"model_type": "gemma4_unified_text"},
    "gemma4_moe": GEMMA4
    | {
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
        "rms_norm_eps": 0.1,  # with less, the norm of their sum hides a factor on all experts
    },
    "gemma4_shared": GEMMA4
    | {
        "num_hidden_layers": 5,
        # the last layers share the keys of the first two, one of them with two layers
        "layer_types": [
            "sliding_attention",
            *2 * ["full_attention"],
            "sliding_attention",
            "full_attention",
        ],
        "num_kv_shared_layers": 3,
        "tie_word_embeddings": False,
        **{"head_dim": 4, "global_head_dim": 8},  # flat scores, for well-conditioned gradients
        "rms_norm_eps": 1e-3,  # with less, small outputs of a layer make gradients ill-conditioned
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 140,
    },
    "olmo2": {**SIZES, "model_type": "olmo2"},
    "olmo3": {
        **SIZES,
        "model_type": "olmo3",
        "num_hidden_layers": 5,
        "sliding_window": 5,
        "max_position_embeddings": 128,
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "smollm3": {
        **SIZES,
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "attention_bias": True,
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
        "use_sliding_window": True,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e6},
    },
    "phi3": {
        **SIZES,
        "model_type": "phi3",
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2],
            "long_factor": [1.0, 2.0, 3.0],
        },
        "pad_token_id": 0,
    },
    "granite": {
        **SIZES,
        "model_type": "granite",
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 4.0,
        "mlp_bias": True,
    },
    "glm4": {
        **SIZES,
        "model_type": "glm4",
        "head_dim": 16,
        "attention_bias": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "ministral3": {
        **SIZES,
        "model_type": "ministral3",
        "head_dim": 16,
        "max_position_embeddings": 32,
        "rope_parameters": {
            **YARN,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "cohere2": {
        **SIZES,
        "model_type": "cohere2",
        "num_hidden_layers": 5,
        "sliding_window": 5,
        "logit_scale": 0.5,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    "olmo hybrid": OLMO_HYBRID | {"rope_parameters": {"rope_theta": None}},
    "olmo hybrid with RoPE": OLMO_HYBRID
    | {"linear_allow_neg_eigval": False, "attention_bias": True, "rope_theta": 100.0},
    "qwen3_5_moe": {
        **{name: value for name, value in QWEN3_5.items() if name != "intermediate_size"},
        **EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_next": {
        **QWEN3_5,
        **EXPERTS,
        "model_type": "qwen3_next",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "glm4_moe": {
        **SIZES,
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 9,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "granitemoe": {
        **SIZES,
        "model_type": "granitemoe",
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 4.0,
        "attention_bias": True,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.5,
        "max_position_embeddings": 128,
        "rope_parameters": {**YARN, "rope_theta": 1000.0, "truncate": False},
    },
}
"""Fields of a config.json. Every option of a family is on in one of its models."""

TEXT_EXPORTS = [name for name in MODELS if not FAMILIES[MODELS[name]["model_type"]].has_other_parts]
"""The models for which transformers has a class; of the others, it has one with all parts."""


def add_other_parts(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the multimodal config.json of a text model for which transformers has no class."""
    text_type = fields["model_type"]
    (multimodal_type,) = (
        name for name, family in MULTIMODAL_FAMILIES.items() if text_type in family.text_types
    )
    return {
        "model_type": multimodal_type,
        "architectures": [families.find_architecture(text_type)],
        "text_config": fields,
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4},
        },
        "out_hidden_size": 64,
        "projector_hidden_size": 8,
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
    }


def torch_model(fields: dict[str, Any], auto_class: Any = transformers.AutoModelForCausalLM) -> Any:
    """A model with random weights: no bias is 0, no norm is 1, and attention is not uniform."""
    family = FAMILIES.get(fields["model_type"])
    if family is not None and family.has_other_parts:
        whole = add_other_parts(fields)
        return TextPart(torch_model(whole, transformers.AutoModelForImageTextToText))
    config = transformers.AutoConfig.for_model(**copy.deepcopy(fields))
    model = auto_class.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in named_weights(model).items():
            mean = 1.0 if "norm" in name or "scal" in name else 0.0
            weight.normal_(mean, 0.3, generator=generator)
    return model


def named_weights(model: Any) -> dict[str, Any]:
    """All weights by name, also those that are not trained (the numbers that correct the choice of
    experts)."""
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {**dict(model.named_parameters()), **buffers}


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """transformers computes in float64, also where its code casts to float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def float64_gradients(model: Any, documents: list[np.ndarray]) -> "Result":
    """`gradients` of a model's weights, in float64. Args: model: its weights are float32."""
    with float64():
        return gradients(widen(model), documents)


def widen(model: Any) -> Any:
    """The model in float64."""
    config = copy.deepcopy(model.config)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    wide = type(model)._from_config(config, **eager).double()
    wide.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    return wide


def as_published(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors under the names of files on the hub.

    Of experts, the modules of transformers have one tensor for all. Of OLMo Hybrid, they have one
    convolution for q, k and v, and the files that it writes have other norms, and rows of the
    convolution divided into equal parts.
    """
    renamed = {}
    for name, array in named.items():
        name = name.replace("attention_layer_norm", "input_layernorm")
        name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        renamed[name] = array
    for name in [name for name in renamed if name.endswith("linear_attn.q_proj.weight")]:
        layer = name.removesuffix("q_proj.weight")
        parts = {part: f"{layer}{part}_conv1d.weight" for part in "qkv"}
        stored = [renamed.pop(part, None) for part in (f"{layer}conv1d.weight", *parts.values())]
        whole = np.concatenate([part for part in stored if part is not None])
        for part, part_name in parts.items():
            count = len(renamed[f"{layer}{part}_proj.weight"])
            renamed[part_name], whole = whole[:count], whole[count:]
        assert not len(whole), name
    for name in [name for name in renamed if ".block_sparse_moe." in name]:
        layer, _, module = name.partition("block_sparse_moe.")
        new_name = f"{layer}block_sparse_moe.{_GRANITE_NAMES.get(module, module)}"
        renamed[new_name] = renamed.pop(name)
    is_gpt_oss = any(name.endswith("_proj_bias") for name in renamed)
    for name in [
        name
        for name in renamed
        if ".mlp.experts." in name and "_proj.weight" not in name and "lora" not in name
    ]:
        if is_gpt_oss:
            break  # its files have the names and tensors of modules
        layer, _, module = name.partition("mlp.experts.")
        for expert, whole in enumerate(renamed.pop(name)):
            parts = np.split(whole, 2) if module == "gate_up_proj" else [whole]
            ends = ("gate", "up") if module == "gate_up_proj" else ("down",)
            for end, part in zip(ends, parts, strict=True):
                renamed[f"{layer}mlp.experts.{expert}.{end}_proj.weight"] = part
    return renamed


_GRANITE_NAMES = {
    "router.weight": "router.layer.weight",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}

_MIXTRAL_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def as_mixtral(name: str) -> str:
    """Name of a tensor of a layer's experts in Mixtral's files."""
    return ".".join(_MIXTRAL_NAMES.get(part, part) for part in name.split("."))


class TextPart(torch.nn.Module):
    """Text model and head of a multimodal model, with the tensor names of a text model."""

    def __init__(self, whole: Any):
        super().__init__()
        self.model = whole.model.language_model
        self.lm_head = whole.lm_head
        self.run = whole.forward  # not `whole`, which would be a part of this module

    def forward(self, tokens: Any) -> Any:
        return self.run(input_ids=tokens)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()


def stacked(named: dict[str, Any], table: layers.Weights) -> layers.Weights:
    """Tensors by their Hugging Face name, as jaxsp's nested dict; each is used exactly once."""
    left = as_published({name: tensor.detach().numpy() for name, tensor in named.items()})
    if any("block_sparse_moe" in param.hf_name for param in jax.tree.leaves(table)):
        left = {as_mixtral(name): array for name, array in left.items()}

    used = set()

    def take_one(param: Parameter, name: str, layer: int | None) -> np.ndarray:
        used.add(name)
        if param.joined_layers is not None:
            return left[name][param.find_block(2 * (slice(None),), layer)]
        whole = param.view_matrices(left[name])
        if param.hf_rows is None:
            return whole
        axis = whole.ndim - len(param.matrix_shape)
        return whole.take(param.hf_rows.find(np.arange(param.matrix_shape[0])), axis=axis)

    def take_layer(param: Parameter, layer: int | None) -> np.ndarray:
        parts = [take_one(param, name, layer) for _, name in param.list_tensors(layer)]
        return np.stack(parts) if param.has_tensor_per_expert else parts[0]

    def take(param: Parameter) -> np.ndarray:
        if param.layers is None:
            return take_layer(param, None)
        return np.stack([take_layer(param, layer) for layer in param.layers])

    weights = jax.tree.map(take, table)
    assert used == left.keys(), f"jaxsp has no parameter for {sorted(left.keys() - used)}"
    return weights


class Result(NamedTuple):
    """Results of transformers or of jaxsp."""

    loss: Any
    """Mean loss over all labels."""
    logits: Any
    gradients: Any
    """Gradients: by Hugging Face name for transformers, a nested dict for jaxsp."""


def gradients(model: Any, documents: list[np.ndarray]) -> Result:
    """Result of transformers and torch, each document in a row of its own.

    The logits are a list with an array for each document.
    """
    model.zero_grad()
    losses = []
    logits = []
    for document in documents:
        tokens = torch.from_numpy(document.astype(np.int64))
        logits.append(model(tokens[None]).logits[0])
        losses.append(
            torch.nn.functional.cross_entropy(logits[-1][:-1], tokens[1:], reduction="sum")
        )
    mean = sum(losses) / sum(len(document) - 1 for document in documents)
    mean.backward()
    grads = {name: torch.zeros_like(buffer) for name, buffer in named_weights(model).items()}
    grads |= {name: weight.grad for name, weight in model.named_parameters()}
    return Result(mean.item(), [part.detach().numpy() for part in logits], grads)


@functools.cache
def jaxsp_result(config: ModelConfig) -> Callable[[layers.Weights, Batch], Result]:
    """Result of the code that training runs; logits are [rows, tokens, vocabulary]."""
    table = decoder.param_table(config)
    dtype = jnp.dtype("float32")
    gather = unsharded.UnshardedGather()
    attend = make_attend(seq=1, kernel="blockwise", layer_scores=config.layer_scores)

    @jax.jit
    def run(weights: layers.Weights, batch: Batch) -> Result:
        def mean_loss(weights: layers.Weights) -> tuple[Any, Any]:
            hidden, _ = decoder.hidden_states(
                weights,
                batch,
                config=config,
                attend=attend,
                gather=gather,
                dtype=dtype,
                policy=RematPolicy(),
                tile_tokens=4096,
            )
            head = decoder.lm_head(weights)
            transform = functools.partial(decoder.transform_logits, config)
            whole = loss.Head(
                gather=gather,
                param=decoder.lm_head(table),
                shard=head,
                tile=7,
                transform_logits=transform,
            )
            sums = loss.sum_token_losses(loss.Tile(hidden, batch.labels_BL), whole)
            count = (batch.labels_BL != NO_LABEL).sum().astype(dtype)
            return sums["loss_sum"] / count, transform(hidden @ head.T)

        (mean, logits), grads = jax.value_and_grad(mean_loss, has_aux=True)(weights)
        return Result(mean, logits, grads)

    return run


def packed_rows(segments: batches.Segments, *, vocab_size: int) -> dict[str, np.ndarray]:
    """Rows of 24 tokens with random documents; four slots, so that a model is compiled once."""
    arrays = batches.make_rows(segments, num_tokens=24, vocab_size=vocab_size, seed=2)
    slots = {
        name: np.pad(arrays[name], ((0, 0), (0, 4 - arrays[name].shape[1])))
        for name in ("starts_BM", "lengths_BM")
    }
    return arrays | slots
