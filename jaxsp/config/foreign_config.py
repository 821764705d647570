"""One page for a config of another system: its options, and what jaxsp has in their place."""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic

from jaxsp.config import config_errors, foreign_names
from jaxsp.config.foreign_names import Counterpart

MIN_FOREIGN_OPTIONS = 5
"""Foreign names from which on a config is taken for one of another system."""

_MAX_FIELD_LINES = 24
"""Rows of the table of fields."""

_MAX_REASON_LINES = 5
"""Rows of the table of what is not offered."""

_WIDTH, _NAMES_WIDTH = 100, 32
"""Columns of the page, and of the names in its tables."""

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
    """One row of the table: options that have the same counterpart."""

    replacement: str
    note: str = ""
    names: list[str] = dataclasses.field(default_factory=list)

    def render(self) -> str:
        """The row as text, with as many names and as much of the note as there is room for."""
        text = f"  {_join_names(self.names):<{_NAMES_WIDTH}}  {self.replacement}"
        if self.note:
            notes = (f"  ({note})" for note in (self.note, _first_clause(self.note)))
            text += next((note for note in notes if len(text + note) <= _WIDTH), "")
        return text if len(text) <= _WIDTH else _first_clause(text)


def find_foreign_options(
    root: type[pydantic.BaseModel], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the options of a config that are in no group of jaxsp, with dotted names."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if config_errors.find_near_section(root, [str(name)], value):
            continue
        if name not in root.model_fields:
            found |= foreign_names.flatten(str(name), value)
        elif not isinstance(value, dict | None) and foreign_names.find(name) is not None:
            found[name] = value
    return found


def render_page(
    root: type[pydantic.BaseModel],
    options: Mapping[str, Any],
    *,
    start_lines: Sequence[str],
) -> list[str]:
    """Returns the lines of the page for these options.

    Args: start: lines about a config to start from.
    """
    rows: dict[str, _TableLine] = {}
    not_needed, not_known, not_used = [], [], []
    for name, value in options.items():
        counterpart = config_errors.find_counterpart(root, name)
        if not _is_used(root, counterpart, value):
            not_used.append(name)
        elif counterpart is None:
            not_known.append(name)
        elif counterpart.is_not_needed:
            not_needed.append(name)
        else:
            _add_option(rows, root, name, value, counterpart)
    groups = list(root.model_fields)
    fields = [key for group in groups for key in rows if key.startswith(f"{group}.")]
    reasons = [key for key in rows if key not in fields]
    table = [*fields[:_MAX_FIELD_LINES], *reasons[:_MAX_REASON_LINES]]
    hidden = [row for key, row in rows.items() if key not in table]
    layout = [
        f"A config of jaxsp has groups of fields: {', '.join(groups)}.",
        "python -m jaxsp.train --help documents them.",
        start_lines[0],
    ]
    return [
        f"{len(options)} options are not jaxsp's. jaxsp has in their place:",
        *(rows[key].render() for key in table),
        *_wrap_list(
            "And", (f"{name} -> {row.replacement}" for row in hidden for name in row.names)
        ),
        *_wrap_list("Not needed", not_needed),
        *_wrap_list("Leave out, empty or off", not_used),
        *_wrap_list("Not known", not_known),
        *textwrap.wrap(" ".join(layout), width=_WIDTH),
        *start_lines[1:],
    ]


def render_starter(root: type[pydantic.BaseModel]) -> list[str]:
    """Returns the lines of a small config."""
    lines = []
    for group, names in _STARTER.items():
        examples = [config_errors.format_example(root, f"{group}.{name}") or "" for name in names]
        fields = ", ".join(example.partition(".")[2].replace("=", ": ", 1) for example in examples)
        lines.append(f"{group}: {{{fields}}}")
    return lines


def _join_names(names: Sequence[str]) -> str:
    """`a, b + 3` for many names."""
    for number in range(len(names), 1, -1):
        more = f" + {len(names) - number}" if number < len(names) else ""
        text = f"{', '.join(names[:number])}{more}"
        if len(text) <= _NAMES_WIDTH:
            return text
    return f"{names[0]} + {len(names) - 1}" if len(names) > 1 else names[0]


def _first_clause(text: str) -> str:
    return text.partition(";")[0]


def _add_option(
    rows: dict[str, _TableLine],
    root: type[pydantic.BaseModel],
    name: str,
    value: Any,
    counterpart: Counterpart,
) -> None:
    """Adds an option to the row of its field, or of the reason why there is none."""
    key = counterpart.field_name or counterpart.note
    note = counterpart.note if counterpart.field_name else ""
    row = rows.setdefault(key, _TableLine(replacement=key, note=note))
    row.names.append(name if len(name) <= _NAMES_WIDTH else name.rpartition(".")[2])
    if row.replacement == counterpart.field_name:
        row.replacement = config_errors.format_override(root, counterpart, value) or row.replacement


def _is_used(root: type[pydantic.BaseModel], counterpart: Counterpart | None, value: Any) -> bool:
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
    return not is_default or config_errors.format_override(root, counterpart, value) is not None


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
