"""Option names of other training systems (counterparts.yaml), with the fields that replace them."""

import dataclasses
import functools
import pathlib
import re
from typing import Any

from jaxsp.config import yaml_io

_LIST_ENTRY = re.compile(r"^data\.(train|eval)\.\d+(?=\.|$)")
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


def find(name: str) -> Counterpart | None:
    """Returns the counterpart of the longest known end of a dotted name, None if none is known.
    Ignores case and leading dashes, and reads `-` as `_`."""
    table, _ = read_table()
    words = normalize(_LIST_ENTRY.sub("data.train.0", name)).split(".")
    ends = [".".join(words[start:]) for start in range(len(words))]
    known = [end for end in ends if end == normalize(name) or end not in _TOP_LEVEL_ONLY]
    known = [end for end in known if end in table]
    known += [key for key in table if key.endswith("*") and words[-1].startswith(key[:-1])]
    if not known:
        return None
    found = table[known[0]]
    entry = _LIST_ENTRY.match(name)
    if entry is None or found.field is None:
        return found
    return dataclasses.replace(found, field=_LIST_ENTRY.sub(entry.group(), found.field))


_TOP_LEVEL_ONLY = ["model", "data", "attention", "optimizer", "scheduler", "devices", "trl"]
_TOP_LEVEL_ONLY += ["stage", "tokens", "system"]
"""Names that mean something else inside a section: MaxText's mesh.model is an axis."""

_OFF_VALUES = (False, 0, "no", "none", "off", "false")


def is_off(value: Any) -> bool:
    """True if a value turns an option off."""
    return (value.lower() if isinstance(value, str) else value) in _OFF_VALUES


def translate_value(field: str, value: Any) -> Any:
    """Returns jaxsp's value for one of another system: adamw for adamw_torch; others unchanged.
    A value that stands for several fields is `value and field=value`."""
    if field == "objective.type" and isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        return value
    key = _LIST_ENTRY.sub("data.train.0", field)
    return read_table()[1].get((key, normalize(value)), value)


def normalize(name: str) -> str:
    """Returns a name as the table has it, without leading dashes."""
    return name.lstrip("-").replace("-", "_").lower()


@functools.cache
def read_table() -> tuple[dict[str, Counterpart], dict[tuple[str, str], str]]:
    """Content of counterparts.yaml: counterparts by name, and values of jaxsp by field and value
    of another system."""
    text = pathlib.Path(__file__).with_name("counterparts.yaml").read_text(encoding="utf-8")
    content = yaml_io.load(text)
    by_name: dict[str, Counterpart] = {}
    for entry in content["options"]:
        field, names = next(iter(entry.items()))
        note = entry.get("note", "")
        is_field = field not in ("not needed", "not offered")
        counterpart = Counterpart(
            names=tuple(names.split()),
            field=field.removesuffix("=...") if is_field else None,
            note=note if is_field else f"{field}: {note}",
            takes_value=is_field and "=" not in field,
        )
        by_name |= dict.fromkeys(counterpart.names, counterpart)
    values = {
        (field, name): value
        for field, values in content["values"].items()
        for value, names in values.items()
        for name in (value, *names.split())
    }
    return by_name, values
