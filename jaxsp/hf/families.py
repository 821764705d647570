"""Hugging Face's config.json and our ModelConfig, both ways; everything that differs from family to family is here.

A config.json describes more than jaxsp does. What we implement is read, what does not change training is let through, and
everything else is refused by name: a feature that is silently left out gives plausible losses of another model.
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from jaxsp.config.schema import ModelSourceConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, rotation, values
from jaxsp.model.config import ModelConfig

if TYPE_CHECKING:
    import transformers

# transformers prints on import that PyTorch was not found, which jaxsp does not need
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What a `model_type` means beyond the fields of its config.json."""

    architecture: str
    """The class that transformers loads an export with."""
    bias_fields: tuple[str, ...] = ()
    """Its fields for biases."""
    required_fields: tuple[str, ...] = ()
    """Fields with a default of one published size, which a smaller model would get without a word."""
    qkv_bias: bool = False
    """Always there, whatever the config says."""
    qk_norm: bool = False
    window_fields: tuple[str, ...] = ()
    """Its fields for sliding windows. With `sliding_window` alone, the window is every layer's; else it is that of the layers
    from `max_window_layers` on, or of those that `layer_types` says, and of none unless `use_sliding_window` is true."""


_WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

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
        window_fields=_WINDOW_FIELDS,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        bias_fields=("attention_bias",),
        required_fields=("num_key_value_heads", "head_dim"),
        qk_norm=True,
        window_fields=_WINDOW_FIELDS,
    ),
}

_SIZE_EXAMPLES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
}
"""Sizes, each with an example; the two of grouped heads may be left out where the family derives them from the others."""

_DERIVED_SIZES = ("num_key_value_heads", "head_dim")

_SWITCH_FIELDS = ("tie_word_embeddings", "attention_bias", "mlp_bias")

_TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_PASSED_FIELDS = (
    *_SIZE_EXAMPLES,
    *_SWITCH_FIELDS,
    *_TOKEN_ID_FIELDS,
    *rotation.FIELDS,
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
)
"""What transformers gets to see."""

_SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "the MLP is gated by silu here, no other function"),
    "attention_dropout": ((0,), "there is no dropout here"),
    "use_sliding_window": ((False,), "this family's layers see whole documents"),
    "sliding_window": ((), "this family's layers see whole documents"),
    "pretraining_tp": ((1,), "matrix products are not cut into slices here"),
    "partial_rotary_factor": (rotation.FULL_ROTARY_FACTORS, "whole heads are rotated here"),
    "rope_interleaved": ((False,), "elements i and i + head_dim/2 are rotated together here"),
    "use_mrope": ((False,), "positions have one dim here"),
    "quantization_config": ((), "weights are not quantized here"),
    "is_encoder_decoder": ((False,), "models are decoders alone here"),
    "add_cross_attention": ((False,), "models are decoders alone here"),
    "per_layer_config": ((), "all layers are alike here"),
    "auto_map": ((), "a model's own code is never run here"),
}
"""Fields that have to say what the decoder does: the values that do, and the reason."""

_IGNORED_FIELDS = frozenset(
    """
    model_type architectures dtype torch_dtype transformers_version name_or_path _name_or_path layer_types max_window_layers
    use_cache return_dict output_attentions output_hidden_states attn_implementation _attn_implementation
    _attn_implementation_autoset chunk_size_feed_forward id2label label2id num_labels problem_type task_specific_params
    tokenizer_class max_length min_length do_sample temperature top_k top_p typical_p repetition_penalty num_beams
    num_return_sequences is_llama_config transformers.js_config unsloth_fixed unsloth_version
    """.split()
)
"""Fields that do not change training, or that are looked at elsewhere in this file."""

_LAYER_TYPES = ("full_attention", "sliding_attention")
"""Of layers, without and with a window."""


def read_model_config(model: ModelSourceConfig, *, deadline_s: float | None = None) -> ModelConfig:
    """Reads the shapes of a config's model. Of a folder or a model of the Hub, only config.json is
    read.

    Args:
        deadline_s: longest wait for the hub; None: no limit.
    Raises:
        HubError if the hub cannot be reached or refuses the model to this login; other UserError if
        it cannot be read, or is of a family that is not implemented.
    """
    if model.source is not None:
        found = folder.find(model.source, names=("config.json",), deadline_s=deadline_s)
        return parse_model_config(found.config_fields, field=str(found.path / "config.json"))
    assert model.config is not None, "core.config asks for one of them"
    return parse_model_config(model.config, field="model.config")


def parse_model_config(fields: dict[str, Any], *, field: str) -> ModelConfig:
    """The decoder that the fields of a config.json describe; defaults are those of transformers.

    Args:
        field: what the fields are called where the user wrote them, for example `model.config`.
    Raises: UserError with a line for everything that is missing, unknown, of the wrong type or not implemented.
    """
    return _parse_fields(fields, field)[0]


