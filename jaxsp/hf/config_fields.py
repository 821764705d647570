"""Fields of a config.json: what jaxsp reads, what it refuses, and rules for their values.

Every field that changes arithmetic in a family has a rule here. A family reads those that its class
in transformers declares; another one of them, or another value of a field that jaxsp does not have,
is refused by name: a feature that is silently left out gives plausible losses of another model.
Fields that are not known to change arithmetic are kept, and written back into exports.
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxsp.config import json_values
from jaxsp.config.json_values import NOT_NEGATIVE, POSITIVE, SWITCH, Rule
from jaxsp.config.yaml_io import format_value
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.hf import families, rope
from jaxsp.hf.families import FAMILIES, MULTIMODAL_FAMILIES

if TYPE_CHECKING:
    import transformers

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of the MLP's gate: names in config.json, and in ModelConfig."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the field with the number of experts."""

TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_EXAMPLES = {
    **{"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "intermediate_size": 14336,
    # only some families have the others
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
    **{"num_experts": 128, "num_local_experts": 8, "n_routed_experts": 128, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "top_k_experts": 8, "moe_intermediate_size": 768},
    "shared_expert_intermediate_size": 512,
}
"""Sizes of a model, and examples."""

_COMMON_FIELDS = {
    *tuple(_EXAMPLES)[:7],
    *("tie_word_embeddings", "initializer_range", "max_position_embeddings", *TOKEN_ID_FIELDS),
    *rope.FIELDS,
}
"""Fields that all families read."""

_WHOLE_DOCUMENTS = "layers of this family attend to whole documents"

_SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        ("attention_dropout", "embd_pdrop", "resid_pdrop"), ((0,), "jaxsp has no dropout")
    ),
    "use_sliding_window": ((False,), _WHOLE_DOCUMENTS),
    **dict.fromkeys(("sliding_window", "sliding_window_pattern"), ((), _WHOLE_DOCUMENTS)),
    "pretraining_tp": ((1,), "matrix products are not sliced"),
    "rope_interleaved": ((False,), "elements i and i + head_dim/2 are rotated together"),
    "use_mrope": ((False,), "positions have one dimension"),
    **dict.fromkeys(
        ("use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"),
        ((False,), "jaxsp trains decoder-only models"),
    ),
    "per_layer_config": ((), "all layers are alike"),
    "auto_map": ((), "a model's own code is never run"),
    "clip_qkv": ((), "queries, keys and values have no limit"),
    "router_jitter_noise": ((0,), "routers have no noise"),
}
"""Fields with a fixed meaning in jaxsp: the values that match it, and the reason."""

_QUANTIZED = (
    "is not implemented: weights must not be quantized. Name the model from which it was quantized "
    "(often the same name without FP8, bnb-4bit, GPTQ or AWQ) as model.source; "
    "adapter.quantization=nf4 or int8 quantizes its frozen weights."
)

_COUNT = Rule(lambda x: json_values.is_integer(x) and x > 0, "a whole number from 1")
_is_size = _COUNT.is_valid
# each layer, head or expert has an entry in a list
_FEW = Rule(lambda x: _is_size(x) and x <= 10_000, "a whole number from 1 to 10,000")
_TOKEN_IDS = Rule(
    lambda x: all(map(json_values.is_integer, x if isinstance(x, list) else [x])),
    "a token id, a list of them, or null",
)
_LAYERS = Rule(
    lambda x: isinstance(x, list) and all(map(NOT_NEGATIVE.is_valid, x)), "a list of layers"
)

