"""Tables of the model families that jaxsp trains.

To add a family that differs in names, biases or constants, add an entry to `FAMILIES`; to train the
text model of a multimodal one, to `MULTIMODAL_FAMILIES`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxsp.blocks.block_config import (
    ClampedGate,
    DeltaNetConfig,
    DeltaNetNames,
    ExpertNames,
    ExpertsConfig,
    NormNames,
)
from jaxsp.blocks.config import ATTENTION, DELTA_NET, QueryScale
from jaxsp.hf.rope_forms import FULL_ATTENTION, SLIDING_ATTENTION
from jaxsp.hf.rope_types import ORIGINAL, RopeSupport

LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION)

LINEAR_ATTENTION = "linear_attention"

QWEN_WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
TYPED_WINDOW_FIELDS = ("sliding_window", "sliding_window_pattern", "layer_types")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of a `model_type` that the fields of its config.json do not give.

    Of a multimodal one, jaxsp trains the text model: values and other_parts are those beside it.
    """

    required_fields: tuple[str, ...] = ()
    """Sizes that a config.json must have in addition to `config_checks.list_required_sizes`."""
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ModelConfig that the family fixes."""
    read: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: {}
    """Fields of ModelConfig from those of a config.json with transformers' defaults."""
    fields: tuple[str, ...] = ()
    """Fields of a config.json that only this family has, besides sizes that it must have."""
    null_fields: tuple[str, ...] = ()
    """Fields in which null means none of it, and is not transformers' default."""
    values: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Fields with a fixed meaning in this family, and the values that match it."""
    quant_methods: tuple[str, ...] = ()
    """Values of `quantization_config.quant_method` whose weights are read as bfloat16; exports are
    not quantized."""
    norm_eps_field: str = "rms_norm_eps"
    activation_field: str = "hidden_act"
    rope: RopeSupport = dataclasses.field(default_factory=RopeSupport)
    has_rope: Callable[[dict[str, Any], int], bool] = lambda given, layer: True
    """Function that returns True if a layer, by its number, has RoPE."""
    window_fields: tuple[str, ...] = ()
    """Fields for sliding windows. If `layer_types` is one of them, it selects the layers with a
    window; transformers derives a missing one from the others. Otherwise all layers have it."""
    text_types: tuple[str, ...] = ()
    """Families of a multimodal family's text model; transformers' default is the first."""
    unused_text_fields: tuple[str, ...] = ()
    """Fields of text_config that only the text model's own class uses."""
    other_parts: tuple[str, ...] = ()
    """First names of stored tensors that transformers' class of the text model ignores."""
    extra_layers_field: str | None = None
    """Field with the number of layers after the others that predict further tokens, which are
    left out, as in transformers; its default is 1. None: there are no such layers."""
    stored_names: dict[str, str] = dataclasses.field(default_factory=dict)
    """Other names that modules have in some files, and the names that jaxsp reads and writes."""
    divided_tensors: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Modules of transformers whose tensors are stored as those of several modules, concatenated
    along the rows. Files may divide the rows at other places than jaxsp, or not at all."""
    has_experts: Callable[[dict[str, Any], int], bool] = lambda given, _: (
        "num_experts_per_tok" in given
    )
    """Function that returns True if a layer, by its number, has experts in place of an MLP."""
    has_other_parts: bool = False
    """True if exports are the multimodal model with all its parts, because transformers has no
    class for the text model with the head."""
    mixers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Mixer of each layer type, if `layer_types` selects it; empty: all layers have attention."""

    @property
    def auto_class(self) -> str:
        """Class of transformers that loads an export."""
        return "AutoModelForImageTextToText" if self.has_other_parts else "AutoModelForCausalLM"

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Values that `layer_types` may have."""
        return tuple(self.mixers) or LAYER_TYPES


_BIASES = ("attention_bias", "mlp_bias")
_NORMS_AFTER = NormNames(
    pre_attention=None,
    post_attention="post_attention_layernorm",
    pre_mlp=None,
    post_mlp="post_feedforward_layernorm",
)
_GEMMA_NORMS = NormNames(
    pre_attention="input_layernorm",
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)
_GEMMA: dict[str, Any] = {
    "window_fields": TYPED_WINDOW_FIELDS,
    "activation_field": "hidden_activation",
    "fields": (
        *("attention_bias", "query_pre_attn_scalar"),
        *("final_logit_softcapping", "attn_logit_softcapping"),
    ),
    "null_fields": ("final_logit_softcapping", "attn_logit_softcapping"),
    "values": {
        "use_bidirectional_attention": (False,),
        "hidden_act": ("gelu_pytorch_tanh",),
        "cache_implementation": ("hybrid",),
        "sliding_window_size": (4096,),
    },
}
_PHI_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
"""Code beside the published weights, which is that of transformers."""


def _read_gemma(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_scale": given["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": given.get("attn_logit_softcapping"),
        "logit_softcap": given.get("final_logit_softcapping"),
        "embedding_scale": given["hidden_size"] ** 0.5,
    }


_GRANITE_FIELDS = (
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
)


def _read_granite(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_scale": float(given["attention_multiplier"]),
        "embedding_scale": float(given["embedding_multiplier"]),
        "residual_scale": float(given["residual_multiplier"]),
        "logit_scale": 1 / given["logits_scaling"],
    }


FAMILIES = {
    "llama": Family(fields=_BIASES),
    "mistral": Family(
        window_fields=("sliding_window",),
    ),
    "qwen2": Family(
        model={"qkv_bias": True},
        window_fields=QWEN_WINDOW_FIELDS,
    ),
    "qwen3": Family(
        fields=("attention_bias",),
        model={"qk_norm": "head"},
        window_fields=QWEN_WINDOW_FIELDS,
    ),
    "gemma2": Family(
        **_GEMMA,
        model={"norm": "rms_plus_one", "norm_names": _GEMMA_NORMS},
        read=_read_gemma,
    ),
    "gemma3_text": Family(
        **_GEMMA,
        model={"norm": "rms_plus_one", "norm_names": _GEMMA_NORMS, "qk_norm": "head"},
        rope=RopeSupport(
            layer_types=LAYER_TYPES, outside_fields=("rope_theta", "rope_local_base_freq")
        ),
        # Gemma 3's code in transformers does not use attn_logit_softcapping
        read=lambda given: _read_gemma(given) | {"attention_softcap": None},
    ),
    "olmo2": Family(
        fields=("attention_bias",),
        model={"norm_names": _NORMS_AFTER, "qk_norm": "projection"},
    ),
    "olmo3": Family(
        fields=("attention_bias",),
        model={"norm_names": _NORMS_AFTER, "qk_norm": "projection"},
        window_fields=("sliding_window", "layer_types"),
        rope=RopeSupport(layer_types=LAYER_TYPES),
    ),
    "smollm3": Family(
        window_fields=QWEN_WINDOW_FIELDS,
        fields=(*_BIASES, "no_rope_layers", "no_rope_layer_interval"),
        has_rope=lambda given, layer: bool(given["no_rope_layers"][layer]),
        values={"pretraining_tp": (1, 2)},  # not used by its code
    ),
    "phi3": Family(
        model={"has_fused_qkv": True, "has_fused_gate_up": True},
        window_fields=("sliding_window",),
        rope=RopeSupport(
            types=("default", "longrope"),
            outside_fields=("rope_theta", "partial_rotary_factor", ORIGINAL),
        ),
        values={
            **dict.fromkeys(("resid_pdrop", "embd_pdrop"), (0,)),
            **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False,)),
            **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),
            "auto_map": (_PHI_CODE, _PHI_CODE | {"AutoTokenizer": "Xenova/gpt-4o"}),
        },
    ),
    "granite": Family(fields=(*_BIASES, *_GRANITE_FIELDS), read=_read_granite),
    "glm4": Family(
        fields=("attention_bias",),
        model={
            "norm_names": NormNames(
                post_attention="post_self_attn_layernorm", post_mlp="post_mlp_layernorm"
            ),
            "has_fused_gate_up": True,
            "output_bias": False,  # attention_bias is for q, k and v only
            "rope_interleaved": True,
        },
        rope=RopeSupport(outside_fields=("rope_theta", "partial_rotary_factor")),
    ),
    "ministral3": Family(
        window_fields=("sliding_window",),
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
        norm_eps_field="layer_norm_eps",
        window_fields=TYPED_WINDOW_FIELDS,
        fields=("attention_bias", "logit_scale"),
        read=lambda given: {"logit_scale": given["logit_scale"]},
        has_rope=lambda given, layer: given["layer_types"][layer] == LAYER_TYPES[1],
        values={
            **dict.fromkeys(("use_gated_activation", "use_parallel_block"), (True,)),
            **dict.fromkeys(("use_embedding_sharing", "use_parallel_embedding"), (True, False)),
            "use_qk_norm": (False,),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1,),
            "cache_implementation": ("hybrid",),
            "layer_switch": (4,),  # of the published code; transformers has sliding_window_pattern
            "order_of_interleaved_layers": ("local_attn_first",),
        },
    ),
}

EXTRA_LAYERS_FIELDS = frozenset(
    ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
)
"""Config fields with the number of multi-token prediction layers, which exports omit."""

_NO_MTP = {"mtp_num_hidden_layers": (0, 1), "mtp_use_dedicated_embeddings": (False,)}
"""Fields of layers that predict further tokens, which are left out, as in transformers."""

_OLMO_INIT_FIELDS = (
    *("linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
)
"""Ranges of random weights."""

OLMO_DELTA_NET_NAMES = DeltaNetNames(
    qkv=("q_proj", "k_proj", "v_proj"),
    filters=("q_conv1d", "k_conv1d", "v_conv1d"),
    gate="g_proj",
    decay="a_proj",
    strength="b_proj",
    norm="o_norm",
    out="o_proj",
)


def _read_delta_net(given: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Args: options: fields of DeltaNetConfig in which the family differs from Qwen3.5."""
    delta_net = DeltaNetConfig(
        num_key_heads=given["linear_num_key_heads"],
        num_heads=given["linear_num_value_heads"],
        key_size=given["linear_key_head_dim"],
        value_size=given["linear_value_head_dim"],
        filter_size=given["linear_conv_kernel_dim"],
        **options,
    )
    return {"delta_net": delta_net}


