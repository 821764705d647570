"""A config while it is converted: options of another system, and fields and comments from them."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from jaxsp.config import config_errors, config_file, fields, foreign_names, yaml_io
from jaxsp.config.objective_schema import FORMATS
from jaxsp.core.errors import UserError

OTHER = "other"
"""Name of a system that is not known; its defaults are not known either."""

PLACEHOLDERS = {
    "run.directory": "runs/converted",
    "model.source": "FILL-IN",
    "data.train": [{"source": "FILL-IN.jsonl", "format": "messages"}],
    "data.row_tokens": 8192,
    "batch.rows_per_step": 8,
    "optimizer.learning_rate": 1e-5,
}
"""Values of required fields for which the input has none."""


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


def is_set(value: Any) -> bool:
    """True for a value that is not empty. DeepSpeed's auto means the trainer's own value."""
    return value is not None and value not in ("", [], {}, "auto")


def is_on(value: Any) -> bool:
    """True for a value that turns an option on."""
    return is_set(value) and not foreign_names.is_off(value)


def as_list(value: Any) -> list[Any]:
    """A list as it is, a single value as the only entry of one, and nothing as an empty one."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value] if is_set(value) else []


@dataclasses.dataclass(kw_only=True)
class Draft:
    """Options that are left, and what was made of the others.

    Each option is taken once; one that is left at the end has no rule of its own.
    """

    system: str
    options: dict[str, Any]
    """Options that are left, by dotted name."""
    num_gpus: int
    taken: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options that a rule has taken; None for one whose value is computed when a script runs."""
    defaults: set[str] = dataclasses.field(default_factory=set)
    """Options that the system's defaults have set."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Values of the config, by dotted field."""
    origins: dict[str, str] = dataclasses.field(default_factory=dict)
    """Option that a field comes from, by field."""
    tasks: list[str] = dataclasses.field(default_factory=list)
    """Fields that a person must fill in or check."""
    not_converted: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reason, by option with its value."""
    not_needed: list[str] = dataclasses.field(default_factory=list)
    """Options that need no field."""

    @property
    def title(self) -> str:
        """Name of the system in messages."""
        entry = read_systems().get(self.system)
        return entry["title"] if entry else "another system"

    @property
    def pair_format(self) -> str | None:
        """Format of records that the objective needs; None for supervised training."""
        return FORMATS.get(self.fields.get("objective.type", "sft"))

    def take(self, *names: str) -> Any:
        """Takes all options of these names, and returns the first value that is set.

        The last word of a dotted name counts.
        """
        value = None
        for name in _select(self.options, names):
            taken = self.taken[name] = self.options.pop(name)
            if value is None and is_set(taken):
                value = taken
            elif is_set(taken) and taken != value:
                text = f"{name} = {yaml_io.format_value(taken)}: {yaml_io.format_value(value)}"
                self.add_task(f"{text} from another option is used instead")
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

    def skip(self, *names: str) -> Any:
        """Takes options that need no field. Returns: as `take`."""
        self.not_needed += [
            name for name in _select(self.options, names) if name not in self.defaults
        ]
        return self.take(*names)

    def origin(self, *names: str) -> str:
        """Returns the first of these options that was taken, or a note that it is a default."""
        values = {name.rpartition(".")[2]: value for name, value in self.taken.items()}
        taken = [name for name, value in values.items() if is_set(value) and value is not False]
        name = next((name for name in names if name in taken), "")
        return self._describe_origin(name)

    def _describe_origin(self, name: str = "") -> str:
        return f"default of {self.title}" if name in self.defaults else name

    def add_defaults(self, kind: str) -> None:
        """Adds the system's defaults for options that are not set."""
        given = {name.rpartition(".")[2] for name in (*self.options, *self.taken)}
        given |= {_find_field(name) for name in given}
        for name, value in read_systems().get(self.system, {}).get(kind, {}).items():
            if not given & {name, _find_field(name)}:
                self.options[name] = value
                self.defaults.add(name)

    def set(self, field: str, value: Any, *names: str) -> None:
        """Sets a field. The first value counts, and another one is reported.

        Args: names: options that it comes from, or a text about that.
        """
        origin = self.origin(*names) if len(names) > 1 else self._describe_origin(*names)
        if field not in self.fields:
            self.fields[field] = value
            self.origins[field] = origin
        elif self.fields[field] != value:
            reason = f"{field} is already set by {self.origins[field]}"
            self.not_converted[f"{origin} = {yaml_io.format_value(value)}"] = reason

    def add_task(self, text: str) -> None:
        """Adds a task once."""
        if text not in self.tasks:
            self.tasks.append(text)

    def nest(self) -> dict[str, dict[str, Any]]:
        """Returns the fields as in YAML, in the order of the config."""
        nested: dict[str, dict[str, Any]] = {}
        for section, model in config_errors.SECTIONS.items():
            for field in model.model_fields:
                if f"{section}.{field}" in self.fields:
                    nested.setdefault(section, {})[field] = self.fields[f"{section}.{field}"]
        return nested

    def complete(self) -> None:
        """Makes the config valid: adds required fields, and drops values that are refused.

        Raises: UserError if a problem has no field of its own.
        """
        epochs = {} if "run.steps" in self.fields else {"run.epochs": 1}
        for field, value in (PLACEHOLDERS | epochs).items():
            if field not in self.fields:
                self.set(field, value, "FILL IN")
                self.add_task(f"{field}: the input has none")
        while True:
            try:
                config_file.parse(self.nest())
                return
            except UserError as error:
                dropped = [self._drop(problem) for problem in error.problems]
                if not any(dropped):
                    raise

    def _drop(self, problem: str) -> bool:
        """Drops the field that a problem is about, and reports the problem."""
        name = problem.partition(" ")[0].rstrip(":,")
        if match := re.fullmatch(r"(data\.(?:train|eval))\.\d+\.(\w+)", name):
            for source in self.fields[match[1]]:
                source.pop(match[2], None)
            self.not_converted[match[2]] = problem
            return match[2] not in ("source", "format")
        while name not in self.fields:
            name = name.rpartition(".")[0]
            if not name:
                return False
        origin = self.origins[name]
        del self.fields[name]
        self.not_converted[origin] = problem
        if name in PLACEHOLDERS:
            self.set(name, PLACEHOLDERS[name], "FILL IN")
            self.add_task(f"{name}: {origin} cannot be kept")
        return True


def _select(options: Iterable[str], names: tuple[str, ...]) -> list[str]:
    """Options of these names, which may be the last word of a dotted name."""
    return [name for name in options if name in names or name.rpartition(".")[2] in names]


def _find_field(name: str) -> str:
    """The field that an option sets, or the name of one without a field."""
    counterpart = foreign_names.find(name)
    return (counterpart.field_name if counterpart else None) or name
