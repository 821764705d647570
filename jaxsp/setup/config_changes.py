"""Differences between the config of a checkpoint and that of the run that resumes from it."""

from typing import Any

from jaxsp.config import yaml_io
from jaxsp.config.schema import Config

TOKEN_FIELDS = (
    "data.train",
    "data.eval_fraction",
    "data.chat_template",
    "model.tokenizer",
    "model.source",
)
"""Prefixes of fields that change the tokens."""

_NEUTRAL_FIELDS = (
    "mesh.",
    "logging.",
    "checkpoint.",
    "memory.",
    "attention.",
    "batch.rows_per_microbatch",
    "data.eval.",
    "data.num_workers",
    "eval.",
    "model.experts_kernel",
    "run.compilation_cache",
    "run.deterministic",
    "run.early_stopping",
    "run.eval_at_start",
    "run.eval_every",
    "run.generate_samples",
    "run.log_every",
    "run.save_every",
    "run.shutdown_grace",
    "run.step_timeout",
    "run.stop_after",
)
"""Prefixes of fields that change neither rows nor weights, except for rounding."""

_ALTERING_FIELDS = ("memory.grad_reduce_dtype",)
"""Exceptions to _NEUTRAL_FIELDS."""

_UNREPORTED_FIELDS = ("run.directory", "run.staging", "run.resume", "run.on_data_change")

_MAX_VALUE_CHARS = 60
"""Longest value in a list of changes; a chat template has pages."""


def list_changes(saved: Config, config: Config) -> tuple[str, ...]:
    """Changed fields with both values; those without effect on the model come last, as one."""
    before = dict(yaml_io.flatten(saved.model_dump(mode="json")))
    now = dict(yaml_io.flatten(config.model_dump(mode="json")))
    changes = {
        field: f"{field} {_shorten(before.get(field))} -> {_shorten(now.get(field))}"
        for field in before | now
        if before.get(field) != now.get(field) and field not in _UNREPORTED_FIELDS
    }
    neutral = [change for field, change in changes.items() if is_neutral(field)]
    altering = [change for change in changes.values() if change not in neutral]
    if neutral:
        altering.append(f"{' and '.join(neutral)} (without effect on what the model learns)")
    return tuple(altering)


def is_neutral(field: str) -> bool:
    """True if a field changes neither rows nor weights, except for rounding."""
    return field.startswith(_NEUTRAL_FIELDS) and field not in _ALTERING_FIELDS


def _shorten(value: Any) -> str:
    return yaml_io.shorten(yaml_io.format_value(value), _MAX_VALUE_CHARS)
