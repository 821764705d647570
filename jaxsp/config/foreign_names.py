"""Option names of other training systems (counterparts.yaml), with the fields that replace them."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from jaxsp.config import yaml_io

_NOT_NEEDED = "not needed"
_NOT_OFFERED = "not offered"

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
    table = _read_table()
    words = normalize(_LIST_ENTRY.sub("data.train.0", name)).split(".")
    for start in range(max(len(words) - table.max_words, 0), len(words)):
        end = ".".join(words[start:])
        if end in table.by_name and (start == 0 or end not in _TOP_LEVEL_ONLY):
            return table.by_name[end].with_list_entry(name)
    prefix = next((prefix for prefix in table.prefixes if words[-1].startswith(prefix)), None)
    return None if prefix is None else table.by_name[f"{prefix}*"].with_list_entry(name)


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
    "tokens",
    "system",
)
"""Names that mean something else inside a section: MaxText's mesh.model is an axis."""

_OFF_VALUES = (False, 0, "no", "none", "off", "false")


def is_off(value: Any) -> bool:
    """True if a value turns an option off."""
    return (value.lower() if isinstance(value, str) else value) in _OFF_VALUES


_SEVERAL = {("adapter.type", "qlora"): "adapter.type=lora and adapter.quantization=nf4"}
"""Settings for a field and a value of another system that stands for several fields."""

_FORMATS = {"completion": "text", "pretraining": "text", "text": "text", "tokens": "tokens"}
"""Formats of data sources for types of other systems; most others are messages."""


def find_several(field: str, value: Any) -> str | None:
    """Returns the settings for a value that stands for several fields."""
    return _SEVERAL.get((field, normalize(value))) if isinstance(value, str) else None


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
    """Returns jaxsp's value for one of another system: adamw for adamw_torch; others unchanged."""
    if field in ("data.train", "data.eval"):
        return _translate_sources(value)
    if not isinstance(value, str):
        return value
    return _read_table().values.get((field, normalize(value)), value)


def normalize(name: str) -> str:
    """Returns a name as the table has it, without leading dashes."""
    return name.lstrip("-").replace("-", "_").lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
    """Content of counterparts.yaml."""

    counterparts: tuple[Counterpart, ...]
    by_name: dict[str, Counterpart]
    prefixes: tuple[str, ...]
    """Prefixes of the names that end with *."""
    values: dict[tuple[str, str], str]
    """Values of jaxsp, by field and value of another system."""
    max_words: int
    """Largest number of words in a dotted name."""


@functools.cache
def _read_table() -> _Table:
    text = pathlib.Path(__file__).with_name("counterparts.yaml").read_text(encoding="utf-8")
    content = yaml_io.load(text)
    counterparts = tuple(map(_parse_entry, content["options"]))
    by_name = {name: counterpart for counterpart in counterparts for name in counterpart.names}
    return _Table(
        counterparts=counterparts,
        by_name=by_name,
        prefixes=tuple(name.removesuffix("*") for name in by_name if name.endswith("*")),
        values={
            (field, name): value
            for field, values in content["values"].items()
            for value, names in values.items()
            for name in (value, *names.split())
        },
        max_words=max(name.count(".") + 1 for name in by_name),
    )


def list_counterparts() -> tuple[Counterpart, ...]:
    """Lists all counterparts, in the order of the config's sections."""
    return _read_table().counterparts


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