def _read_olmo_hybrid(given: dict[str, Any]) -> dict[str, Any]:
    decay_min, decay_max, step_min, step_max, floor = (given[name] for name in _OLMO_INIT_FIELDS)
    return _read_delta_net(
        given,
        names=OLMO_DELTA_NET_NAMES,
        strength_scale=2.0 if given["linear_allow_neg_eigval"] else 1.0,
        norm_eps=1e-5,  # whatever rms_norm_eps is
        decay_range=(max(decay_min, 1e-4), decay_max),  # the logarithm of 0 is -inf
        step_range=(max(step_min, floor), max(step_max, floor)),
    )


_ROUTER_LOSS = ("router_aux_loss_coef", "output_router_logits")
"""The loss of a router is added only where its logits are asked for."""


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the field with the number of experts."""


def _read_experts(given: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Args: options: fields of ExpertsConfig in which the family differs from Qwen3."""
    has_loss = given.get("output_router_logits", False)
    read = {
        "num_experts": next(given[name] for name in EXPERT_COUNTS if name in given),
        "num_chosen": given["num_experts_per_tok"],
        "size": given.get("moe_intermediate_size") or given["intermediate_size"],
        "shared_size": given.get("shared_expert_intermediate_size"),
        "is_normalized": given.get("norm_topk_prob", True),
        "aux_loss_coef": float(given["router_aux_loss_coef"]) if has_loss else 0.0,
    }
    return {"experts": ExpertsConfig(**read | options)}


