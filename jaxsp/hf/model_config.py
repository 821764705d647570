"""Conversion between Hugging Face's config.json and ModelConfig, both ways.

Problems begin with a dot and the field's name; `errors.at` names the config that has the field.
"""

import contextlib
import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxsp.blocks.config import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    MLP,
    MLP_AND_EXPERTS,
    ClampedGate,
    DeltaNetConfig,
    ExpertsConfig,
    LayerConfig,
    LayerSizes,
    ModelConfig,
    Rope,
)
from jaxsp.config.yaml_io import format_value
from jaxsp.core import errors
from jaxsp.core.errors import UserError, at
from jaxsp.hf import config_fields, context_range, families, folder, multimodal, rope
from jaxsp.hf.families import FAMILIES, MULTIMODAL_FAMILIES, Family
from jaxsp.hf.model_source import ModelSourceConfig

if TYPE_CHECKING:
    import transformers

# On import, transformers prints that PyTorch was not found; jaxsp does not need it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_NULL_FIELDS = ("final_logit_softcapping", "attn_logit_softcapping", "sliding_window")
"""Fields in which null means none of it, and is not transformers' default."""

_NOT_EXPORTED = {"quantization_config", "auto_map", "num_labels", "transformers_version"}
"""Fields of a config.json that describe what an export does not have."""

_EXTRA_LAYERS_FIELDS = (families.EXTRA_LAYERS, "num_mtp_layers")
"""Fields with the number of multi-token prediction layers, which exports omit."""

_MODEL_FIELDS: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "query_pre_attn_scalar": ("attention_scale", lambda x: x**-0.5),
    "attention_multiplier": ("attention_scale", float),
    "attn_logit_softcapping": ("attention_softcap", None),
    "final_logit_softcapping": ("logit_softcap", None),
    "embedding_multiplier": ("embedding_scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logit_scale": ("logit_scale", None),
    "logits_scaling": ("logit_scale", lambda x: 1 / x),
    "output_multiplier": ("logit_scale", None),
    "post_norm_eps": ("post_norm_eps", None),
    "hidden_size_per_layer_input": ("per_layer_size", None),
    "vocab_size_per_layer_input": ("per_layer_vocab_size", None),
    "use_qk_norm": ("qk_norm", lambda x: "head" if x else "none"),
}
"""Fields that only some families have, and the field of ModelConfig with its value, which may be
converted."""


def read_fields(
    model: ModelSourceConfig, *, deadline_s: float | None = None
) -> tuple[dict[str, Any], str]:
    """Reads `model.source` or `model.config`, as `resolve_fields` does, with the name for messages.

    Downloads at most config.json. Args: deadline_s: as for `folder.find`.
    """
    fields = model.config
    name = "model.config"
    if model.source is not None:
        source = folder.find(model.source, names=("config.json",), deadline_s=deadline_s)
        fields = source.config_fields
        name = str(source.path / "config.json")
    assert fields is not None, "the config's schema requires one of them"
    with at(name):
        return resolve_fields(fields, model), name


def resolve_fields(fields: dict[str, Any], model: ModelSourceConfig) -> dict[str, Any]:
    """Returns the fields of the text model's config.json, with model.rope and
    model.max_position_embeddings. Resolving again changes nothing.

    Args: fields: they may be those of a multimodal model.
    Raises: UserError if the fields are invalid, or the changes do not fit them.
    """
    text = multimodal.read_text_fields(fields)
    is_written = model.source is None and "transformers_version" not in fields
    if is_written and text is not fields:
        config_fields.check_names(fields)
    with contextlib.nullcontext() if text is fields else at(".text_config"):
        family = _find_family(text)
        if is_written:
            config_fields.check_names(text)
        if text is fields and model.rope is None and model.max_position_embeddings is None:
            return fields
        resolved = _parse_fields(text)[1].to_dict()
    return context_range.apply_changes(text, model, resolved=resolved, support=family.rope)