def make_config_json(
    fields: dict[str, Any], *, dtype: str, token_ids: dict[str, Any]
) -> dict[str, Any]:
    """What an export's config.json holds, readable by transformers 5 (`rope_parameters`, `dtype`) and 4 (`rope_theta`,
    `rope_scaling`, `torch_dtype`: it would fall back to its default rotation without them).

    Args:
        fields: that `model_config` took.
        token_ids: of `token_ids`.
    """
    config, resolved = _parse_fields(fields, "config.json")
    scaling = None
    if config.rope_llama3 is not None:
        scaling = {"rope_type": "llama3", **dataclasses.asdict(config.rope_llama3)}
    return {
        **resolved.to_diff_dict(),
        **token_ids,
        "architectures": [FAMILIES[fields["model_type"]].architecture],
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }


def choose_token_ids(
    fields: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Ids of special tokens: the tokenizer's, else those given in the config, else null; a list that has it stays whole.

    Never a family's default: Llama's eos_token_id = 2 is a byte like any other in a tokenizer of bytes.
    """
    found = {}
    for name in _TOKEN_ID_FIELDS:
        own, given = getattr(tokenizer, name, None), fields.get(name)
        found[name] = given if own is None or (isinstance(given, list) and own in given) else own
    return found


def _parse_fields(
    fields: dict[str, Any], path: str
) -> tuple[ModelConfig, "transformers.PreTrainedConfig"]:
    """Our config, and transformers' own, whose defaults ours takes."""
    import huggingface_hub.errors
    import transformers

    without_window = fields.get("sliding_window", 0) is None
    fields = _drop_nulls(fields)
    family = _find_family(fields, path)
    if without_window and family.window_fields:
        fields["sliding_window"] = None  # left out, there would be one
    defaults = transformers.AutoConfig.for_model(fields["model_type"]).to_dict()
    problems = [
        *_missing_fields(fields, family, path),
        *_type_problems(fields, path),
        *_feature_problems(fields, family, defaults, path),
    ]
    problems += rotation.find_problems(fields, path)
    # sums of what is missing or no number would only repeat that
    problems = problems or _head_problems(fields, path)
    if problems:
        raise UserError(problems)
    passed = {
        name: fields[name] for name in (*_PASSED_FIELDS, *family.window_fields) if name in fields
    }
    try:
        resolved = transformers.AutoConfig.for_model(fields["model_type"], **passed)
    except (huggingface_hub.errors.StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path}: transformers refuses it: {str(error).splitlines()[-1].strip()}"
        ) from None
    given = resolved.to_dict()
    rope = given["rope_parameters"]
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
        rope_theta=float(rope["rope_theta"]),
        rope_llama3=rotation.parse_llama3(rope),
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
    """A copy in which null is left out: transformers' attention would meet a null head_dim as it is.

    Groups of the rotation are copied too, because transformers fills in the very dicts that it is given.
    """
    groups = {
        str(name): _drop_nulls(value)
        if name in rotation.FIELDS and isinstance(value, dict)
        else value
        for name, value in fields.items()
    }
    return {name: value for name, value in groups.items() if value is not None}


def _find_family(fields: dict[str, Any], path: str) -> Family:
    given = fields.get("model_type")
    if given is None:
        raise UserError(f"{path}.model_type: missing. jaxsp has {errors.format_choices(FAMILIES)}.")
    if not isinstance(given, str) or given not in FAMILIES:
        hint = errors.did_you_mean(str(given), list(FAMILIES))
        raise UserError(
            f"{path}.model_type = {values.format_value(given)}: is not implemented. jaxsp has {errors.format_choices(FAMILIES)}.{hint}"
        )
    return FAMILIES[given]


def _missing_fields(fields: dict[str, Any], family: Family, path: str) -> list[str]:
    required = [
        name
        for name in _SIZE_EXAMPLES
        if name not in _DERIVED_SIZES or name in family.required_fields
    ]
    return [
        f"{path}.{name}: missing. There is no size that suits every model; for example {path}.{name}={_SIZE_EXAMPLES[name]}."
        for name in required
        if name not in fields
    ]


def _type_problems(fields: dict[str, Any], path: str) -> list[str]:
    """Values of the wrong kind among the fields that we read."""
    whole = (lambda x: values.is_integer(x) and x > 0, "must be a whole number from 1")
    positive = (lambda x: values.is_number(x) and x > 0, "must be a number above 0")
    share = (lambda x: values.is_number(x) and 0 <= x <= 1, "must be a number from 0 to 1")
    switch = (lambda x: isinstance(x, bool), "must be true or false")
    ids = (
        lambda x: all(values.is_integer(one) for one in (x if isinstance(x, list) else [x])),
        "must be a token id, a list of them, or null",
    )
    rules = {
        **dict.fromkeys((*_SIZE_EXAMPLES, "max_position_embeddings"), whole),
        **dict.fromkeys(("rms_norm_eps", "rope_theta"), positive),
        "initializer_range": share,
        **dict.fromkeys(_SWITCH_FIELDS, switch),
        **dict.fromkeys(_TOKEN_ID_FIELDS, ids),
        "sliding_window": (
            lambda x: x is None or whole[0](x),
            "must be a whole number from 1, or null",
        ),
        "use_sliding_window": switch,
        "max_window_layers": (values.is_integer, "must be a whole number"),
    }
    return [
        f"{path}.{name} = {values.format_value(fields[name])}: {words}."
        for name, (is_right, words) in rules.items()
        if name in fields and not is_right(fields[name])
    ]


