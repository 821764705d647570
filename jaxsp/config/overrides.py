"""Command-line changes of a config: `key.path=value`."""

from typing import Any

import yaml

from jaxsp.config import yaml_io
from jaxsp.core import errors


def apply(fields: dict[str, Any], override: str, *, example_override: str) -> str | None:
    """Sets one `key.path=value` in nested fields, or returns the problem with it.

    Args:
        example_override: a valid one, for the error about text that is not key.path=value.
    """
    key, equals, text = override.partition("=")
    path = key.split(".")
    if not equals or not all(path):
        return f"{override}: must be key.path=value, for example {example_override}."
    try:
        value = yaml_io.load(text)
    except (yaml.YAMLError, ValueError):
        return f"{key} = {yaml_io.shorten(text)}: must be a YAML value. Quote it: '{key}=\"...\"'."
    parent: Any = fields
    for depth, part in enumerate(path):
        name = ".".join(path[:depth])
        index: Any = part
        if isinstance(parent, list):
            if not part.isdecimal() or int(part) >= len(parent):
                problem = f"{key} = {text}: {name} has {len(parent)} entries."
                return f"{problem} {_suggest_entry(name, parent)}"
            index = int(part)
        elif not isinstance(parent, dict):
            return f"{key} = {text}: {name} = {yaml_io.format_value(parent)} has no fields."
        if depth == len(path) - 1:
            parent[index] = value
            break
        if isinstance(parent, dict) and parent.get(index) is None:
            parent[index] = {}
        parent = parent[index]
    return None


def _suggest_entry(name: str, entries: list[Any]) -> str:
    names = [f"{name}.{index}" for index in range(len(entries))]
    return f"Use {errors.format_choices(names) or f'{name}=[...]'}."
