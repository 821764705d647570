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

    A changed group always has its factor and original range.

    Args: resolved: the valid `fields` with transformers' defaults, with `rope_parameters`.
    Raises: UserError for fields that do not fit the type or the family.
    """
    positions = model.max_position_embeddings
    change = model.rope
    if change is None:
        return fields if positions is None else fields | {"max_position_embeddings": positions}
    groups = resolved["rope_parameters"]
    is_nested = rope.is_nested(groups, support)
    own = groups[FULL_ATTENTION] if is_nested else groups
    own = {name: value for name, value in own.items() if value is not None}
    own_positions = resolved["max_position_embeddings"]
    original = own_positions  # before the extension
    if change.original_max_position_embeddings is not None:
        original = change.original_max_position_embeddings
    elif change.type in (None, own["rope_type"]):
        if ORIGINAL in own:
            original = own[ORIGINAL]
        elif own["rope_type"] in ("linear", "proportional"):
            original = round(own_positions / own.get("factor", 1))

    type_name = change.type or own["rope_type"]
    rope_type = TYPES[type_name]
    if change.type is not None:
        kept = ("rope_theta", PARTIAL, *support.extra_fields)
        own = {name: own[name] for name in kept if name in own}
    group = {**own, **change.given_fields(), "rope_type": type_name}
    group.pop("type", None)
    if ORIGINAL in rope_type.fields:
        group[ORIGINAL] = original
    elif type_name == "linear" or change.original_max_position_embeddings is None:
        group.pop(ORIGINAL, None)  # of linear, it determines max_position_embeddings
    needs_factor = type_name in ("yarn", "linear") and "factor" not in group
    if needs_factor:
        group["factor"] = max(1.0, (positions or original) / original)
    problems = rope.find_group_problems(group, support)
    if needs_factor and positions is None and not problems:
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

    changed = {name: value for name, value in fields.items() if name not in rope.FIELDS}
    changed["rope_parameters"] = {**groups, FULL_ATTENTION: group} if is_nested else group
    if ORIGINAL in support.outside_fields and ORIGINAL in group:
        changed[ORIGINAL] = group[ORIGINAL]
    if thetas := fields.get(rope.LAYER_THETAS):
        changed[rope.LAYER_THETAS] = [group["rope_theta"] if theta else 0 for theta in thetas]
    if positions is None:
        positions = own_positions
        is_extended = any(getattr(change, name) for name in ("type", "factor", ORIGINAL))
        if is_extended and rope_type.extends_range and "factor" in group:
            positions = round(group["factor"] * original)
    return changed | {"max_position_embeddings": positions}


def describe_excess(
    fields: dict[str, Any], *, row_tokens: int, longest_document: int | None = None
) -> str:
    """Describes rows and documents that are longer than the model's range; empty if none is.

    RoPE is relative. What counts is the longest distance between two tokens that see each other:
    they are in one row and in one document. The fields are those with the changes of model.rope.

    Args: longest_document: its tokens, before it is split into rows; None if unknown.
    """
    positions = fields.get("max_position_embeddings")
    longest = row_tokens if longest_document is None else longest_document
    if positions is None or max(row_tokens, longest) <= positions:
        return ""
    limit = f"the {positions:,} positions of the model"
    distance = min(row_tokens, longest)
    if distance <= positions < row_tokens:
        return f"rows of {row_tokens:,} tokens are longer than {limit}; no document is"
    if distance <= positions:
        return (
            f"the longest document has {longest:,} tokens, more than {limit}. It is cut into rows "
            f"of {row_tokens:,}, and no token sees another row, so no distance is untrained."
        )
    group: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    group = group.get(FULL_ATTENTION) or group  # layers without a window determine the range
    name = rope.normalize(group).get("rope_type", "default")
    if rope.find_theta(fields) == rope.NO_THETA:
        suggestion = " The model has no RoPE to extend."
    elif name == "longrope":
        suggestion = ""
    elif name in ("linear", "llama3", "proportional"):
        factor = rope.format_factor(group.get("factor", 1) * distance / positions)
        suggestion = f" Extend the range with model.rope={{factor: {factor}}}."
    else:
        original = group.get(ORIGINAL, positions) if name == "yarn" else positions
        factor = rope.format_factor(distance / original)
        suggestion = f" Extend the range with model.rope={{type: yarn, factor: {factor}}}."
    return (
        f"rows of {row_tokens:,} tokens are longer than {limit}: tokens of a document that are "
        f"farther apart have an untrained distance.{suggestion}"
    )
