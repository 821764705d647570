"""Rules that involve the objective: fields that do not apply, and data that do not fit it."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxsp.config import owner_checks, yaml_io
from jaxsp.config.data_schema import PLACEHOLDER_SOURCE
from jaxsp.config.objective_schema import DEFAULTS, FORMATS
from jaxsp.core import errors

_SFT_SUGGESTION = (
    "format: prompt_completion, fields: {completion: chosen} trains on the chosen answers"
)


def check(
    objective: Mapping[str, Any],
    data: Mapping[str, Any],
    sources: Mapping[str, dict[str, Any]],
    adapter: Mapping[str, Any],
) -> Iterator[str]:
    """Yields a message for each rule that is broken.

    The fields are raw: pydantic reports values of the wrong type.

    Args:
        data, adapter: fields of these sections.
        sources: entries of data.train and data.eval, by field.
    """
    yield from owner_checks.check_owners("objective", dict(objective), "type", "sft", DEFAULTS)
    kind = objective.get("type", "sft")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        return
    needed = FORMATS.get(kind)
    for field, source in sources.items():
        given = source.get("format")
        if source.get("source") == PLACEHOLDER_SOURCE:
            continue
        if needed is None and given in FORMATS.values():
            fitting = [name for name, format in FORMATS.items() if format == given]
            yield (
                f"{field}.format = {given}: needs an objective for it. Set "
                f"{errors.format_choices([f'objective.type={name}' for name in fitting])}; "
                f"{_SFT_SUGGESTION}."
            )
        if needed is not None and isinstance(given, str) and given != needed:
            yield (
                f"{field}.format = {given}: objective.type = {kind} needs records of format "
                f"{needed}. Use format: {needed}, or objective.type=sft."
            )
    if needed is None:
        return
    saved = adapter.get("modules_to_save")
    if kind == "reward" and isinstance(saved, list | tuple) and "lm_head" in saved:
        yield (
            f"adapter.modules_to_save = {yaml_io.format_value(list(saved))}: a reward model has no "
            "lm_head; its head, score, is always trained. Leave lm_head out."
        )
    max_segments = data.get("max_segments_per_row")
    if isinstance(max_segments, int) and max_segments < 2:
        yield (
            f"data.max_segments_per_row = {yaml_io.format_value(max_segments)}: must be at least 2 "
            f"with objective.type = {kind}, so that a row holds a pair of documents. Use 2 or more."
        )
