"""Conversion between Hugging Face's config.json and ModelConfig, both ways."""

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

from jaxsp.blocks.config import ATTENTION, EXPERTS, MLP, LayerConfig, ModelConfig, Rope
from jaxsp.config.yaml_io import format_value
from jaxsp.core import errors
from jaxsp.core.errors import UserError, at
from jaxsp.hf import config_checks, context_range, folder, multimodal, rope_forms, rope_types
from jaxsp.hf.families import (
    EXTRA_LAYERS_FIELDS,
    FAMILIES,
    LAYER_TYPES,
    MULTIMODAL_FAMILIES,
    Family,
    find_architecture,
    find_reward_architecture,
)
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.hf.rope_types import RopeInputs

if TYPE_CHECKING:
    import transformers

# On import, transformers prints that PyTorch was not found; jaxsp does not need it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def read_fields(
    model: ModelSourceConfig, *, deadline_s: float | None = None
) -> tuple[dict[str, Any], str]:
    """Reads the config.json that `model.source` or `model.config` names, as `resolve_fields` does.

    Downloads at most config.json.

    Args: deadline_s: as for `folder.find`.
    Returns: the fields, and the name of the config in messages.
    """
    if model.source is None:
        assert model.config is not None, "the config's schema requires one of them"
        return resolve_fields(model.config, model, field="model.config"), "model.config"
    source = folder.find(model.source, names=("config.json",), deadline_s=deadline_s)
    field = str(source.path / "config.json")
    return resolve_fields(source.config_fields, model, field=field), field


def resolve_fields(
    fields: dict[str, Any], model: ModelSourceConfig, *, field: str
) -> dict[str, Any]:
    """Returns the fields of the text model's config.json, with the changes of the config.

    These are model.rope and model.max_position_embeddings. Resolving again changes nothing.

    Args: fields: fields of a config.json, which may be a multimodal model's.
    Raises: UserError if the fields are invalid, or the changes do not fit them.
    """
    text, text_field = multimodal.read_text_fields(fields, field)
    family = _find_family(text, text_field)
    if text is fields and model.rope is None and model.max_position_embeddings is None:
        return fields
    resolved = _parse_fields(text, text_field)[1].to_dict()  # messages have the field's name
    return context_range.apply_changes(text, model, resolved=resolved, support=family.rope)


def parse_model_config(
    fields: dict[str, Any], *, field: str, row_tokens: int | None = None
) -> ModelConfig:
    """Converts the fields of a config.json, with transformers' defaults for those that are missing.

    Args:
        field: name of the config in error messages, for example `model.config`.
        row_tokens: length of the rows, by which longrope chooses its factors; None: no
            longer than the model's original range.
    Raises: UserError with all fields that are missing, unknown, wrong or not implemented.
    """
    return _parse_fields(fields, field, row_tokens)[0]


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
            raise UserError(f"model.{name} = {factor}: {problem}. Remove the field.")
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
    `rope_scaling` and `torch_dtype`; without them it would use its default RoPE.

    Args: token_ids: result of `choose_token_ids`. pad_token_id stays the model's own.
    """
    _, resolved = _parse_fields(fields, "config.json")
    family = FAMILIES[fields["model_type"]]
    padding_id = read_padding_id(fields)
    head: dict[str, Any] = {"architectures": [find_architecture(fields["model_type"])]}
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
        **_renamed_fields(resolved),
        **token_ids,
        "pad_token_id": padding_id,
        **head,
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_parameters": resolved.rope_parameters,
        **rope_forms.to_old_form(resolved.rope_parameters, family.rope),
        # transformers' default is not 0
        **dict.fromkeys(EXTRA_LAYERS_FIELDS & resolved.to_dict().keys(), 0),
    }


def make_reward_fields(fields: dict[str, Any], *, field: str) -> dict[str, Any]:
    """Returns the fields of a config.json with the architecture of a reward model.

    Raises: UserError if transformers has none for the family.
    """
    architecture = find_reward_architecture(fields.get("model_type"))
    if architecture is None:
        raise UserError(
            f"objective.type = reward: {field}: transformers has no model for the scores of "
            f"{fields.get('model_type')}, so that nothing could load the result. Use a model of "
            "another family, such as qwen3 or llama."
        )
    return fields | {"architectures": [architecture]}


def is_reward_model(fields: dict[str, Any]) -> bool:
    """True if a config.json is that of a reward model."""
    architecture = find_reward_architecture(fields.get("model_type"))
    return architecture is not None and fields.get("architectures") == [architecture]


def find_auto_class(fields: dict[str, Any]) -> str:
    """Class of transformers that loads an export with this config.json."""
    if is_reward_model(fields):
        return "AutoModelForSequenceClassification"
    return FAMILIES[fields["model_type"]].auto_class


def choose_token_ids(
    fields: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Returns the ids of special tokens: from the tokenizer, else from the config, else null.

    They are those of generation_config.json. A list in the config that contains the tokenizer's id
    is kept whole. The default of the model family is never used: Llama's eos_token_id = 2 is an
    ordinary byte for a byte tokenizer.
    """
    token_ids = {}
    for name in config_checks.TOKEN_ID_FIELDS:
        tokenizer_id = getattr(tokenizer, name, None)
        config_id = fields.get(name)
        is_listed = isinstance(config_id, list) and tokenizer_id in config_id
        token_ids[name] = config_id if tokenizer_id is None or is_listed else tokenizer_id
    return token_ids