def parse_model_config(fields: dict[str, Any], *, row_tokens: int | None = None) -> ModelConfig:
    """Converts the fields of a config.json, with transformers' defaults for those that are missing.

    Args: row_tokens: as for `rope.parse`.
    Raises: UserError with all fields that are missing, wrong or not implemented.
    """
    return _parse_fields(fields, row_tokens)[0]


def add_router_losses(model: ModelConfig, config: ModelSourceConfig) -> ModelConfig:
    """Returns the model with the losses of routers that a config names.

    Raises: UserError for a model without experts, and if a bias balances them.
    """
    problem = ""
    if model.experts is None:
        problem = "the model has no experts"
    elif model.experts.scores == "sigmoid":
        problem = "routers with sigmoids have no such loss; e_score_correction_bias balances them"
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        if problem and (factor := getattr(config, name)):
            problem = f"model.{name} = {factor}: {problem}. Remove the field."
            raise UserError(problem, is_named=True)
    if model.experts is None:
        return model
    losses: dict[str, Any] = {"z_loss_coef": config.router_z_loss_coef}
    if config.router_aux_loss_coef is not None:
        losses["aux_loss_coef"] = config.router_aux_loss_coef
    return dataclasses.replace(model, experts=dataclasses.replace(model.experts, **losses))


