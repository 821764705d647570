"""Option names of other training systems (counterparts.yaml), with the fields that replace them."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxsp.config import yaml_io

_NOT_NEEDED = "not needed"
_NOT_OFFERED = "not offered"

_MAX_WORDS = 4
"""Largest number of words in a dotted name of the table."""

_LIST_ENTRY = re.compile(r"^data\.(train|eval)\.(\d+)(?=\.|$)")
"""The entry of a list of data sets, at the start of a dotted name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The counterpart in jaxsp of one or more options of other systems."""

    names: tuple[str, ...]
    """Names of the options: lower case, with underscores. A dotted name counts in that section
    only, and a name that ends with * stands for all names with that prefix."""
    field: str | None = None
    """The dotted field, or field=value to write; None if there is nothing to set."""
    note: str = ""
    """Difference in meaning, or the reason why nothing is set."""
    takes_value: bool = False
    """True if the field means the same, so that the value is kept if the field accepts it."""

    @property
    def field_name(self) -> str | None:
        """The dotted field without a value."""
        return None if self.field is None else self.field.partition("=")[0]

    @property
    def is_not_needed(self) -> bool:
        """True if jaxsp always does what the option requests."""
        return self.note.startswith(_NOT_NEEDED)

    def with_list_entry(self, name: str) -> "Counterpart":
        """This counterpart for a name inside a list of data sets, with that list's entry."""
        place = _LIST_ENTRY.match(name)
        if place is None or self.field is None:
            return self
        return dataclasses.replace(self, field=_LIST_ENTRY.sub(place.group(), self.field))


def find(name: str) -> Counterpart | None:
    """Returns the counterpart of an option, or None if the name is not known.

    Ignores case and leading dashes, and reads `-` as `_`. The longest known end of a dotted name
    counts.
    """
    by_name = _read_table().by_name
    words = normalize(_LIST_ENTRY.sub("data.train.0", name)).split(".")
    for start in range(max(len(words) - _MAX_WORDS, 0), len(words)):
        end = ".".join(words[start:])
        if end in by_name and (start == 0 or end not in _TOP_LEVEL_ONLY):
            return by_name[end].with_list_entry(name)
    for pattern, counterpart in by_name.items():
        if pattern.endswith("*") and words[-1].startswith(pattern[:-1]):
            return counterpart.with_list_entry(name)
    return None


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the options in a section of another system, with dotted names.

    A section for which jaxsp has no field is one option.
    """
    counterpart = find(name)
    has_no_field = counterpart is not None and counterpart.field is None
    if not isinstance(value, dict) or not value or has_no_field:
        yield name, value
        return
    for inner, inner_value in value.items():
        yield from flatten(f"{name}.{inner}", inner_value)


_TOP_LEVEL_ONLY = (
    "model",
    "data",
    "attention",
    "optimizer",
    "scheduler",
    "devices",
    "trl",
    "stage",
    "tokens",
    "system",
)
"""Names that mean something else inside a section: MaxText's mesh.model is an axis."""

_OFF_VALUES = (False, 0, "no", "none", "off", "false")


def is_off(value: Any) -> bool:
    """True if a value turns an option off."""
    return (value.lower() if isinstance(value, str) else value) in _OFF_VALUES


_FORMATS = {"completion": "text", "pretraining": "text", "text": "text", "tokens": "tokens"}
"""Formats of data sources for types of other systems; most others are messages."""


def _translate_sources(value: Any) -> Any:
    """Data sources from names of data sets, or from entries with a path and a type."""
    sources = []
    for entry in value if isinstance(value, list | tuple) else [value]:
        fields = entry if isinstance(entry, dict) else {"path": entry}
        names = ("path", "source", "dataset", "name", "data_files")
        path = next((fields[name] for name in names if isinstance(fields.get(name), str)), None)
        if not path:
            return value
        kind = str(fields.get("type", ""))
        sources.append({"source": path, "format": _FORMATS.get(kind, "messages")})
    return sources


def translate_value(field: str, value: Any) -> Any:
    """Returns jaxsp's value for one of another system: adamw for adamw_torch; others unchanged.

    A value that stands for several fields is `value and field=value`.
    """
    if field in ("data.train", "data.eval"):
        return _translate_sources(value)
    if field == "objective.type" and isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        return value
    return _read_table().values.get((field, normalize(value)), value)


def normalize(name: str) -> str:
    """Returns a name as the table has it, without leading dashes."""
    return name.lstrip("-").replace("-", "_").lower()


class _Table(NamedTuple):
    """Content of counterparts.yaml."""

    by_name: dict[str, Counterpart]
    values: dict[tuple[str, str], str]
    """Values of jaxsp, by field and value of another system."""


@functools.cache
def _read_table() -> _Table:
    text = pathlib.Path(__file__).with_name("counterparts.yaml").read_text(encoding="utf-8")
    content = yaml_io.load(text)
    counterparts = map(_parse_entry, content["options"])
    values = {
        (field, name): value
        for field, values in content["values"].items()
        for value, names in values.items()
        for name in (value, *names.split())
    }
    return _Table({name: entry for entry in counterparts for name in entry.names}, values)


def list_counterparts() -> tuple[Counterpart, ...]:
    """Lists all counterparts, in the order of the config's sections."""
    return tuple(dict.fromkeys(_read_table().by_name.values()))


def _parse_entry(entry: dict[str, str]) -> Counterpart:
    """Parses an entry of the file, whose first key is a field or a reason."""
    field, names = next(iter(entry.items()))
    note = entry.get("note", "")
    is_field = field not in (_NOT_NEEDED, _NOT_OFFERED)
    return Counterpart(
        names=tuple(names.split()),
        field=field.removesuffix("=...") if is_field else None,
        note=note if is_field else f"{field}: {note}",
        takes_value=is_field and "=" not in field,
    )
