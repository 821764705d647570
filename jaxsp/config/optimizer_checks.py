"""Rules that involve several fields of the optimizer: fields that do not apply are errors."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxsp.config import yaml_io
from jaxsp.config.optimizer_schema import DEFAULTS, SCHEDULE_FIELDS
from jaxsp.core import errors


def check(fields: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each rule that the fields of the section break.

    The fields are raw: pydantic reports values of the wrong type.
    """
    yield from _check_owners(fields, "name", "adamw", DEFAULTS, title="")
    yield from _check_owners(fields, "schedule", "cosine", SCHEDULE_FIELDS, title="the schedule ")
    if fields.get("nesterov") and fields.get("name") == "sgd" and not fields.get("momentum"):
        yield f"{_format(fields, 'nesterov')}: needs momentum. Set optimizer.momentum=0.9."
    has_warmup = fields.get("warmup_steps") or fields.get("warmup_fraction")
    if fields.get("schedule") == "inverse_sqrt" and not has_warmup:
        yield (
            "optimizer.schedule = inverse_sqrt: needs a warmup, because the learning rate is "
            "peak * sqrt(warmup steps / step). Set optimizer.warmup_fraction=0.03."
        )
    yield from _check_exclusive(fields, "warmup_steps", "warmup_fraction", unset="0")
    yield from _check_exclusive(fields, "decay_steps", "decay_fraction", unset="null")
    yield from _check_groups(fields)


def _format(fields: dict[str, Any], name: str) -> str:
    return f"optimizer.{name} = {yaml_io.format_value(fields[name])}"


def _check_owners(
    fields: dict[str, Any],
    selector: str,
    default: str,
    owners: Mapping[str, Collection[str]],
    *,
    title: str,
) -> Iterator[str]:
    """Checks that each field that is set applies to the optimizer, or the schedule.

    Args:
        selector: field that selects one of `owners`, with its default.
        owners: names of the fields of each optimizer, or schedule.
    """
    selected = fields.get(selector, default)
    if not isinstance(selected, str) or selected not in owners:
        return
    for name in dict.fromkeys(name for own in owners.values() for name in own):
        if fields.get(name) is not None and name not in owners[selected]:
            choices = [
                f"optimizer.{selector}={other}" for other, own in owners.items() if name in own
            ]
            yield (
                f"{_format(fields, name)}: must be null, because {title}{selected} does not have "
                f"it. Use optimizer.{name}=null, or {errors.format_choices(choices)}."
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
