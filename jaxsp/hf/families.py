"""Table of the model families that jaxsp trains.

A family reads the fields of config.json that its class in transformers declares, and jaxsp gives
each of these fields one meaning (`config_fields`, `model_config`). To add a family that differs in
names, biases or constants, add an entry to `FAMILIES`; to train the text model of a multimodal one,
to `MULTIMODAL_FAMILIES`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxsp.blocks.config import DeltaNetNames, ExpertNames, NormNames, QueryScale
from jaxsp.config.yaml_io import format_value
from jaxsp.core.errors import UserError
from jaxsp.hf.rope import FULL_ATTENTION, ORIGINAL, PARTIAL, SLIDING_ATTENTION, RopeSupport

LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION)

LINEAR_ATTENTION = "linear_attention"

EXTRA_LAYERS = "num_nextn_predict_layers"
"""Field with the number (default 1) of last layers that predict further tokens, which are left
out, as in transformers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of a `model_type` that the fields of its config.json do not give.

    Of a multimodal one, jaxsp trains the text model: values and other_parts are those beside it.
    """

    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ModelConfig that the family fixes."""
    read: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: {}
    """Fields of ModelConfig from those of a config.json with transformers' defaults, besides those
    that have the same meaning in all families."""
    normalize: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: fields
    """Fields of a config.json, from those that files may have in another form."""
    experts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ExpertsConfig that the family fixes."""
    delta_net: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Fields of DeltaNetConfig in which the family differs from Qwen3.5; None: no delta nets."""
    required_sizes: tuple[str, ...] = ()
    """Sizes that a config.json must have in addition to `config_fields.list_required_sizes`."""
    optional_sizes: tuple[str, ...] = ()
    """Sizes with a default that suits every model."""
    more_fields: tuple[str, ...] = ()
    """Fields that the family reads, and that its class does not declare."""
    values: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Fields with a fixed meaning in this family, and the values that match it."""
    quant_methods: tuple[str, ...] = ()
    """Values of `quantization_config.quant_method` whose weights are read as bfloat16."""
    rope: RopeSupport = dataclasses.field(default_factory=RopeSupport)
    text_types: tuple[str, ...] = ()
    """Families of a multimodal family's text model; transformers' default is the first."""
    other_parts: tuple[str, ...] = ()
    """First names of stored tensors that transformers' class of the text model ignores."""
    stored_names: dict[str, str] = dataclasses.field(default_factory=dict)
    """Other names that modules have in some files, and the names that jaxsp reads and writes."""
    divided_tensors: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Modules of transformers whose tensors are stored as those of several modules, concatenated
    along the rows. Files may divide the rows at other places than jaxsp, or not at all."""
    has_other_parts: bool = False
    """True if exports are the whole multimodal model, because transformers has no class for the
    text model with the head."""

    @property
    def auto_class(self) -> str:
        """Class of transformers that loads an export."""
        return "AutoModelForImageTextToText" if self.has_other_parts else "AutoModelForCausalLM"


_PARTIAL_ROPE = RopeSupport(outside_fields=("rope_theta", PARTIAL))
_GEMMA_NORMS = NormNames(
    pre_attention="input_layernorm",
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)
_NORMS_AFTER = dataclasses.replace(_GEMMA_NORMS, pre_attention=None, pre_mlp=None)
_OLMO: dict[str, Any] = {"norm_names": _NORMS_AFTER, "qk_norm": "projection"}
_GEMMA: dict[str, Any] = {"norm": "rms_plus_one", "norm_names": _GEMMA_NORMS}
_GEMMA_OPTIONS: dict[str, Any] = {
    "more_fields": ("sliding_window_pattern",),
    "read": lambda given: {"embedding_scale": given["hidden_size"] ** 0.5},
    "values": {"hidden_act": ("gelu_pytorch_tanh",)},
}
_PHI_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
"""Code beside the published weights, which is that of transformers."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(model={"qkv_bias": True}),
    "qwen3": Family(model={"qk_norm": "head"}),
    "gemma2": Family(model=_GEMMA, **_GEMMA_OPTIONS),
    "gemma3_text": Family(
        # Gemma 3's code in transformers does not use attn_logit_softcapping
        model=_GEMMA | {"qk_norm": "head", "attention_softcap": None},
        rope=RopeSupport(
            layer_types=LAYER_TYPES, outside_fields=("rope_theta", "rope_local_base_freq")
        ),
        **_GEMMA_OPTIONS,
    ),
    "olmo2": Family(model=_OLMO),
    "olmo3": Family(model=_OLMO, rope=RopeSupport(layer_types=LAYER_TYPES)),
    "smollm3": Family(values={"pretraining_tp": (1, 2)}),  # not used by its code
    "phi3": Family(
        model={"has_fused_qkv": True, "has_fused_gate_up": True},
        rope=RopeSupport(
            types=("default", "longrope"), outside_fields=("rope_theta", PARTIAL, ORIGINAL)
        ),
        values={
            **dict.fromkeys(("attention_bias", "mlp_bias"), (False,)),
            "auto_map": (_PHI_CODE, _PHI_CODE | {"AutoTokenizer": "Xenova/gpt-4o"}),
        },
    ),
    "granite": Family(),
    "glm4": Family(
        model={
            "norm_names": NormNames(
                post_attention="post_self_attn_layernorm", post_mlp="post_mlp_layernorm"
            ),
            "has_fused_gate_up": True,
            "output_bias": False,  # attention_bias is for q, k and v only
            "rope_interleaved": True,
        },
        rope=_PARTIAL_ROPE,
    ),
    "ministral3": Family(
        rope=RopeSupport(
            types=("yarn",),
            extra_fields=("llama_4_scaling_beta", "max_position_embeddings"),
            required_fields=("llama_4_scaling_beta",),
        ),
        read=lambda given: {
            "query_scale": QueryScale(
                beta=float(given["rope_parameters"]["llama_4_scaling_beta"]),
                original_max_position_embeddings=given["rope_parameters"][ORIGINAL],
            )
        },
    ),
    "cohere2": Family(
        model={
            "norm": "layer",
            "norm_names": NormNames(pre_mlp=None),
            "is_parallel": True,
            "rope_interleaved": True,
        },
        more_fields=("sliding_window_pattern",),
        rope=RopeSupport(only_windows=True),
        values={"use_qk_norm": (False,)},
    ),
    "qwen3_moe": Family(
        required_sizes=("head_dim",),
        model={"qk_norm": "head"},
        values={"use_sliding_window": (False,), "sliding_window": ()},
    ),
    "mixtral": Family(
        experts={
            "names": ExpertNames(
                router="block_sparse_moe.gate.weight",
                gate="block_sparse_moe.experts.{expert}.w1.weight",
                up="block_sparse_moe.experts.{expert}.w3.weight",
                down="block_sparse_moe.experts.{expert}.w2.weight",
            )
        },
    ),
    "olmoe": Family(model={"qk_norm": "projection"}),
    "qwen3_5_text": Family(
        model={"norm": "rms_plus_one", "qk_norm": "head", "attention_gate": "q_proj"},
        delta_net=lambda given: {},
        more_fields=("full_attention_interval",),
        rope=RopeSupport(
            outside_fields=("rope_theta", PARTIAL),
            # In text, the three positions of a token are the same
            extra_fields=("mrope_section", "mrope_interleaved"),
        ),
        values={
            "hidden_act": ("silu",),  # also the activation of the convolutions
            "mlp_only_layers": ([],),
            # not read by transformers
            "attn_output_gate": (True,),
            "output_gate_type": ("swish", "silu"),  # of the delta nets
            "mamba_ssm_dtype": ("float32",),
            "mtp_num_hidden_layers": (0, 1),
            "mtp_use_dedicated_embeddings": (False,),
        },
        other_parts=("mtp",),
    ),
}

