"""Rules that involve several fields of the optimizer: fields that do not apply are errors."""

import functools
from collections.abc import Iterator
from typing import Any

from jaxsp.config import owner_checks, yaml_io
from jaxsp.config.optimizer_schema import DEFAULTS, SCHEDULE_FIELDS

_format = functools.partial(owner_checks.format_field, "optimizer")


def check(fields: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each rule that the fields of the section break.

    The fields are raw: pydantic reports values of the wrong type.
    """
    yield from owner_checks.check_owners("optimizer", fields, "name", "adamw", DEFAULTS)
    yield from owner_checks.check_owners(
        "optimizer", fields, "schedule", "cosine", SCHEDULE_FIELDS, title="the schedule "
    )
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
    # Checks that a frozen group has no other option
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


def _check_exclusive(
    fields: dict[str, Any], steps: str, fraction: str, *, unset: str
) -> Iterator[str]:
    """Checks that a number of steps is not also given as a fraction."""
    if fields.get(steps) and fields.get(fraction) is not None:
        yield (
            f"{_format(fields, steps)}, {_format(fields, fraction)}: only one of them may be set. "
            f"Use optimizer.{steps}={unset} or optimizer.{fraction}=null."
        )