_NAMES_BY_RULE = {
    _FEW: """
        num_hidden_layers num_attention_heads num_key_value_heads linear_num_key_heads
        linear_num_value_heads num_experts num_local_experts num_experts_per_tok n_routed_experts
        n_shared_experts n_group topk_group top_k_experts num_global_key_value_heads
    """,
    _COUNT: """
        vocab_size hidden_size head_dim intermediate_size linear_key_head_dim linear_value_head_dim
        moe_intermediate_size shared_expert_intermediate_size max_position_embeddings
        full_attention_interval decoder_sparse_step sliding_window_pattern no_rope_layer_interval
        global_head_dim vocab_size_per_layer_input
    """,
    Rule(lambda x: _is_size(x) and x > 1, "a whole number from 2"): "linear_conv_kernel_dim",
    Rule(lambda x: x == 0 or _is_size(x), "a whole number from 0"): """
        first_k_dense_replace num_nextn_predict_layers num_kv_shared_layers
        hidden_size_per_layer_input
    """,
    Rule(lambda x: x is None or _is_size(x), "a whole number from 1, or null"): "sliding_window",
    Rule(json_values.is_integer, "a whole number"): "max_window_layers",
    NOT_NEGATIVE: "router_aux_loss_coef linear_a_log_min linear_dt_min",
    POSITIVE: """
        linear_a_log_max linear_dt_max linear_dt_init_floor rms_norm_eps layer_norm_eps
        query_pre_attn_scalar logit_scale logits_scaling final_logit_softcapping
        attn_logit_softcapping embedding_multiplier attention_multiplier residual_multiplier
        qk_scale_factor output_multiplier post_norm_eps routed_scaling_factor swiglu_alpha
        swiglu_limit
    """,
    Rule(lambda x: json_values.is_number(x) and 0 <= x <= 1, "a number from 0 to 1"): """
        initializer_range
    """,
    SWITCH: """
        tie_word_embeddings attention_bias mlp_bias norm_topk_prob use_qk_norm output_router_logits
        use_sliding_window linear_allow_neg_eigval attention_k_eq_v enable_moe_block
        use_double_wide_mlp
    """,
    _TOKEN_IDS: "bos_token_id eos_token_id",
    Rule(json_values.is_integer, "a token id, or null"): "pad_token_id",
    _LAYERS: "mlp_only_layers",
    Rule(
        lambda x: isinstance(x, list) and all(item in (0, 1) for item in x), "a list of 0 and 1"
    ): "no_rope_layers",
    Rule(
        _LAYERS.is_valid, "a list of rope_theta, or 0 for no RoPE, for each layer"
    ): "layer_rope_theta",
    Rule(
        lambda x: x in ACTIVATIONS, errors.format_choices(ACTIVATIONS)
    ): "hidden_act hidden_activation",
}

_RULES = {name: rule for rule, names in _NAMES_BY_RULE.items() for name in names.split()}

_HARMLESS = ("max_window_layers", "use_cache")
"""Fields of some families that change nothing in the others, or at all."""

_KNOWN_FIELDS = {*_RULES, *_SUPPORTED_VALUES, *_HARMLESS, *rope.FIELDS}.union(
    ("layer_types", "linear_use_gate", "quantization_config"),
    *(family.values for family in FAMILIES.values()),
)
"""Fields that jaxsp reads, ignores or refuses in some family."""


@functools.cache
def list_fields(model_type: str) -> frozenset[str]:
    """Fields that a family reads; of a multimodal one, beside text_config."""
    import transformers

    family = FAMILIES.get(model_type)
    if family is None:
        return frozenset({*TOKEN_ID_FIELDS, "tie_word_embeddings", "initializer_range"})
    declared = transformers.CONFIG_MAPPING[model_type].__dataclass_fields__.keys()
    own = (declared & {*_RULES, "layer_types"}) - family.values.keys()
    return frozenset({*own, *family.more_fields, *_COMMON_FIELDS})


def list_required_sizes(model_type: str) -> list[str]:
    """Sizes that a config.json must have, because transformers does not derive them from others.

    Its default is the size of one published model, which would silently be used for the others.
    """
    import transformers

    declared: dict[str, Any] = transformers.CONFIG_MAPPING[model_type].__dataclass_fields__
    family = FAMILIES[model_type]
    names = {name for name, field in declared.items() if field.default is not None}
    names = names - {*family.optional_sizes} | {*family.required_sizes}
    return [name for name in _EXAMPLES if name in names]


