"""Model families: conversion between Hugging Face's config.json and ModelConfig, both ways."""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from jaxsp.config.schema import ModelSourceConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.hf import config_checks, folder, rope, rope_override
from jaxsp.hf.config_checks import LAYER_TYPES, WINDOW_FIELDS, Family
from jaxsp.hf.json_values import format_value
from jaxsp.model.config import ModelConfig

if TYPE_CHECKING:
    import transformers

# On import, transformers prints that PyTorch was not found; jaxsp does not need it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", bias_fields=("attention_bias", "mlp_bias")),
    "mistral": Family(
        architecture="MistralForCausalLM",
        required_fields=("num_key_value_heads",),
        window_fields=("sliding_window",),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        required_fields=("num_key_value_heads",),
        qkv_bias=True,
        window_fields=WINDOW_FIELDS,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        bias_fields=("attention_bias",),
        required_fields=("num_key_value_heads", "head_dim"),
        qk_norm=True,
        window_fields=WINDOW_FIELDS,
    ),
}


def read_model_config(model: ModelSourceConfig, *, deadline_s: float | None = None) -> ModelConfig:
    """Reads the model config that `model.source` or `model.config` names.

    Downloads at most config.json.

    Args:
        deadline_s: longest wait for the hub; None: no limit.
    Raises:
        HubError if the hub cannot be reached, or this account has no access to the model; another
        UserError if the config cannot be read, or its family is not implemented.
    """
    if model.source is not None:
        source = folder.find(model.source, names=("config.json",), deadline_s=deadline_s)
        fields = source.config_fields
        field = str(source.path / "config.json")
    else:
        assert model.config is not None, "the config's schema requires one of them"
        fields = model.config
        field = "model.config"
    return parse_model_config(override_fields(fields, model, field=field), field=field)


def override_fields(
    fields: dict[str, Any], model: ModelSourceConfig, *, field: str
) -> dict[str, Any]:
    """Returns the fields of a config.json with the changes of model.rope and
    model.max_position_embeddings.

    Args:
        field: name of the config.json in error messages.
    Raises: UserError if the fields are invalid, or the changes do not fit them.
    """
    if model.rope is None and model.max_position_embeddings is None:
        return fields
    _, resolved = _parse_fields(fields, field)
    return rope_override.apply(
        fields, model, resolved=resolved.to_dict(), support=_find_family(fields, field).rope
    )


def parse_model_config(fields: dict[str, Any], *, field: str) -> ModelConfig:
    """Converts the fields of a config.json, with transformers' defaults for those that are missing.

    Args:
        field: name of the config in error messages, for example `model.config`.
    Raises:
        UserError with a line for every field that is missing, unknown, of the wrong type or not
        implemented.
    """
    return _parse_fields(fields, field)[0]


