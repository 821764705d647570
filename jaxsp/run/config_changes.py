"""Differences between the config of a checkpoint and that of the run that resumes from it."""

from jaxsp.config import yaml_io
from jaxsp.run.config_file import Config

TOKEN_FIELDS = tuple(
    "data.train data.eval_fraction data.chat_template model.tokenizer model.source".split()
)
"""Prefixes of fields that change the tokens."""

_NEUTRAL_FIELDS = (
    *("mesh.", "logging.", "checkpoint.", "memory.", "attention.", "eval.", "data.eval."),
    *("batch.rows_per_microbatch", "data.num_workers", "model.experts_kernel"),
    *("run.compilation_cache", "run.deterministic", "run.early_stopping", "run.eval_at_start"),
    *("run.eval_every", "run.generate_samples", "run.log_every", "run.save_every"),
    *("run.shutdown_grace", "run.step_timeout", "run.stop_after"),
)
"""Prefixes of fields that change neither rows nor weights, except for rounding."""

_ALTERING_FIELDS = ("memory.grad_reduce_dtype",)
"""Exceptions to _NEUTRAL_FIELDS."""

_UNREPORTED_FIELDS = ("run.directory", "run.staging", "run.resume", "run.on_data_change")

_MAX_VALUE_CHARS = 60
"""Longest value in a list of changes; a chat template has pages."""


def list_changes(saved: Config, config: Config) -> tuple[str, ...]:
    """Changed fields with both values; those without effect on the model come last, as one."""
    before, now = (dict(yaml_io.flatten(each.model_dump(mode="json"))) for each in (saved, config))
    altering: list[str] = []
    neutral: list[str] = []
    for field in before | now:
        if before.get(field) == now.get(field) or field in _UNREPORTED_FIELDS:
            continue
        old, new = (
            yaml_io.shorten(yaml_io.format_value(fields.get(field)), _MAX_VALUE_CHARS)
            for fields in (before, now)
        )
        is_neutral = field.startswith(_NEUTRAL_FIELDS) and field not in _ALTERING_FIELDS
        (neutral if is_neutral else altering).append(f"{field} {old} -> {new}")
    if neutral:
        altering.append(f"{' and '.join(neutral)} (without effect on what the model learns)")
    return tuple(altering)