def make_config_json(
    fields: dict[str, Any], *, dtype: str, token_ids: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields of an export's config.json, for transformers 5 and 4.

    Transformers 5 reads `rope_parameters` and `dtype`. Transformers 4 reads `rope_theta`,
    `rope_scaling` and `torch_dtype`; without them it would use its default RoPE. Fields that jaxsp
    does not read are those of `fields`, and pad_token_id stays the model's own.
    """
    _, resolved = _parse_fields(fields)
    model_type = fields["model_type"]
    others = _NOT_EXPORTED | config_fields.list_fields(model_type)
    kept = {
        name: value
        for name, value in fields.items()
        if value is not None and name not in others and not name.startswith("mtp_")
    }
    padding_id = config_fields.read_padding_id(fields)
    head: dict[str, Any] = {"architectures": [families.find_architecture(model_type)]}
    if is_reward_model(fields):
        # transformers scores the last token of a row that is not pad_token_id. If that were the
        # end token, it would score the one before it; null lets it score one row at a time only
        eos = token_ids["eos_token_id"]
        if padding_id in (eos if isinstance(eos, list) else [eos]):
            padding_id = None
        head = {
            "architectures": fields["architectures"],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    return {
        **resolved.to_diff_dict(),
        **kept,
        **_renamed_fields(resolved),
        **token_ids,
        "pad_token_id": padding_id,
        **head,
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_parameters": resolved.rope_parameters,
        **rope.to_old_form(resolved.rope_parameters, FAMILIES[model_type].rope),
        # transformers' default is not 0
        **dict.fromkeys({*_EXTRA_LAYERS_FIELDS} & resolved.to_dict().keys(), 0),
    }


def make_reward_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with the architecture of a reward model.

    Raises: UserError if transformers has none for the family.
    """
    architecture = families.find_reward_architecture(fields.get("model_type"))
    if architecture is None:
        problem = (
            f"objective.type = reward: transformers has no model for the scores of "
            f"{fields.get('model_type')}, so that nothing could load the result. Use a model of "
            "another family, such as qwen3 or llama."
        )
        raise UserError(problem, is_named=True)
    return fields | {"architectures": [architecture]}


def is_reward_model(fields: dict[str, Any]) -> bool:
    """True if a config.json is that of a reward model."""
    architecture = families.find_reward_architecture(fields.get("model_type"))
    return architecture is not None and fields.get("architectures") == [architecture]


def find_auto_class(fields: dict[str, Any]) -> str:
    """Class of transformers that loads an export with this config.json."""
    if is_reward_model(fields):
        return "AutoModelForSequenceClassification"
    return FAMILIES[fields["model_type"]].auto_class


def _parse_fields(
    given_fields: dict[str, Any], row_tokens: int | None = None
) -> tuple[ModelConfig, "transformers.PreTrainedConfig"]:
    """Returns jaxsp's model config, and transformers' config, which has the defaults."""
    import transformers

    family = _find_family(given_fields)
    model_type = given_fields["model_type"]
    own = config_fields.list_fields(model_type)
    # transformers would not use its default for a null head_dim
    fields = {str(name): value for name, value in given_fields.items() if value is not None}
    fields = family.normalize(fields)
    for name in rope.GROUPS:
        if name in fields:
            fields[name] = rope.normalize(fields[name], name)
    # fields under the names that the family reads, also where transformers 5 wrote others
    for name, new_name in transformers.CONFIG_MAPPING[model_type].attribute_map.items():
        if name in own and new_name in fields:
            value = fields.pop(new_name)
            if fields.setdefault(name, value) != value:
                raise UserError(
                    f".{new_name} = {format_value(value)}: must equal {name}, which is "
                    f"{format_value(fields[name])}: it is the same field. Leave one of them out."
                )
    defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    problems = config_fields.find_problems(fields, defaults)
    passed = {name: value for name, value in fields.items() if name in own}
    passed |= {x: None for x in _NULL_FIELDS if x in own and given_fields.get(x, 0) is None}
    if family.rope.is_optional:
        theta = rope.find_theta(given_fields)
        if not theta:
            problems.append(
                ".rope_parameters.rope_theta: missing. Use null for layers without RoPE, as in "
                "the published models. Else use the number that the model was trained with."
            )
        elif theta == rope.NO_THETA:
            passed["rope_parameters"] = {"rope_type": "default", **theta}
    if problems:
        raise UserError(problems)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of what is refused below
    try:
        # a copy, because transformers adds entries to its input dicts
        resolved = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(passed))
    except Exception as error:  # any, depending on the family
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise UserError(f"transformers refuses it: {reason}") from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    given = resolved.to_dict() | _renamed_fields(resolved)
    if "layer_types" in fields:
        given["layer_types"] = fields["layer_types"]
    head_dim = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    if problems := rope.find_problems(fields, given, family.rope, head_dim):
        raise UserError(problems)
    has_scores = is_reward_model(given_fields)
    has_bias = given.get("attention_bias", False)
    activation = given.get("hidden_activation") or given["hidden_act"]
    model = {
        "vocab_size": given["vocab_size"],
        "hidden_size": given["hidden_size"],
        "num_heads": given["num_attention_heads"],
        "num_kv_heads": given["num_key_value_heads"],
        "head_dim": head_dim,
        "intermediate_size": given.get("intermediate_size", 0),
        "layers": _parse_layers(given, family, head_dim, row_tokens),
        "norm_eps": given.get("rms_norm_eps") or given["layer_norm_eps"],
        "activation": config_fields.ACTIVATIONS[activation],
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": given.get("mlp_bias", False),
        "padding_id": config_fields.read_padding_id(
            given_fields | {"vocab_size": given["vocab_size"]}
        ),
        "tie_embeddings": given["tie_word_embeddings"] and not has_scores,
        "has_scores": has_scores,
        "initializer_range": float(given["initializer_range"]),
    }
    for name, (field, convert) in _MODEL_FIELDS.items():
        if name in own and given[name] is not None:
            model[field] = convert(given[name]) if convert else given[name]
    if family.delta_net is not None:
        model["delta_net"] = DeltaNetConfig(
            num_key_heads=given["linear_num_key_heads"],
            num_heads=given["linear_num_value_heads"],
            key_size=given["linear_key_head_dim"],
            value_size=given["linear_value_head_dim"],
            filter_size=given["linear_conv_kernel_dim"],
            **family.delta_net(given),
        )
    if any(layer.feed_forward != MLP for layer in model["layers"]):
        model["experts"] = _parse_experts(given, family)
    return ModelConfig(**model | family.model | family.read(given)), resolved