_QWEN3_5 = FAMILIES["qwen3_5_text"]

FAMILIES["qwen3_5_moe_text"] = dataclasses.replace(
    _QWEN3_5,
    model=_QWEN3_5.model | {"intermediate_size": 0},
    experts={"has_own_names": False},
    values=_QWEN3_5.values | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
)

QWEN3_NEXT_DELTA_NET_NAMES = DeltaNetNames(
    qkv=3 * ("in_proj_qkvz",), gate="in_proj_qkvz", decay="in_proj_ba", strength="in_proj_ba"
)

FAMILIES["qwen3_next"] = dataclasses.replace(
    _QWEN3_5,
    delta_net=lambda given: {"names": QWEN3_NEXT_DELTA_NET_NAMES},
    rope=_PARTIAL_ROPE,
    values={"hidden_act": ("silu",)},
)

FAMILIES["glm4_moe"] = Family(
    model={"output_bias": False},
    required_sizes=("head_dim",),
    more_fields=(EXTRA_LAYERS,),
    rope=_PARTIAL_ROPE,
    experts={
        "scores": "sigmoid",
        "router_file_dtype": "float32",  # in which transformers keeps it
        "names": ExpertNames(
            correction="mlp.gate.e_score_correction_bias",
            shared="mlp.shared_experts",
            shared_gate=None,
        ),
    },
    values={"output_router_logits": (False,)},  # transformers has no loss of its router
)

