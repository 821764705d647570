"""Error page for a config of another system: its options and their counterparts in jaxsp."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxsp.config import config_errors, foreign_names
from jaxsp.config.config_errors import SECTIONS
from jaxsp.config.foreign_names import Counterpart

MIN_FOREIGN_OPTIONS = 5
"""Minimum number of foreign names in a config of another system."""

_MAX_FIELD_LINES = 30

_MAX_REASON_LINES = 5

_WIDTH = 100

_NAMES_WIDTH = 32

_STARTER = {
    "run": ("directory", "epochs"),
    "model": ("source",),
    "data": ("train", "row_tokens"),
    "batch": ("rows_per_step",),
    "optimizer": ("learning_rate",),
}
"""Fields of the smallest config."""


def find_foreign_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a config that are in no section of jaxsp, with dotted names."""
    options: dict[str, Any] = {}
    for name, value in fields.items():
        if config_errors.find_near_section([str(name)], value) is not None:
            continue
        if name not in SECTIONS:
            options |= foreign_names.flatten(str(name), value)
        elif not isinstance(value, dict | None) and foreign_names.find(name) is not None:
            options[name] = value
    return options


def render_page(options: Mapping[str, Any], *, start_lines: Sequence[str]) -> list[str]:
    """Returns the lines of the page for these options.

    Args:
        start_lines: suggestion of a config to start from.
    """
    table: dict[str, dict[str, Counterpart]] = {}
    not_needed = []
    unknown = []
    unused = []
    for name, value in options.items():
        counterpart = config_errors.find_counterpart(name)
        if not _is_used(counterpart, value):
            unused.append(name)
        elif counterpart is None:
            unknown.append(name)
        elif counterpart.is_not_needed:
            not_needed.append(name)
        else:
            table.setdefault(counterpart.field_name or counterpart.note, {})[name] = counterpart
    fields = [key for section in SECTIONS for key in table if key.startswith(f"{section}.")]
    reasons = [key for key in table if key not in fields]
    shown = [*fields[:_MAX_FIELD_LINES], *reasons[:_MAX_REASON_LINES]]
    hidden = {key: names for key, names in table.items() if key not in shown}
    more = [
        f"{name} -> {_find_replacement(key, names, options)}"
        for key, names in hidden.items()
        for name in names
    ]
    advice = (
        f"A jaxsp config has the sections {', '.join(SECTIONS)}. "
        f"python -m jaxsp.train --help documents them. {start_lines[0]}"
    )
    return [
        f"{len(options)} options of another system. Their counterparts in jaxsp:",
        *(_render_line(key, table[key], options) for key in shown),
        *_wrap_list("More", more),
        *_wrap_list("Not needed", not_needed),
        *_wrap_list("Not set, or off", unused),
        *_wrap_list("Unknown", unknown),
        *textwrap.wrap(advice, width=_WIDTH),
        *start_lines[1:],
    ]


def render_starter() -> list[str]:
    """Returns the lines of a small config."""
    lines = []
    for section, names in _STARTER.items():
        examples = [config_errors.format_example(f"{section}.{name}") or "" for name in names]
        fields = [example.partition(".")[2].replace("=", ": ", 1) for example in examples]
        lines.append(f"{section}: {{{', '.join(fields)}}}")
    return lines


def _render_line(
    key: str, counterparts: Mapping[str, Counterpart], options: Mapping[str, Any]
) -> str:
    """Renders the options of one field, or of one reason, with as much of the note as fits."""
    first = next(iter(counterparts.values()))
    note = "" if first.field is None else first.note
    replacement = _find_replacement(key, counterparts, options)
    text = f"  {_join_names(list(counterparts)):<{_NAMES_WIDTH}}  {replacement}"
    for shorter_note in (note, _first_clause(note)):
        if note and len(f"{text}  ({shorter_note})") <= _WIDTH:
            return f"{text}  ({shorter_note})"
    return text if len(text) <= _WIDTH else _first_clause(text)


def _find_replacement(
    key: str, counterparts: Mapping[str, Counterpart], options: Mapping[str, Any]
) -> str:
    """Returns the field with the first value that can be kept, or only the field or reason."""
    overrides = (
        config_errors.format_override(counterpart, options[name])
        for name, counterpart in counterparts.items()
    )
    return next((override for override in overrides if override is not None), key)


def _join_names(names: Sequence[str]) -> str:
    """Joins names, and counts those for which there is no space: `a, b + 3`."""
    names = [name if len(name) <= _NAMES_WIDTH else name.rpartition(".")[2] for name in names]
    texts = [", ".join(names)]
    texts += [f"{', '.join(names[:n])} + {len(names) - n}" for n in range(len(names) - 1, 0, -1)]
    return next((text for text in texts if len(text) <= _NAMES_WIDTH), texts[-1])


def _first_clause(text: str) -> str:
    return text.partition(";")[0]


def _is_used(counterpart: Counterpart | None, value: Any) -> bool:
    """True if the value of an option has an effect."""
    if value is None or value in ("", [], {}):
        return False
    if counterpart is None:
        return True
    if value is False:  # bf16: false, or lora: false
        is_field = counterpart.field is not None and "=" not in counterpart.field
        return is_field or counterpart.is_not_needed
    # max_steps: -1 is a default of others, and mesh.data: -1 one of jaxsp's
    is_default = value == -1 and counterpart.takes_value
    return not is_default or config_errors.format_override(counterpart, value) is not None


def _wrap_list(title: str, names: Iterable[str]) -> list[str]:
    text = ", ".join(names)
    if not text:
        return []
    return textwrap.wrap(
        f"{title}: {text}.",
        width=_WIDTH,
        subsequent_indent="  ",
        max_lines=3,
        placeholder=" ...",
    )