def _parse_experts(given: dict[str, Any], family: Family) -> ExpertsConfig:
    size = given.get("moe_intermediate_size") or given["intermediate_size"]
    read = {
        "num_experts": next(given[x] for x in config_fields.EXPERT_COUNTS if x in given),
        "num_chosen": given.get("num_experts_per_tok") or given["top_k_experts"],
        "size": size,
        "shared_size": given.get("shared_expert_intermediate_size"),
        "is_normalized": given.get("norm_topk_prob", True),
        "num_groups": given.get("n_group", 1),
        "num_chosen_groups": given.get("topk_group", 1),
        "weight_scale": float(given.get("routed_scaling_factor", 1)),
    }
    if "n_shared_experts" in given:
        read["shared_size"] = size * given["n_shared_experts"]
    if "swiglu_limit" in given:
        alpha, limit = (float(given[name]) for name in ("swiglu_alpha", "swiglu_limit"))
        read["clamped_gate"] = ClampedGate(alpha=alpha, limit=limit)
    # The loss of a router is added only where its logits are asked for
    if given.get("output_router_logits"):
        read["aux_loss_coef"] = float(given["router_aux_loss_coef"])
    return ExpertsConfig(**read | family.experts)


def _renamed_fields(resolved: "transformers.PreTrainedConfig") -> dict[str, Any]:
    """Fields under the names of published models, which transformers 4 reads, where transformers 5
    has others."""
    names = resolved.attribute_map.keys() & config_fields.list_fields(resolved.model_type)
    return {name: getattr(resolved, name) for name in sorted(names)}


def _parse_layers(
    given: dict[str, Any], family: Family, head_dim: int, row_tokens: int | None
) -> tuple[LayerConfig, ...]:
    """The differences between layers. Args: given: the fields with transformers' defaults."""
    groups = given["rope_parameters"]
    is_nested = rope.is_nested(groups, family.rope)
    windows = _parse_windows(given, family)
    types = given.get("layer_types") or [rope.FULL_ATTENTION] * len(windows)
    sizes = _parse_sizes(given, types) if "num_kv_shared_layers" in given else [None] * len(types)
    thetas = given.get(rope.LAYER_THETAS) or ()
    for layer, theta in enumerate(thetas):
        # transformers reads only the zeros of this field
        if theta not in (0, groups["rope_theta"]):
            architecture = families.find_architecture(given["model_type"])
            raise UserError(
                f".{rope.LAYER_THETAS}[{layer}] = {theta}: is not implemented: {architecture} uses "
                f"rope_theta, {groups['rope_theta']}, in every layer that has RoPE. Use that, or 0 "
                "for none."
            )

    @functools.cache
    def parse_rope(layer_type: str, head_dim: int) -> Rope:
        group = groups[layer_type] if is_nested else groups
        if group["rope_theta"] is None:
            return rope.NO_ROPE
        place = f".rope_parameters.{layer_type}" if is_nested else ".rope_parameters"
        with at(f"{place}.rope_type = {group['rope_type']}"):
            positions = given.get("max_position_embeddings")
            return rope.parse(
                group, head_dim=head_dim, max_position_embeddings=positions, row_tokens=row_tokens
            )

    sparse_step = given.get("decoder_sparse_step", 1)
    first_experts = given.get("first_k_dense_replace", 0)
    mlp_layers = given.get("mlp_only_layers") or ()
    rope_layers = given.get("no_rope_layers") or thetas or [1] * len(windows)
    layers: list[LayerConfig] = []
    for layer, (window, layer_type, own) in enumerate(zip(windows, types, sizes, strict=True)):
        mixer = DELTA_NET if layer_type == families.LINEAR_ATTENTION else ATTENTION
        size = own.head_dim if own else head_dim
        layer_rope = parse_rope(layer_type, size) if mixer == ATTENTION else None
        has_rope = rope_layers[layer] and not (family.rope.only_windows and window is None)
        if layer_rope is not None and not has_rope:
            zeros = (0.0,) * len(layer_rope.frequencies)
            layer_rope = Rope(frequencies=zeros, description="none")
        has_experts = (
            ("num_experts_per_tok" in given or given.get("enable_moe_block"))
            and layer not in mlp_layers
            and layer >= first_experts
            and (layer + 1) % sparse_step == 0
        )
        of_experts = MLP_AND_EXPERTS if "enable_moe_block" in given else EXPERTS
        feed_forward = of_experts if has_experts else MLP
        blocks: dict[str, Any] = {"mixer": mixer, "feed_forward": feed_forward, "sizes": own}
        layers.append(LayerConfig(window=window, rope=layer_rope, **blocks))
    return tuple(layers)