# The softmax of the chosen experts' logits is that of all, divided by their sum, also in gpt-oss
FAMILIES["granitemoe"] = Family(
    experts={
        "names": ExpertNames(
            module="block_sparse_moe.experts",
            router="block_sparse_moe.router.layer.weight",
            gate="block_sparse_moe.input_linear.weight",
            up="block_sparse_moe.input_linear.weight",
            down="block_sparse_moe.output_linear.weight",
        )
    },
)

FAMILIES["gpt_oss"] = Family(
    quant_methods=("mxfp4",),
    model={"has_sinks": True},
    experts={
        "has_bias": True,
        "is_transposed": True,
        "names": ExpertNames(
            router="mlp.router.weight",
            router_bias="mlp.router.bias",
            gate="mlp.experts.gate_up_proj",
            up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
        ),
    },
    # not read by transformers
    values={"hidden_act": ("silu",), "experts_per_token": (4,)},
)

OLMO_DELTA_NET_NAMES = DeltaNetNames(
    qkv=("q_proj", "k_proj", "v_proj"),
    filters=("q_conv1d", "k_conv1d", "v_conv1d"),
    gate="g_proj",
    decay="a_proj",
    strength="b_proj",
    norm="o_norm",
    out="o_proj",
)


def _read_olmo_delta_net(given: dict[str, Any]) -> dict[str, Any]:
    floor = given["linear_dt_init_floor"]
    return {
        "names": OLMO_DELTA_NET_NAMES,
        "strength_scale": 2.0 if given["linear_allow_neg_eigval"] else 1.0,
        "norm_eps": 1e-5,  # whatever rms_norm_eps is
        # the logarithm of 0 is -inf
        "decay_range": (max(given["linear_a_log_min"], 1e-4), given["linear_a_log_max"]),
        "step_range": (max(given["linear_dt_min"], floor), max(given["linear_dt_max"], floor)),
    }


