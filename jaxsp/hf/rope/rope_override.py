"""Context extension: `model.rope` and `model.max_position_embeddings` change a config.json.

The changed fields are the model's config.json from then on: in checkpoints and in the export, which
transformers and vLLM read. Changing them again gives the same fields.
"""

from typing import Any

from jaxsp.core.errors import UserError
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.hf.rope import rope_checks, rope_forms
from jaxsp.hf.rope.rope_fields import ORIGINAL
from jaxsp.hf.rope.rope_forms import FULL_ATTENTION, RopeSupport
from jaxsp.hf.rope.rope_types import TYPES

_EXTENDING = {"type", "factor", ORIGINAL}
"""Fields of model.rope that determine how many positions the model has."""


def apply(
    fields: dict[str, Any],
    model: ModelSourceConfig,
    *,
    resolved: dict[str, Any],
    support: RopeSupport,
) -> dict[str, Any]:
    """Returns the fields of a config.json with the changes of the config.

    Args:
        fields: valid fields of a config.json.
        resolved: the fields with transformers' defaults, with `rope_parameters`.
        support: rotary features of the model's family.
    Raises: UserError for fields that do not fit the type or the family.
    """
    if model.rope is None:
        if model.max_position_embeddings is None:
            return fields
        return fields | {"max_position_embeddings": model.max_position_embeddings}
    groups = resolved["rope_parameters"]
    is_nested = rope_forms.is_nested(groups, support)
    own = groups[FULL_ATTENTION] if is_nested else groups
    own = {name: value for name, value in own.items() if value is not None}
    own_positions = resolved["max_position_embeddings"]
    original = own_positions  # before the extension
    if model.rope.original_max_position_embeddings is not None:
        original = model.rope.original_max_position_embeddings
    elif model.rope.type in (None, own["rope_type"]):
        if ORIGINAL in own:
            original = own[ORIGINAL]
        elif own["rope_type"] == "linear":
            original = round(own_positions / own["factor"])
    group = _make_group(model, own, original=original, support=support)
    changed = {name: value for name, value in fields.items() if name not in rope_forms.FIELDS}
    changed["rope_parameters"] = {**groups, FULL_ATTENTION: group} if is_nested else group
    if ORIGINAL in support.outside_fields and ORIGINAL in group:
        changed[ORIGINAL] = group[ORIGINAL]
    if support.layer_thetas is not None and fields.get(support.layer_thetas) is not None:
        thetas = fields[support.layer_thetas]
        changed[support.layer_thetas] = [group["rope_theta"] if theta else 0 for theta in thetas]
    positions = model.max_position_embeddings
    if positions is None:
        positions = own_positions
        is_extended = bool(_EXTENDING & model.rope.model_dump(exclude_none=True).keys())
        if is_extended and TYPES[group["rope_type"]].extends_range and "factor" in group:
            positions = round(group["factor"] * original)
    return changed | {"max_position_embeddings": positions}


def _make_group(
    model: ModelSourceConfig, own: dict[str, Any], *, original: int, support: RopeSupport
) -> dict[str, Any]:
    """The changed group. Its factor and original range are never left out.

    Args: own: the model's own group, without nulls.
    Raises: UserError
    """
    rope = model.rope
    assert rope is not None, "checked before"
    name_of_type = rope.type or own["rope_type"]
    if rope.type is not None:
        kept = ("rope_theta", "partial_rotary_factor", *support.extra_fields)
        own = {name: own[name] for name in kept if name in own}
    group = {**own, **rope.given_fields(), "rope_type": name_of_type}
    group.pop("type", None)
    if ORIGINAL in TYPES[name_of_type].fields:
        group[ORIGINAL] = original
    elif name_of_type == "linear" or rope.original_max_position_embeddings is None:
        group.pop(ORIGINAL, None)  # of linear, it determines max_position_embeddings
    needs_factor = name_of_type in ("yarn", "linear") and "factor" not in group
    if needs_factor:
        group["factor"] = max(1.0, (model.max_position_embeddings or original) / original)
    positions = {"max_position_embeddings": original}
    problems = rope_checks.find_group_problems(group, positions, support)
    if needs_factor and model.max_position_embeddings is None and not problems:
        problems.append(
            "factor: missing. Set it, for example model.rope.factor=4, or set "
            "model.max_position_embeddings."
        )
    if "rope_theta" not in group:
        problems.append(
            "theta: missing. The model has no RoPE to extend: leave model.rope out. To "
            "add RoPE, set it, for example model.rope.theta=500000."
        )
    if rope.longrope_factors is not None and name_of_type != "longrope":
        problems.append(
            f"longrope_factors = {rope.longrope_factors}: the model's rope_type is "
            f"{name_of_type}, and only longrope has such factors. Leave it out."
        )
    if problems:
        # the fields are called type and theta in model.rope
        raise UserError(f"model.rope.{problem.removeprefix('rope_')}" for problem in problems)
    if rope.longrope_factors is not None:
        divisors = group[f"{rope.longrope_factors}_factor"]
        group |= {"short_factor": divisors, "long_factor": divisors}
    return group