_QWEN_EXPERTS = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", *_ROUTER_LOSS)

FAMILIES["qwen3_moe"] = Family(
    required_fields=("head_dim",),
    model={"qk_norm": "head"},
    fields=("attention_bias", *_QWEN_EXPERTS),
    has_experts=lambda given, layer: (
        layer not in given["mlp_only_layers"] and (layer + 1) % given["decoder_sparse_step"] == 0
    ),
    read=_read_experts,
)

FAMILIES["mixtral"] = Family(
    window_fields=("sliding_window",),
    fields=_ROUTER_LOSS,
    read=lambda given: _read_experts(
        given,
        names=ExpertNames(
            router="block_sparse_moe.gate.weight",
            gate="block_sparse_moe.experts.{expert}.w1.weight",
            up="block_sparse_moe.experts.{expert}.w3.weight",
            down="block_sparse_moe.experts.{expert}.w2.weight",
        ),
    ),
    values={"router_jitter_noise": (0,)},
)

FAMILIES["olmoe"] = Family(
    model={"qk_norm": "projection"},
    fields=("attention_bias", "norm_topk_prob", *_ROUTER_LOSS),
    read=_read_experts,
    values={"clip_qkv": ()},
)

FAMILIES["qwen3_5_text"] = Family(
    model={"norm": "rms_plus_one", "qk_norm": "head", "attention_gate": "q_proj"},
    mixers={LINEAR_ATTENTION: DELTA_NET, FULL_ATTENTION: ATTENTION},
    fields=("attention_bias", "full_attention_interval", "layer_types"),
    read=_read_delta_net,
    rope=RopeSupport(
        outside_fields=("rope_theta", "partial_rotary_factor"),
        # In text, the three positions of a token are the same
        extra_fields=("mrope_section", "mrope_interleaved"),
    ),
    values={
        "hidden_act": ("silu",),  # also the activation of the convolutions
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),  # of the delta nets
        "mamba_ssm_dtype": ("float32",),
        "mlp_only_layers": ([],),
        **_NO_MTP,
    },
    other_parts=("mtp",),
)