def add_token_ids(
    fields: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Returns the fields of a config.json with the ids of `choose_token_ids`.

    pad_token_id stays the model's own: another one would change how the model trains when it is
    loaded again (see `read_padding_id`).
    """
    token_ids = choose_token_ids(fields, tokenizer)
    return fields | token_ids | {"pad_token_id": read_padding_id(fields)}


def read_padding_id(fields: dict[str, Any]) -> int | None:
    """Returns the token whose embedding gets no gradient from inputs, as in transformers.

    Its models create `nn.Embedding(..., padding_idx=config.pad_token_id)`. A field that is missing
    has the default of its family (Gemma 2, 3 and Cohere 2: 0; Phi-3: 32000), unless the vocabulary
    is smaller; null is no token, and a negative id counts from the end.
    """
    import transformers

    vocab_size = fields["vocab_size"]
    default = transformers.AutoConfig.for_model(fields["model_type"]).pad_token_id
    padding_id = fields.get("pad_token_id", default)
    if padding_id is None or padding_id >= vocab_size:
        return None
    return padding_id % vocab_size


def _parse_fields(
    fields: dict[str, Any], path: str, row_tokens: int | None = None
) -> tuple[ModelConfig, "transformers.PreTrainedConfig"]:
    """Returns jaxsp's model config, and transformers' config, which has the defaults."""
    import transformers

    given_fields = fields
    kept = {}
    for name, value in fields.items():
        if name in rope_forms.GROUPS and isinstance(value, dict):
            # also a copy, because transformers adds entries to its input dicts
            value = rope_forms.normalize(value)
        if value is not None:  # for a null head_dim, transformers would not use its default
            kept[str(name)] = value
    fields = kept
    family = _find_family(fields, path)
    fields = _use_published_names(fields, path)
    if given_fields.get("sliding_window", 0) is None and family.window_fields:
        fields["sliding_window"] = None  # transformers' default is a window
    defaults = transformers.AutoConfig.for_model(fields["model_type"]).to_dict()
    problems = config_checks.find_problems(fields, family, defaults, path)
    theta = rope_forms.find_theta(given_fields)
    if family.rope.is_optional and not theta:
        problems.append(
            f"{path}.rope_parameters.rope_theta: missing. Use null for layers without RoPE, as in "
            "the published models. Else use the number that the model was trained with; "
            "transformers' default is 10000."
        )
    if problems:
        raise UserError(problems)
    own_fields = config_checks.list_own_fields(fields["model_type"])
    names = (*config_checks.PASSED_FIELDS, *family.window_fields, *own_fields)
    passed = {name: fields[name] for name in names if name in fields}
    passed |= {name: None for name in family.null_fields if given_fields.get(name, 0) is None}
    if family.rope.is_optional and theta == rope_forms.NO_ROPE:
        passed = {name: passed[name] for name in passed.keys() - {*rope_forms.FIELDS}}
        passed["rope_parameters"] = {"rope_type": "default", **theta}
    try:
        resolved = transformers.AutoConfig.for_model(fields["model_type"], **passed)
    except Exception as error:  # any, depending on the family
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise UserError(f"{path}: transformers refuses it: {reason}") from None
    given = resolved.to_dict() | _renamed_fields(resolved)
    if "layer_types" in fields:
        given["layer_types"] = fields["layer_types"]
    has_scores = is_reward_model(given_fields)
    has_bias = "attention_bias" in family.fields and given["attention_bias"]
    head_dim = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    model = {
        "vocab_size": given["vocab_size"],
        "hidden_size": given["hidden_size"],
        "num_heads": given["num_attention_heads"],
        "num_kv_heads": given["num_key_value_heads"],
        "head_dim": head_dim,
        "intermediate_size": given.get("intermediate_size", 0),
        "layers": _parse_layers(given, family, head_dim, path, row_tokens),
        "norm_eps": given[family.norm_eps_field],
        "activation": config_checks.ACTIVATIONS[given[family.activation_field]],
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": "mlp_bias" in family.fields and given["mlp_bias"],
        "padding_id": read_padding_id(given_fields | {"vocab_size": given["vocab_size"]}),
        "tie_embeddings": given["tie_word_embeddings"] and not has_scores,
        "has_scores": has_scores,
        "initializer_range": float(given["initializer_range"]),
    }
    model |= family.model | family.read(given)
    if not any(layer.feed_forward == EXPERTS for layer in model["layers"]):
        model["experts"] = None
    return ModelConfig(**model), resolved


def _use_published_names(fields: dict[str, Any], path: str) -> dict[str, Any]:
    """Fields under the names that the family reads, also where transformers 5 wrote others.

    Raises: UserError if a field has other values under its two names.
    """
    import transformers

    names = transformers.CONFIG_MAPPING[fields["model_type"]].attribute_map
    for name in names.keys() & config_checks.list_own_fields(fields["model_type"]):
        new_name = names[name]
        if new_name not in fields:
            continue
        if fields.get(name, fields[new_name]) != fields[new_name]:
            raise UserError(
                f"{path}.{new_name} = {format_value(fields[new_name])}: must equal {name}, which "
                f"is {format_value(fields[name])}: it is the same field. Leave one of them out."
            )
        fields = {**fields, name: fields[new_name]}
        del fields[new_name]
    return fields


def _renamed_fields(resolved: "transformers.PreTrainedConfig") -> dict[str, Any]:
    """Fields of the family under the names of published models, where transformers 5 has others.

    Transformers 4 reads these only.
    """
    names = resolved.attribute_map.keys() & config_checks.list_own_fields(resolved.model_type)
    return {name: getattr(resolved, name) for name in sorted(names)}


def _parse_layers(
    given: dict[str, Any], family: Family, head_dim: int, path: str, row_tokens: int | None
) -> tuple[LayerConfig, ...]:
    """The differences between layers. Args: given: the fields with transformers' defaults."""
    groups = given["rope_parameters"]
    is_nested = rope_forms.is_nested(groups, family.rope)
    windows = _parse_windows(given, family, path)
    name = family.rope.layer_thetas
    for layer, theta in enumerate([] if name is None else given[name]):
        # transformers reads only the zeros of this field
        if theta not in (0, groups["rope_theta"]):
            architecture = find_architecture(given["model_type"])
            raise UserError(
                f"{path}.{name}[{layer}] = {theta}: is not implemented: {architecture} uses "
                f"rope_theta, {groups['rope_theta']}, in every layer that has RoPE. Use that, or 0 "
                "for none."
            )
    types = given.get("layer_types") or [LAYER_TYPES[0]] * len(windows)

    @functools.cache
    def parse_rope(layer_type: str) -> Rope:
        if family.rope.is_optional and groups["rope_theta"] is None:
            return Rope(frequencies=(), description="none")
        inputs = RopeInputs(
            group=groups[layer_type] if is_nested else groups,
            head_dim=head_dim,
            max_position_embeddings=given.get("max_position_embeddings"),
            row_tokens=row_tokens,
        )
        place = f"rope_parameters.{layer_type}" if is_nested else "rope_parameters"
        with at(f"{path}.{place}.rope_type", inputs.group["rope_type"]):
            return rope_types.parse(inputs)

    layers = []
    for layer, (window, layer_type) in enumerate(zip(windows, types, strict=True)):
        mixer = family.mixers.get(layer_type, ATTENTION)
        rope = parse_rope(layer_type) if mixer == ATTENTION else None
        if rope is not None and not family.has_rope(given, layer):
            rope = Rope(frequencies=(0.0,) * len(rope.frequencies), description="none")
        feed_forward = EXPERTS if family.has_experts(given, layer) else MLP
        layers.append(LayerConfig(mixer=mixer, window=window, feed_forward=feed_forward, rope=rope))
    return tuple(layers)


def _parse_windows(given: dict[str, Any], family: Family, path: str) -> list[int | None]:
    """Window of each layer; None for full attention."""
    num_layers = given["num_hidden_layers"]
    if family.mixers:
        return [None] * num_layers
    window = given.get("sliding_window")
    types = given.get("layer_types") or [LAYER_TYPES[window is not None]] * num_layers
    if "layer_types" in family.window_fields:
        is_used = window is not None and given.get("use_sliding_window") is not False
        if not is_used and LAYER_TYPES[1] in types:
            raise UserError(
                f"{path}.layer_types = {format_value(types)}: has layers with a window, but "
                "sliding_window is null or use_sliding_window is false. Leave layer_types out, or "
                "set the window."
            )
        return [window if layer_type == LAYER_TYPES[1] else None for layer_type in types]
    if not family.window_fields:
        window = None
    if set(types) != {LAYER_TYPES[window is not None]}:
        expected = f"{'no' if window is None else 'every'} layer has a window"
        if window is not None:
            expected += f" of {window}"
        raise UserError(
            f"{path}.layer_types = {format_value(types)}: must agree with the other fields, "
            f"by which {expected}. Leave it out."
        )
    return [window] * num_layers


def _find_family(fields: dict[str, Any], path: str) -> Family:
    name = fields.get("model_type")
    implemented = (
        f"jaxsp has {errors.format_choices(FAMILIES)}, and the text model of "
        f"{errors.format_choices(MULTIMODAL_FAMILIES)}."
    )
    if name is None:
        raise UserError(f"{path}.model_type: missing. {implemented}")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = errors.did_you_mean(str(name), [*FAMILIES, *MULTIMODAL_FAMILIES])
        raise UserError(
            f"{path}.model_type = {format_value(name)}: is not implemented. {implemented}{hint}"
        )
    return FAMILIES[name]
