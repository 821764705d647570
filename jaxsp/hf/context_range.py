"""Number of positions of a model: changes by the config, and comparison with a run's rows.

`model.rope` and `model.max_position_embeddings` change a config.json. The changed fields are the
model's from then on: in checkpoints and in the export, which transformers and vLLM read. Changing
them again gives the same fields.
"""

from typing import Any

from jaxsp.core.errors import UserError
from jaxsp.hf import rope
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.hf.rope import FULL_ATTENTION, ORIGINAL, PARTIAL, TYPES, RopeSupport


def apply_changes(
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
    Raises: UserError for fields that do not fit the type or the family.
    """
    positions = model.max_position_embeddings
    if model.rope is None:
        return fields if positions is None else fields | {"max_position_embeddings": positions}
    groups = resolved["rope_parameters"]
    is_nested = rope.is_nested(groups, support)
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
    changed = {name: value for name, value in fields.items() if name not in rope.FIELDS}
    changed["rope_parameters"] = {**groups, FULL_ATTENTION: group} if is_nested else group
    if ORIGINAL in support.outside_fields and ORIGINAL in group:
        changed[ORIGINAL] = group[ORIGINAL]
    if thetas := fields.get(rope.LAYER_THETAS):
        changed[rope.LAYER_THETAS] = [group["rope_theta"] if theta else 0 for theta in thetas]
    if positions is None:
        positions = own_positions
        is_extended = any(getattr(model.rope, name) for name in ("type", "factor", ORIGINAL))
        if is_extended and TYPES[group["rope_type"]].extends_range and "factor" in group:
            positions = round(group["factor"] * original)
    return changed | {"max_position_embeddings": positions}


def _make_group(
    model: ModelSourceConfig, own: dict[str, Any], *, original: int, support: RopeSupport
) -> dict[str, Any]:
    """The changed group. Its factor and original range are never left out.

    Args: own: the model's own group, without nulls.
    """
    change = model.rope
    assert change is not None, "checked before"
    type_name = change.type or own["rope_type"]
    if change.type is not None:
        kept = ("rope_theta", PARTIAL, *support.extra_fields)
        own = {name: own[name] for name in kept if name in own}
    group = {**own, **change.given_fields(), "rope_type": type_name}
    group.pop("type", None)
    if ORIGINAL in TYPES[type_name].fields:
        group[ORIGINAL] = original
    elif type_name == "linear" or change.original_max_position_embeddings is None:
        group.pop(ORIGINAL, None)  # of linear, it determines max_position_embeddings
    needs_factor = type_name in ("yarn", "linear") and "factor" not in group
    if needs_factor:
        group["factor"] = max(1.0, (model.max_position_embeddings or original) / original)
    positions = {"max_position_embeddings": original}
    problems = rope.find_group_problems(group, positions, support, {})
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
    if change.longrope_factors is not None and type_name != "longrope":
        problems.append(
            f"longrope_factors = {change.longrope_factors}: the model's rope_type is "
            f"{type_name}, and only longrope has such factors. Leave it out."
        )
    if problems:
        # the fields are called type and theta in model.rope
        named = [f"model.rope.{problem.removeprefix('rope_')}" for problem in problems]
        raise UserError(named, is_named=True)
    if change.longrope_factors is not None:
        divisors = group[f"{change.longrope_factors}_factor"]
        group |= {"short_factor": divisors, "long_factor": divisors}
    return group


def describe_excess(
    fields: dict[str, Any], *, row_tokens: int, longest_document: int | None = None
) -> str:
    """Describes rows and documents that are longer than the model's range; empty if none is.

    RoPE is relative. What counts is the longest distance between two tokens that see each other:
    they are in one row and in one document.

    Args:
        fields: fields of the model's config.json, with the changes of model.rope.
        row_tokens: length of the rows.
        longest_document: its number of tokens, before it is split into rows; None if unknown.
    """
    positions = fields.get("max_position_embeddings")
    longest = row_tokens if longest_document is None else longest_document
    if positions is None or max(row_tokens, longest) <= positions:
        return ""
    limit = f"the {positions:,} positions of the model"
    distance = min(row_tokens, longest)
    if distance > positions:
        suggestion = _suggest_extension(fields, distance, positions)
        return (
            f"rows of {row_tokens:,} tokens are longer than {limit}: tokens of a document that are "
            f"farther apart have an untrained distance.{suggestion}"
        )
    if row_tokens > positions:
        return f"rows of {row_tokens:,} tokens are longer than {limit}; no document is"
    return (
        f"the longest document has {longest:,} tokens, more than {limit}. It is cut into rows of "
        f"{row_tokens:,}, and no token sees another row, so no distance is untrained."
    )


def _suggest_extension(fields: dict[str, Any], needed: int, positions: int) -> str:
    """Suggestion of a model.rope that reaches a number of positions."""
    if rope.find_theta(fields) == rope.NO_THETA:
        return " The model has no RoPE to extend."
    group: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    group = group.get(FULL_ATTENTION) or group  # layers without a window determine the range
    name = rope.normalize(group).get("rope_type", "default")
    if name == "longrope":
        return ""
    if name in ("linear", "llama3"):
        factor = rope.format_factor(group["factor"] * needed / positions)
        return f" Extend the range with model.rope={{factor: {factor}}}."
    original = positions
    if name == "yarn":
        original = group.get(ORIGINAL, positions)
    factor = rope.format_factor(needed / original)
    return f" Extend the range with model.rope={{type: yarn, factor: {factor}}}."
