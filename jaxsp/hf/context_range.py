"""Comparison of a run's documents with the number of positions that its model was trained for."""

from typing import Any

from jaxsp.hf import rope_fields, rope_types
from jaxsp.hf.rope_forms import FULL_ATTENTION


def describe_excess(
    fields: dict[str, Any], *, row_tokens: int, longest_document: int | None = None
) -> str:
    """Describes rows that are longer than the model's range; empty if there are none.

    Args:
        fields: fields of the model's config.json, with the changes of model.rope.
        row_tokens: length of the longest rows.
        longest_document: its number of tokens, before it is split into rows; None if unknown.
    """
    positions = fields.get("max_position_embeddings")
    needed = max(row_tokens, longest_document or 0)
    if positions is None or needed <= positions:
        return ""
    subject = f"rows of {row_tokens:,} tokens are"
    if row_tokens <= positions:
        subject = f"the longest document has {needed:,} tokens, which is"
    text = f"{subject} longer than the {positions:,} positions that the model was trained for"
    if longest_document is not None and longest_document <= positions:
        return f"{text}; no document is, so no token has an untrained position"
    suggestion = _suggest_extension(fields, needed, positions)
    return f"{text}: documents beyond that have untrained positions.{suggestion}"


def _suggest_extension(fields: dict[str, Any], needed: int, positions: int) -> str:
    """Suggestion of a model.rope that reaches a number of positions."""
    group = _find_group(fields)
    name = rope_types.find_name(group)
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


def _find_group(fields: dict[str, Any]) -> dict[str, Any]:
    """Group of the layers that attend to whole documents."""
    group: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    # layers without a window determine the range
    return group.get(FULL_ATTENTION) or group