def make_config_json(
    fields: dict[str, Any], *, dtype: str, token_ids: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields of an export's config.json, for transformers 5 and 4.

    Transformers 5 reads `rope_parameters` and `dtype`. Transformers 4 reads `rope_theta`,
    `rope_scaling` and `torch_dtype`; without them it would use its default RoPE.

    Args:
        fields: the fields that `parse_model_config` was called with.
        token_ids: result of `choose_token_ids`.
    """
    config, resolved = _parse_fields(fields, "config.json")
    scaling = None
    if config.rope_llama3 is not None:
        scaling = {"rope_type": "llama3", **dataclasses.asdict(config.rope_llama3)}
    rope_group = scaling or {"rope_type": "default"}
    return {
        **resolved.to_diff_dict(),
        **token_ids,
        "architectures": [FAMILIES[fields["model_type"]].architecture],
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope_group},
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }


def choose_token_ids(
    fields: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Returns the ids of special tokens: from the tokenizer, else from the config, else null.

    A list in the config that contains the tokenizer's id is kept whole. The default of the model
    family is never used: Llama's eos_token_id = 2 is an ordinary byte for a byte tokenizer.
    """
    token_ids = {}
    for name in config_checks.TOKEN_ID_FIELDS:
        tokenizer_id = getattr(tokenizer, name, None)
        config_id = fields.get(name)
        is_listed = isinstance(config_id, list) and tokenizer_id in config_id
        token_ids[name] = config_id if tokenizer_id is None or is_listed else tokenizer_id
    return token_ids


def _parse_fields(
    fields: dict[str, Any], path: str
) -> tuple[ModelConfig, "transformers.PreTrainedConfig"]:
    """Returns jaxsp's model config, and transformers' config, which has the defaults."""
    import huggingface_hub.errors
    import transformers

    has_null_window = fields.get("sliding_window", 0) is None
    fields = _drop_nulls(fields)
    family = _find_family(fields, path)
    if has_null_window and family.window_fields:
        fields["sliding_window"] = None  # transformers' default is a window
    defaults = transformers.AutoConfig.for_model(fields["model_type"]).to_dict()
    problems = config_checks.find_problems(fields, family, defaults, path)
    if problems:
        raise UserError(problems)
    names = (*config_checks.PASSED_FIELDS, *family.window_fields)
    passed = {name: fields[name] for name in names if name in fields}
    try:
        resolved = transformers.AutoConfig.for_model(fields["model_type"], **passed)
    except (huggingface_hub.errors.StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{path}: transformers refuses it: {reason}") from None
    given = resolved.to_dict()
    rope_fields = given["rope_parameters"]
    attention_bias = given.get("attention_bias", False)
    config = ModelConfig(
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        num_layers=given["num_hidden_layers"],
        num_heads=given["num_attention_heads"],
        num_kv_heads=given["num_key_value_heads"],
        head_dim=given.get("head_dim", given["hidden_size"] // given["num_attention_heads"]),
        intermediate_size=given["intermediate_size"],
        rms_norm_eps=given["rms_norm_eps"],
        rope_theta=float(rope_fields["rope_theta"]),
        rope_llama3=rope.parse_llama3(rope_fields),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=given.get("mlp_bias", False),
        qk_norm=family.qk_norm,
        sliding_window=_parse_window(fields, family, given, path),
        tie_embeddings=given["tie_word_embeddings"],
        initializer_range=float(given["initializer_range"]),
    )
    return config, resolved


def _drop_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Copies fields without nulls: for a null head_dim, transformers would not use its default.

    The dicts of RoPE fields are copied too, because transformers adds entries to its input dicts.
    """
    kept = {}
    for name, value in fields.items():
        if name in rope.FIELDS and isinstance(value, dict):
            value = _drop_nulls(value)
        if value is not None:
            kept[str(name)] = value
    return kept


def _find_family(fields: dict[str, Any], path: str) -> Family:
    name = fields.get("model_type")
    implemented = f"jaxsp has {errors.format_choices(FAMILIES)}."
    if name is None:
        raise UserError(f"{path}.model_type: missing. {implemented}")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = errors.did_you_mean(str(name), list(FAMILIES))
        raise UserError(
            f"{path}.model_type = {format_value(name)}: is not implemented. {implemented}{hint}"
        )
    return FAMILIES[name]


def _parse_window(
    fields: dict[str, Any], family: Family, given: dict[str, Any], path: str
) -> int | None:
    """Returns the sliding window, which all layers share; None for full attention.

    Args:
        given: the fields with transformers' defaults.
    Raises: UserError if layers differ, or if `layer_types` disagrees with the window.
    """
    window = given.get("sliding_window")
    own_type = LAYER_TYPES[window is not None]
    types = fields.get("layer_types", given.get("layer_types")) or [own_type]
    if len({*types}) > 1:
        name = "layer_types" if "layer_types" in fields else "max_window_layers"
        without = " and no layer_types" if name == "layer_types" else ""
        full, sliding = (types.index(layer_type) for layer_type in LAYER_TYPES)
        raise UserError(
            f"{path}.{name} = {format_value(given[name])}: is not implemented: all layers must be "
            f"alike, but layer {full} would attend to whole documents, and layer {sliding} to the "
            f"last {window} tokens. Use use_sliding_window=false{without}, which is the same for "
            f"documents of at most {window} tokens."
        )
    if types[0] == own_type:
        return window
    if "use_sliding_window" in family.window_fields and types[0] == LAYER_TYPES[0]:
        return None
    expected = "no layer has a window"
    if window is not None:
        expected = f"every layer has a window of {window}"
    raise UserError(
        f"{path}.layer_types = {format_value(types)}: must agree with the other fields, "
        f"by which {expected}. Leave it out."
    )