_QWEN3_5 = FAMILIES["qwen3_5_text"]

FAMILIES["qwen3_5_moe_text"] = dataclasses.replace(
    _QWEN3_5,
    fields=(*_QWEN3_5.fields, *_ROUTER_LOSS),
    model=_QWEN3_5.model | {"intermediate_size": 0},
    read=lambda given: _read_experts(given, has_own_names=False) | _read_delta_net(given),
    values=_QWEN3_5.values | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
)

QWEN3_NEXT_DELTA_NET_NAMES = DeltaNetNames(
    qkv=3 * ("in_proj_qkvz",), gate="in_proj_qkvz", decay="in_proj_ba", strength="in_proj_ba"
)

FAMILIES["qwen3_next"] = dataclasses.replace(
    _QWEN3_5,
    fields=(*_QWEN3_5.fields, *_QWEN_EXPERTS),
    has_experts=FAMILIES["qwen3_moe"].has_experts,
    read=lambda given: (
        _read_experts(given) | _read_delta_net(given, names=QWEN3_NEXT_DELTA_NET_NAMES)
    ),
    rope=RopeSupport(outside_fields=("rope_theta", "partial_rotary_factor")),
    values={"hidden_act": ("silu",)},
)


def _read_glm4_moe(given: dict[str, Any]) -> dict[str, Any]:
    experts = _read_experts(
        given,
        scores="sigmoid",
        router_file_dtype="float32",  # in which transformers keeps it
        num_groups=given["n_group"],
        num_chosen_groups=given["topk_group"],
        weight_scale=float(given["routed_scaling_factor"]),
        names=ExpertNames(
            correction="mlp.gate.e_score_correction_bias",
            shared="mlp.shared_experts",
            shared_gate=None,
        ),
        shared_size=given["moe_intermediate_size"] * given["n_shared_experts"],
    )
    return experts | {"qk_norm": "head" if given["use_qk_norm"] else "none"}


