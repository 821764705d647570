"""Error page for a config of another system: its options and their counterparts in jaxsp."""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxsp.config import config_errors, foreign_names
from jaxsp.config.config_errors import SECTIONS
from jaxsp.config.foreign_names import Counterpart

MIN_FOREIGN_OPTIONS = 5
"""Minimum number of foreign names in a config of another system."""

_MAX_FIELD_LINES = 24

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


@dataclasses.dataclass(kw_only=True)
class _TableLine:
    """Line of the table: options that have the same counterpart."""

    replacement: str
    note: str = ""
    names: list[str] = dataclasses.field(default_factory=list)

    def render(self) -> str:
        """Renders the line with as many names and as much of the note as fit."""
        text = f"  {_join_names(self.names):<{_NAMES_WIDTH}}  {self.replacement}"
        for note in (self.note, _first_clause(self.note)):
            if note and len(f"{text}  ({note})") <= _WIDTH:
                return f"{text}  ({note})"
        return text if len(text) <= _WIDTH else _first_clause(text)


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
    table: dict[str, _TableLine] = {}
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
            _add_option(table, name, value, counterpart)
    fields = [key for section in SECTIONS for key in table if key.startswith(f"{section}.")]
    reasons = [key for key in table if key not in fields]
    shown = [*fields[:_MAX_FIELD_LINES], *reasons[:_MAX_REASON_LINES]]
    hidden = [line for key, line in table.items() if key not in shown]
    more = [f"{name} -> {line.replacement}" for line in hidden for name in line.names]
    advice = (
        f"A jaxsp config has the sections {', '.join(SECTIONS)}. "
        f"python -m jaxsp.train --help documents them. {start_lines[0]}"
    )
    return [
        f"{len(options)} options of another system. Their counterparts in jaxsp:",
        *(table[key].render() for key in shown),
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


def _join_names(names: Sequence[str]) -> str:
    """Joins names, and counts those for which there is no space: `a, b + 3`."""
    for number in range(len(names), 1, -1):
        text = ", ".join(names[:number])
        if number < len(names):
            text += f" + {len(names) - number}"
        if len(text) <= _NAMES_WIDTH:
            return text
    return f"{names[0]} + {len(names) - 1}" if len(names) > 1 else names[0]


def _first_clause(text: str) -> str:
    return text.partition(";")[0]


def _add_option(
    table: dict[str, _TableLine], name: str, value: Any, counterpart: Counterpart
) -> None:
    """Adds an option to the line of its field, or of the reason why there is no field."""
    field = counterpart.field_name
    line = table.setdefault(
        field or counterpart.note,
        _TableLine(replacement=field or counterpart.note, note=counterpart.note if field else ""),
    )
    line.names.append(name if len(name) <= _NAMES_WIDTH else name.rpartition(".")[2])
    if line.replacement == field:
        line.replacement = config_errors.format_override(counterpart, value) or field


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
