"""Rules that involve several fields of the optimizer: fields that do not apply are errors."""

from collections.abc import Iterator
from typing import Any

from jaxsp.config import yaml_io
from jaxsp.config.optimizer_schema import DEFAULTS, SCHEDULE_FIELDS
from jaxsp.core import errors


def check(fields: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each rule that the fields of the section break.

    The fields are raw: pydantic reports values of the wrong type.
    """
    yield from _check_options(fields)
    yield from _check_schedule(fields)
    yield from _check_exclusive(fields, "warmup_steps", "warmup_fraction", unset="0")
    yield from _check_exclusive(fields, "decay_steps", "decay_fraction", unset="null")
    yield from _check_groups(fields)


def _format(fields: dict[str, Any], name: str) -> str:
    return f"optimizer.{name} = {yaml_io.format_value(fields[name])}"


def _check_options(fields: dict[str, Any]) -> Iterator[str]:
    """Checks that each hyperparameter that is set applies to the optimizer."""
    optimizer = fields.get("name", "adamw")
    if not isinstance(optimizer, str) or optimizer not in DEFAULTS:
        return
    own = DEFAULTS[optimizer]
    names = dict.fromkeys(name for options in DEFAULTS.values() for name in options)
    for name in names:
        if fields.get(name) is not None and name not in own:
            rule = f"must be null, because {optimizer} does not have it"
            yield f"{_format(fields, name)}: {rule}. {_suggest_optimizers(name)}"
    if fields.get("nesterov") and optimizer == "sgd" and not fields.get("momentum"):
        yield f"{_format(fields, 'nesterov')}: needs momentum. Set optimizer.momentum=0.9."


def _suggest_optimizers(name: str) -> str:
    """Suggestion to leave a field out, or to use an optimizer that has it."""
    choices = [f"optimizer.name={other}" for other, options in DEFAULTS.items() if name in options]
    return f"Use optimizer.{name}=null, or {errors.format_choices(choices)}."


def _check_schedule(fields: dict[str, Any]) -> Iterator[str]:
    """Checks that each field of a schedule that is set applies to it."""
    schedule = fields.get("schedule", "cosine")
    if not isinstance(schedule, str) or schedule not in SCHEDULE_FIELDS:
        return
    names = dict.fromkeys(name for own in SCHEDULE_FIELDS.values() for name in own)
    for name in names:
        if fields.get(name) is not None and name not in SCHEDULE_FIELDS[schedule]:
            choices = [
                f"optimizer.schedule={other}"
                for other, own in SCHEDULE_FIELDS.items()
                if name in own
            ]
            yield (
                f"{_format(fields, name)}: must be null, because the schedule {schedule} does not "
                f"have it. Use optimizer.{name}=null, or {errors.format_choices(choices)}."
            )
    has_warmup = fields.get("warmup_steps") or fields.get("warmup_fraction")
    if schedule == "inverse_sqrt" and not has_warmup:
        yield (
            "optimizer.schedule = inverse_sqrt: needs a warmup, because the learning rate is "
            "peak * sqrt(warmup steps / step). Set optimizer.warmup_fraction=0.03."
        )


def _check_exclusive(
    fields: dict[str, Any], steps: str, fraction: str, *, unset: str
) -> Iterator[str]:
    """Checks that a number of steps is not also given as a fraction."""
    if fields.get(steps) and fields.get(fraction) is not None:
        yield (
            f"{_format(fields, steps)}, {_format(fields, fraction)}: only one of them may be set. "
            f"Use optimizer.{steps}={unset} or optimizer.{fraction}=null."
        )


def _check_groups(fields: dict[str, Any]) -> Iterator[str]:
    """Checks that a frozen group has no other option."""
    groups = fields.get("groups")
    for index, group in enumerate(groups if isinstance(groups, list | tuple) else ()):
        if not isinstance(group, dict):
            continue
        name = f"optimizer.groups.{index}"
        options = [
            option
            for option, unset in (("learning_rate_factor", 1), ("weight_decay", None))
            if group.get(option, unset) != unset
        ]
        if group.get("frozen") is True:
            for option in options:
                value = yaml_io.format_value(group[option])
                yield (
                    f"{name}.{option} = {value}: has no effect, because the group is frozen. "
                    f"Leave it out, or set {name}.frozen=false."
                )
