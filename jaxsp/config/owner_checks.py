"""Checks that fields which belong to some values of another field are not set for others."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxsp.config import yaml_io
from jaxsp.core import errors


def format_field(section: str, fields: dict[str, Any], name: str) -> str:
    """A field of a section with its value, for messages."""
    return f"{section}.{name} = {yaml_io.format_value(fields[name])}"


def check_owners(
    section: str,
    fields: dict[str, Any],
    selector: str,
    default: str,
    owners: Mapping[str, Collection[str]],
    *,
    title: str = "",
) -> Iterator[str]:
    """Yields a message for each field that is set and does not apply to the selected value.

    Args:
        selector: field that selects one of `owners`, with its default.
        owners: names of the fields of each value, such as an optimizer or a schedule.
        title: what the value is, for messages.
    """
    selected = fields.get(selector, default)
    if not isinstance(selected, str) or selected not in owners:
        return
    for name in dict.fromkeys(name for own in owners.values() for name in own):
        if fields.get(name) is not None and name not in owners[selected]:
            choices = [
                f"{section}.{selector}={other}" for other, own in owners.items() if name in own
            ]
            yield (
                f"{format_field(section, fields, name)}: must be null, because {title}{selected} "
                f"does not have it. Use {section}.{name}=null, or {errors.format_choices(choices)}."
            )