FAMILIES["glm4_moe"] = Family(
    model={"output_bias": False},
    required_fields=("head_dim",),
    rope=RopeSupport(outside_fields=("rope_theta", "partial_rotary_factor")),
    fields=(
        *("attention_bias", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
        *("first_k_dense_replace", "num_nextn_predict_layers", "use_qk_norm"),
    ),
    has_experts=lambda given, layer: layer >= given["first_k_dense_replace"],
    read=_read_glm4_moe,
    values={"output_router_logits": (False,)},  # transformers has no loss of its router
    extra_layers_field="num_nextn_predict_layers",
)

FAMILIES["granitemoe"] = dataclasses.replace(
    FAMILIES["granite"],
    fields=("attention_bias", *_GRANITE_FIELDS, *_ROUTER_LOSS),
    # The softmax of the chosen experts' logits is that of all, divided by their sum
    read=lambda given: (
        _read_granite(given)
        | _read_experts(
            given,
            names=ExpertNames(
                module="block_sparse_moe.experts",
                router="block_sparse_moe.router.layer.weight",
                gate="block_sparse_moe.input_linear.weight",
                up="block_sparse_moe.input_linear.weight",
                down="block_sparse_moe.output_linear.weight",
            ),
        )
    ),
)

FAMILIES["gpt_oss"] = Family(
    quant_methods=("mxfp4",),
    model={"has_sinks": True},
    window_fields=("sliding_window", "layer_types"),
    fields=("attention_bias", *_ROUTER_LOSS, "swiglu_alpha", "swiglu_limit"),
    # The softmax of the chosen experts' logits is that of all, divided by their sum
    read=lambda given: _read_experts(
        given,
        clamped_gate=ClampedGate(
            alpha=float(given["swiglu_alpha"]), limit=float(given["swiglu_limit"])
        ),
        has_bias=True,
        is_transposed=True,
        names=ExpertNames(
            router="mlp.router.weight",
            router_bias="mlp.router.bias",
            gate="mlp.experts.gate_up_proj",
            up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
        ),
    ),
    values={
        "hidden_act": ("silu",),  # not used by its code
        # of the original code; transformers has num_experts_per_tok and rope_parameters
        "experts_per_token": (4,),
        "initial_context_length": (4096,),
    },
)

FAMILIES["olmo_hybrid"] = Family(
    model={"norm_names": _NORMS_AFTER, "qk_norm": "projection"},
    mixers={LINEAR_ATTENTION: DELTA_NET, FULL_ATTENTION: ATTENTION},
    fields=(
        *("attention_bias", "linear_allow_neg_eigval", "layer_types"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim", *_OLMO_INIT_FIELDS),
    ),
    read=_read_olmo_hybrid,
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
    activation_field="hidden_activation",
    window_fields=("sliding_window", "layer_types"),
    fields=(
        *("attention_bias", "qk_scale_factor", "output_multiplier", "final_logit_softcapping"),
        *("post_norm_eps", "layer_rope_theta"),
    ),
    null_fields=("final_logit_softcapping",),  # refused by transformers
    read=lambda given: {
        # transformers multiplies queries with the factor, between their norm and RoPE
        "attention_scale": given["qk_scale_factor"] * given["head_dim"] ** -0.5,
        "logit_scale": given["output_multiplier"],
        "logit_softcap": given["final_logit_softcapping"],
        "post_norm_eps": given["post_norm_eps"],
    },
    rope=RopeSupport(layer_thetas="layer_rope_theta"),
    has_rope=lambda given, layer: given["layer_rope_theta"][layer] != 0,
)

MULTIMODAL_FAMILIES = {
    "gemma3": Family(
        text_types=("gemma3_text",),
        unused_text_fields=("final_logit_softcapping",),
        other_parts=("vision_tower", "multi_modal_projector"),
    ),
    "mistral3": Family(
        text_types=("mistral", "ministral3"), other_parts=("vision_tower", "multi_modal_projector")
    ),
    "qwen3_5": Family(
        text_types=("qwen3_5_text",),
        values={"language_model_only": (False,), **_NO_MTP},
        other_parts=("visual", "mtp"),
    ),
    "qwen3_5_moe": Family(
        text_types=("qwen3_5_moe_text",),
        values={"language_model_only": (False,), **_NO_MTP},
        other_parts=("visual", "mtp"),
    ),
    "muse_glimmer": Family(
        text_types=("muse_glimmer_text",),
        other_parts=("vision_tower", "vision_adapter", "vision_projection"),
    ),
}


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
