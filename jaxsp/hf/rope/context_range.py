"""Comparison of a run's rows and documents with the number of positions that its model has."""

from typing import Any

from jaxsp.hf.rope import rope_fields, rope_forms, rope_types
from jaxsp.hf.rope.rope_forms import FULL_ATTENTION


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
    if rope_forms.find_theta(fields) == rope_forms.NO_ROPE:
        return " The model has no RoPE to extend."
    group: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    group = group.get(FULL_ATTENTION) or group  # layers without a window determine the range
    name = rope_forms.normalize(group).get("rope_type", "default")
    if name == "longrope":
        return ""
    if name in ("linear", "llama3"):
        factor = rope_types.format_factor(group["factor"] * needed / positions)
        return f" Extend the range with model.rope={{factor: {factor}}}."
    original = positions
    if name == "yarn":
        original = group.get(rope_fields.ORIGINAL, positions)
    factor = rope_types.format_factor(needed / original)
    return f" Extend the range with model.rope={{type: yarn, factor: {factor}}}."
