"""Settings of an evaluation that its numbers depend on, beside the weights and the data."""

import dataclasses

from jaxsp.blocks import rope
from jaxsp.training.specs import StepSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingFields:
    """Fields of a line of eval.jsonl, tasks.jsonl or lm_eval.jsonl."""

    row_tokens: int
    """Row length of the evaluation, in tokens."""
    compute_dtype: str
    """model.compute_dtype."""
    rope: str | None
    """Rotary embeddings, as the banner describes changed ones. null without any."""


def describe(spec: StepSpec) -> SettingFields:
    """Returns the settings of a step that evaluates."""
    return SettingFields(
        row_tokens=spec.config.row_tokens,
        compute_dtype=spec.config.compute_dtype,
        rope=rope.describe(spec.model, is_changed=True) or None,
    )