FAMILIES["olmo_hybrid"] = Family(
    model=_OLMO,
    delta_net=_read_olmo_delta_net,
    optional_sizes=("linear_conv_kernel_dim",),
    rope=RopeSupport(is_optional=True),
    values={"hidden_act": ("silu",)},  # also the activation of the convolutions
    # Names of the first conversions, which transformers still writes, in all layers
    stored_names={
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
    # transformers reads any rows, and writes three parts of equal size
    divided_tensors={"linear_attn.conv1d": tuple(f"linear_attn.{part}_conv1d" for part in "qkv")},
)


FAMILIES["muse_glimmer_text"] = Family(
    has_other_parts=True,
    model={
        "norm": "rms_plus_one",
        "last_norm": "rms",
        "norm_names": _GEMMA_NORMS,
        "qk_norm": "head_without_weight",
        "attention_gate": "gate_proj",
        "has_embedding_norm": True,
    },
    # transformers multiplies queries with the factor, between their norm and RoPE
    read=lambda given: {"attention_scale": given["qk_scale_factor"] * given["head_dim"] ** -0.5},
)

_GLOBAL_SIZES = {
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
}
"""Sizes of the layers that attend to whole documents, and their names in `per_layer_config`."""


def _normalize_gemma4(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields in which the last layer attends to whole documents, as in transformers, and what
    transformers 5.23 writes as per_layer_config has the names of published models."""
    fields = {**fields}
    types = fields.get("layer_types")
    if isinstance(types, list) and types:
        fields["layer_types"] = [*types[:-1], FULL_ATTENTION]
    sizes = fields.pop("per_layer_config", None) or {}
    first, *others = [*sizes.values()] if isinstance(sizes, dict) and sizes else [{}]
    is_known = isinstance(first, dict) and first.keys() <= {*_GLOBAL_SIZES.values()}
    if not isinstance(sizes, dict) or not is_known or any(other != first for other in others):
        raise UserError(
            f".per_layer_config = {format_value(sizes)}: is not implemented: it must have the same "
            "head_dim and num_key_value_heads for all layers of full_attention. Leave it out, and "
            "write global_head_dim and num_global_key_value_heads."
        )
    given = {name: first[inner] for name, inner in _GLOBAL_SIZES.items() if inner in first}
    return given | fields


FAMILIES["gemma4_text"] = Family(
    normalize=_normalize_gemma4,
    model={
        "norm_names": _GEMMA_NORMS,
        "qk_norm": "head",
        "has_value_norm": True,
        "has_layer_scale": True,
        "attention_scale": 1.0,
    },
    read=lambda given: {"embedding_scale": given["hidden_size"] ** 0.5},
    more_fields=(*_GLOBAL_SIZES,),
    optional_sizes=("head_dim",),
    experts={
        "has_own_names": False,
        "names": ExpertNames(
            module="experts",
            router="router.proj.weight",
            expert_scale="router.per_expert_scale",
            gate="experts.gate_up_proj",
            up="experts.gate_up_proj",
            down="experts.down_proj",
        ),
    },
    rope=RopeSupport(types=("default", "proportional"), layer_types=LAYER_TYPES, outside_fields=()),
    # Only images attend in both directions
    values={"use_bidirectional_attention": ("vision",)},
)
FAMILIES["gemma4_unified_text"] = FAMILIES["gemma4_text"]

_IMAGE_PARTS = ("vision_tower", "multi_modal_projector")

_GEMMA4_PARTS = ("vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio")

_QWEN3_5_IMAGES: dict[str, Any] = {
    "values": {"language_model_only": (False,)},
    "other_parts": ("visual", "mtp"),
}

MULTIMODAL_FAMILIES = {
    "gemma3": Family(text_types=("gemma3_text",), other_parts=_IMAGE_PARTS),
    "gemma4": Family(text_types=("gemma4_text",), other_parts=_GEMMA4_PARTS),
    "gemma4_unified": Family(text_types=("gemma4_unified_text",), other_parts=_GEMMA4_PARTS),
    "mistral3": Family(text_types=("mistral", "ministral3"), other_parts=_IMAGE_PARTS),
    "qwen3_5": Family(text_types=("qwen3_5_text",), **_QWEN3_5_IMAGES),
    "qwen3_5_moe": Family(text_types=("qwen3_5_moe_text",), **_QWEN3_5_IMAGES),
    "muse_glimmer": Family(
        text_types=("muse_glimmer_text",),
        other_parts=("vision_tower", "vision_adapter", "vision_projection"),
    ),
}


def find_text_family(fields: dict[str, Any]) -> Family:
    """The family of a text model's config.json; an empty one for any other."""
    return FAMILIES.get(str(fields.get("model_type")), Family())


def find_architecture(model_type: str) -> str:
    """Returns the class of transformers that an export or a multimodal model is loaded with."""
    # the module itself cannot be imported without torch
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if model_type in FAMILIES and not FAMILIES[model_type].has_other_parts:
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type.removesuffix("_text")]


def find_reward_architecture(model_type: Any) -> str | None:
    """Returns the class of a family's reward models in transformers; None without one."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES,
    )

    name = str(model_type)  # any value of a config.json
    return NAMES.get(name) if name in FAMILIES else None