def _parse_sizes(given: dict[str, Any], types: list[str]) -> list[LayerSizes | None]:
    """Sizes of each layer of a family in which they depend on its type (Gemma 4)."""
    own = {int(layer): x for layer, x in given.get("per_layer_config", {}).items()}
    num_unshared = len(types) - given["num_kv_shared_layers"]
    # The last layer of each type that has keys of its own
    sources = {layer_type: layer for layer, layer_type in enumerate(types[: max(num_unshared, 0)])}
    if {*types} != sources.keys():
        raise UserError(
            f".num_kv_shared_layers = {given['num_kv_shared_layers']}: layers share the keys of an "
            f"earlier layer of their type, and the first {max(num_unshared, 0)} of {len(types)} "
            f"have not all of {errors.format_choices(sorted({*types}))}. Use 0, or layer_types "
            "with both among them."
        )
    sizes: list[LayerSizes | None] = []
    for layer, layer_type in enumerate(types):
        is_shared = layer >= num_unshared
        is_source = num_unshared < len(types) and layer == sources[layer_type]
        name = layer_type.partition("_")[0]
        uses = {"source": is_source, "shared": is_shared}
        is_wide = is_shared and given["use_double_wide_mlp"]
        fields = {
            x: own.get(layer, {}).get(x, given[x]) for x in ("head_dim", "num_key_value_heads")
        }
        sizes.append(
            LayerSizes(
                name="_".join([name, *filter(uses.get, uses)]),
                num_kv_heads=fields["num_key_value_heads"],
                head_dim=fields["head_dim"],
                intermediate_size=given["intermediate_size"] * (1 + is_wide),
                has_value_projection=not given["attention_k_eq_v"] or layer_type != types[-1],
                stored_keys=name if is_source else None,
                shared_keys=name if is_shared else None,
            )
        )
    return sizes


def _parse_windows(given: dict[str, Any], family: Family) -> list[int | None]:
    """Window of each layer; None for full attention."""
    num_layers = given["num_hidden_layers"]
    if family.delta_net is not None:
        return [None] * num_layers
    full, sliding = families.LAYER_TYPES
    own = config_fields.list_fields(given["model_type"])
    window = given["sliding_window"] if "sliding_window" in own else None
    layer_type = full if window is None else sliding
    types = given.get("layer_types") or [layer_type] * num_layers
    problem = None
    if "layer_types" in own:
        is_used = window is not None and given.get("use_sliding_window") is not False
        if not is_used and sliding in types:
            problem = (
                "has layers with a window, but sliding_window is null or use_sliding_window is "
                "false. Leave layer_types out, or set the window."
            )
    elif {*types} != {layer_type}:
        expected = "no layer has a window"
        if window is not None:
            expected = f"every layer has a window of {window}"
        problem = f"must agree with the other fields, by which {expected}. Leave it out."
    if problem is not None:
        raise UserError(f".layer_types = {format_value(types)}: {problem}")
    return [window if layer_type == sliding else None for layer_type in types]


def _find_family(fields: dict[str, Any]) -> Family:
    name = fields.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        problem = ": missing" if name is None else f" = {format_value(name)}: is not implemented"
        hint = errors.did_you_mean(str(name), [*FAMILIES, *MULTIMODAL_FAMILIES])
        raise UserError(
            f".model_type{problem}. jaxsp has "
            f"{errors.format_choices(FAMILIES)}, and the text model of "
            f"{errors.format_choices(MULTIMODAL_FAMILIES)}.{hint}"
        )
    return FAMILIES[name]
