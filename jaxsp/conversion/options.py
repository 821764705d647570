"""Options of another training system, and which of them a conversion has used."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable
from typing import Any

from jaxsp.config import fields, foreign_names, yaml_io
from jaxsp.core.errors import UserError

OTHER = "other"
"""Name of a system that is not known; its defaults are not known either."""


@functools.cache
def read_systems() -> dict[str, dict[str, Any]]:
    """Reads the systems whose configs are converted, by name."""
    text = pathlib.Path(__file__).with_name("systems.yaml").read_text(encoding="utf-8")
    systems: dict[str, dict[str, Any]] = yaml_io.load(text)
    return systems


def find_system(names: Iterable[str]) -> str:
    """Returns the system that has most of these options, and OTHER if none has."""
    known = set(names)
    counts = {
        system: sum(sign in known for sign in entry["signs"].split())
        for system, entry in read_systems().items()
    }
    best = max(counts, key=lambda system: counts[system])
    return best if counts[best] else OTHER


@dataclasses.dataclass(kw_only=True)
class Options:
    """Options by dotted name. Each is taken once; what is left has no rule of its own."""

    system: str
    values: dict[str, Any]
    expressions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of a script whose value is computed when it runs."""
    remarks: list[str] = dataclasses.field(default_factory=list)
    """Parts of a script that have no counterpart in a config."""
    num_gpus: int | None = None
    """Number of GPUs that the input names."""
    taken: dict[str, Any] = dataclasses.field(default_factory=dict)
    conflicts: list[str] = dataclasses.field(default_factory=list)
    """Options that are given twice, with different values."""
    defaults: set[str] = dataclasses.field(default_factory=set)
    """Options that the system's defaults have set."""

    @property
    def title(self) -> str:
        """Name of the system in messages."""
        entry = read_systems().get(self.system)
        return entry["title"] if entry else "another system"

    def take(self, *names: str) -> Any:
        """Takes all options of these names, and returns the first value that is set.

        The last word of a dotted name counts.
        """
        value = None
        for name in list(self.values):
            last = name.rpartition(".")[2]
            if name in names or last in names:
                taken = self.taken[name] = self.values.pop(name)
                if value is None and is_set(taken):
                    value = taken
                elif is_set(taken) and taken != value:
                    kept = yaml_io.format_value(value)
                    text = f"{name} = {yaml_io.format_value(taken)}: {kept} from another option"
                    self.conflicts.append(f"{text} is used instead")
        return value

    def take_count(self, *names: str) -> int | None:
        """Takes options that are positive integers. Raises: UserError for other values."""
        value = self.take(*names)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or fields.is_count(value):
            return value
        text = yaml_io.format_value(value)
        raise UserError(
            f"{names[0]} = {text}: must be a positive integer. Write the number in a copy."
        )

    def origin(self, *names: str) -> str:
        """Returns the first of these options that was taken, or a note that it is a default."""
        values = {name.rpartition(".")[2]: value for name, value in self.taken.items()}
        taken = [name for name, value in values.items() if is_set(value) and value is not False]
        name = next((name for name in names if name in taken), "")
        return f"default of {self.title}" if name in self.defaults else name

    def list_taken(self, *names: str) -> list[str]:
        """Returns those of these options that were taken and are not defaults."""
        return [
            name
            for name in self.taken
            if name.rpartition(".")[2] in names and name not in self.defaults
        ]

    def add_defaults(self, kind: str) -> None:
        """Adds the system's defaults for options that are not set."""
        given = {name.rpartition(".")[2] for name in (*self.values, *self.taken)}
        given |= self.expressions.keys()
        fields_of_given = {_field_of(name) for name in given}
        for name, value in read_systems().get(self.system, {}).get(kind, {}).items():
            if name not in given and _field_of(name) not in fields_of_given:
                self.add_default(name, value)

    def add_default(self, name: str, value: Any) -> None:
        """Adds a default of the system."""
        self.values[name] = value
        self.defaults.add(name)


def _field_of(name: str) -> str:
    """The field that an option sets, or the name of one without a field."""
    counterpart = foreign_names.find(name)
    return (counterpart.field_name if counterpart else None) or name


def is_set(value: Any) -> bool:
    """True for a value that is not empty. DeepSpeed's auto means the trainer's own value."""
    return value is not None and value not in ("", [], {}, "auto")


def is_on(value: Any) -> bool:
    """True for a value that turns an option on."""
    return is_set(value) and not foreign_names.is_off(value)