def _feature_problems(
    fields: dict[str, Any], family: Family, defaults: dict[str, Any], path: str
) -> list[str]:
    """Fields that ask for what we do not implement, and those that nobody knows."""
    read = {*_PASSED_FIELDS, *_SUPPORTED_VALUES, *_IGNORED_FIELDS} - (
        {*_SWITCH_FIELDS} - {*family.bias_fields, "tie_word_embeddings"}
    )
    if family.window_fields:
        read -= {*_WINDOW_FIELDS} - {*family.window_fields, "layer_types"}
    problems = []
    for name, value in fields.items():
        given = f"{path}.{name} = {values.format_value(value)}"
        if name in _SUPPORTED_VALUES and not (family.window_fields and name in _WINDOW_FIELDS):
            fitting, reason = _SUPPORTED_VALUES[name]
            if value not in fitting:
                ways_out = [f"Use {values.format_value(one)}" for one in fitting] or ["Write null"]
                problems.append(
                    f"{given}: is not implemented: {reason}. {', or '.join([*ways_out, 'leave it out'])}."
                )
        elif name == "layer_types":
            # looked at in _window
            if not isinstance(value, list) or not {*map(str, value)} <= {*_LAYER_TYPES}:
                problems.append(
                    f"{given}: is not implemented: layers have {errors.format_choices(_LAYER_TYPES)} here. Leave it out."
                )
        elif name == "architectures" and value != [family.architecture]:
            problems.append(
                f"{given}: is not implemented: jaxsp trains {family.architecture}. Leave it out."
            )
        elif name not in read and (name not in defaults or value != defaults[name]):
            # a field of another family is no typing error
            hint = (
                ""
                if name in _PASSED_FIELDS
                else errors.did_you_mean(name, sorted({*read, *_SWITCH_FIELDS}))
            )
            problems.append(
                f"{given}: is no field of {fields['model_type']} that jaxsp knows.{hint or ' Leave it out.'}"
            )
    return problems


def _parse_window(
    fields: dict[str, Any], family: Family, given: dict[str, Any], path: str
) -> int | None:
    """The window of every layer.

    Args:
        given: what transformers makes of the fields.
    Raises: UserError where layers differ, or say something else than the window.
    """
    window = given.get("sliding_window")
    of_model = _LAYER_TYPES[window is not None]
    kinds = fields.get("layer_types", given.get("layer_types")) or [of_model]
    if len({*kinds}) > 1:
        name = "layer_types" if "layer_types" in fields else "max_window_layers"
        without = " and no layer_types" if name == "layer_types" else ""
        raise UserError(
            f"{path}.{name} = {values.format_value(given[name])}: is not implemented: all layers are alike here, and layer "
            f"{kinds.index(_LAYER_TYPES[0])} would see whole documents, layer {kinds.index(_LAYER_TYPES[1])} their last {window} tokens. "
            f"Use use_sliding_window=false{without}, which is the same for documents of up to {window} tokens."
        )
    if kinds[0] == of_model:
        return window
    if "use_sliding_window" in family.window_fields and kinds[0] == _LAYER_TYPES[0]:
        return None
    says = "no layer has a window" if window is None else f"every layer has a window of {window}"
    raise UserError(
        f"{path}.layer_types = {values.format_value(kinds)}: differs from the other fields, by which {says}. Leave it out."
    )


def _head_problems(fields: dict[str, Any], path: str) -> list[str]:
    """Problems of the sizes together."""
    problems = []
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    kv_heads, head_dim = fields.get("num_key_value_heads") or heads, fields.get("head_dim")
    if heads % kv_heads:
        divisors = errors.format_choices(
            number for number in range(1, heads + 1) if heads % number == 0
        )
        problems.append(
            f"{path}.num_key_value_heads = {kv_heads}: must divide num_attention_heads, which is {heads}. Use {divisors}."
        )
    if head_dim is None and hidden % heads:
        problems.append(
            f"{path}.hidden_size = {hidden}: must be a multiple of num_attention_heads, which is {heads}."
        )
    elif (head_dim or hidden // heads) % 2:
        problems.append(
            f"{path}.head_dim = {head_dim or hidden // heads}: must be even: elements are rotated in pairs. Use 64 or 128."
        )
    return problems