def find_problems(fields: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Problems of a text model's config.json: missing fields, wrong values, unread features.

    Each begins with a dot and the field's name. Args: fields: without nulls.
    """
    required = list_required_sizes(fields["model_type"])
    if fields.get("enable_moe_block") is True:
        required += ["num_experts", "top_k_experts", "moe_intermediate_size"]
    problems = [
        f".{name}: missing. There is no size that suits every model; for example "
        f"{name}={_EXAMPLES[name]}."
        for name in required
        if name not in fields
    ]
    problems += find_field_problems(fields, defaults)
    # computing with sizes that are missing or not numbers would only repeat those problems
    return problems or [f".{problem}" for problem in _find_size_problems(fields, defaults)]


def find_field_problems(fields: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Wrong values and features that jaxsp does not have, of any family, as `find_problems`."""
    import transformers

    model_type = fields["model_type"]
    family = FAMILIES.get(model_type) or MULTIMODAL_FAMILIES[model_type]
    own = list_fields(model_type)
    base = transformers.PreTrainedConfig.__dataclass_fields__.keys()
    refused = {*_KNOWN_FIELDS}
    if model_type in FAMILIES:  # others declare fields for images
        refused |= transformers.CONFIG_MAPPING[model_type].__dataclass_fields__.keys() - base
    architecture = families.find_architecture(model_type)
    has_windows = "sliding_window" in own
    problems = []
    for name, value in fields.items():
        if wrong := json_values.find_problem(_RULES, name, value):
            problems.append(f".{wrong}")
        problem = None
        if name == "quantization_config":
            method = value.get("quant_method") if isinstance(value, dict) else None
            problem = None if method in family.quant_methods else _QUANTIZED
        elif name in family.values:
            problem = _find_value_problem(value, family.values[name], f"for {architecture}")
        elif name == "layer_types":
            # whether they agree with the window is checked when the window is read
            types = families.LAYER_TYPES
            if family.delta_net is not None:
                types = (families.LINEAR_ATTENTION, rope.FULL_ATTENTION)
            if not isinstance(value, list) or not {*map(str, value)} <= {*types}:
                choices = errors.format_choices(types)
                problem = f"is not implemented: layers must have {choices}. Leave it out."
        elif name == "architectures" and value != [architecture]:
            labels = fields.get("id2label") or {"0": ""}
            has_one_label = isinstance(labels, dict) and len(labels) == 1
            has_one_score = has_one_label and fields.get("num_labels", 1) == 1
            if not has_one_score or value != [families.find_reward_architecture(model_type)]:
                problem = f"is not implemented: jaxsp trains {architecture}. Leave it out."
        elif name in own or name in _HARMLESS:
            continue
        elif name in _SUPPORTED_VALUES and not (has_windows and "sliding_window" in name):
            problem = _find_value_problem(value, *_SUPPORTED_VALUES[name])
        elif name not in defaults or value != defaults[name]:
            hint = " Leave it out."
            if name not in refused:  # a typo, except of the names that transformers writes
                is_foreign = name in base or name.startswith("_")
                hint = "" if is_foreign else errors.did_you_mean(name, own - {*TOKEN_ID_FIELDS})
            if hint:
                problem = f"is not a field of {model_type} that jaxsp reads.{hint}"
        if problem:
            problems.append(f".{name} = {format_value(value)}: {problem}")
    return problems


def check_names(fields: dict[str, Any]) -> None:
    """Checks the names in model.config that a user has written; files of models have others.

    Raises: UserError for those that neither transformers nor jaxsp has.
    """
    import transformers

    model_type = fields["model_type"]
    own = list_fields(model_type)
    config_class = transformers.CONFIG_MAPPING[model_type]
    family = FAMILIES.get(model_type) or MULTIMODAL_FAMILIES[model_type]
    known = {*_KNOWN_FIELDS, *own, *family.values, "torch_dtype", "num_labels"}
    known |= {*config_class.__dataclass_fields__, *config_class().to_dict()}
    known |= {*config_class.attribute_map, *config_class.attribute_map.values()}
    known |= {*transformers.GenerationConfig().to_dict()}
    sizes = ", ".join(name for name in _EXAMPLES if name in own)
    other = f" Leave it out. Sizes are {sizes}." if sizes else " Leave it out."
    problems = [
        f".{name} = {format_value(value)}: is not a field of {model_type} that jaxsp reads."
        f"{errors.did_you_mean(str(name), own - {*TOKEN_ID_FIELDS}) or other}"
        for name, value in fields.items()
        if name not in known and not str(name).startswith("_")
    ]
    if problems:
        raise UserError(problems)


def _find_value_problem(value: Any, supported: tuple[Any, ...], reason: str) -> str | None:
    """Problem of a field with a fixed meaning, or None."""
    if value in supported:
        return None
    suggestions = [f"Use {format_value(fixed)}" for fixed in supported] or ["Write null"]
    return f"is not implemented: {reason}. {', or '.join([*suggestions, 'leave it out'])}."


def _find_size_problems(fields: dict[str, Any], defaults: dict[str, Any]) -> Iterator[str]:
    """Sizes that do not fit together. Args: defaults: those of transformers."""
    given = defaults | fields
    num_heads = fields["num_attention_heads"]
    num_kv_heads = fields.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        divisors = [number for number in range(1, num_heads + 1) if num_heads % number == 0]
        yield (
            f"num_key_value_heads = {num_kv_heads}: must divide num_attention_heads, "
            f"which is {num_heads}. Use {errors.format_choices(divisors)}."
        )
    hidden_size = fields["hidden_size"]
    head_dim = fields.get("head_dim") or hidden_size / num_heads
    if head_dim % 2:
        yield (
            f"head_dim = {head_dim:g}: must be an even number, because elements are rotated in "
            "pairs. It is hidden_size / num_attention_heads if it is not given."
        )
    vocab_size = fields["vocab_size"]
    rows = given.get("vocab_size_per_layer_input", vocab_size)
    if given.get("hidden_size_per_layer_input") and rows < vocab_size:
        yield (
            f"vocab_size_per_layer_input = {rows}: must be at least vocab_size, which is "
            f"{vocab_size}: transformers has no such embedding for the other tokens."
        )
    padding_id = fields.get("pad_token_id", 0)
    if not -vocab_size <= padding_id < vocab_size:
        yield (
            f"pad_token_id = {padding_id}: must be below vocab_size, which is {vocab_size}; "
            "transformers cannot load such a model. Use null."
        )
    num_key_heads = fields.get("linear_num_key_heads", num_heads)
    num_value_heads = fields.get("linear_num_value_heads", num_heads)
    if num_value_heads % num_key_heads:
        yield (
            f"linear_num_value_heads = {num_value_heads}: must be a multiple of "
            f"linear_num_key_heads, which is {num_key_heads}."
        )
    num_experts = next((fields[name] for name in EXPERT_COUNTS if name in fields), None)
    count = "top_k_experts" if "top_k_experts" in fields else "num_experts_per_tok"
    if num_experts is not None and count in fields:
        num_chosen = fields[count]
        num_groups = given.get("n_group", 1)
        num_chosen_groups = given.get("topk_group", 1)
        allowed = num_chosen_groups * num_experts
        if num_chosen > num_experts:
            yield (
                f"{count} = {num_chosen}: must be at most the number of experts, "
                f"which is {num_experts}."
            )
        elif num_groups > 1 and (num_experts % num_groups or num_experts < 2 * num_groups):
            yield (
                f"n_group = {num_groups}: must divide n_routed_experts, which is {num_experts}, "
                "into groups of at least 2. Use 1."
            )
        elif not num_chosen * num_groups <= allowed <= num_groups * num_experts:
            yield (
                f"topk_group = {num_chosen_groups}: must be at most n_group, which is "
                f"{num_groups}, and that many groups must have num_experts_per_tok experts, "
                f"{num_chosen}. Use {num_groups}."
            )
    for name in ("linear_a_log", "linear_dt"):
        low = given.get(f"{name}_min", 0)
        high = given.get(f"{name}_max", 1)
        if low >= high:
            yield f"{name}_min = {low}: must be below {name}_max, which is {high}."
    num_layers = fields["num_hidden_layers"]
    yield from (
        f"{name}: has {len(fields[name])} entries, but there are {num_layers} layers. "
        "Give one for each layer, or leave it out."
        for name in ("no_rope_layers", "layer_rope_theta", "layer_types")
        if name in fields and len(fields[name]) != num_layers
    )


def choose_token_ids(
    fields: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Returns the ids of special tokens: from the tokenizer, else from the config, else null.

    They are those of generation_config.json. A list in the config that contains the tokenizer's id
    is kept whole. The default of the model family is never used: Llama's eos_token_id = 2 is an
    ordinary byte for a byte tokenizer.
    """
    token_ids = {}
    for name in TOKEN_ID_FIELDS:
        tokenizer_id = getattr(tokenizer, name, None)
        config_id = fields.get(name)
        is_listed = isinstance(config_id, list) and tokenizer_id in config_id
        token_ids[name] = config_id if tokenizer_id is None or is_listed else tokenizer_id
    return token_ids


def add_token_ids(
    fields: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Returns the fields of a config.json with the ids of `choose_token_ids`.

    pad_token_id stays the model's own: another one would change how the loaded model trains.
    """
    padding_id = read_padding_id(fields)
    return fields | choose_token_ids(fields, tokenizer) | {"pad_token_id": padding_id}


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
