"""A config while it is converted: fields with their origin, and what remains to be done."""

import dataclasses
import re
from typing import Any

from jaxsp.config import config_errors, config_file, yaml_io
from jaxsp.core.errors import UserError

PLACEHOLDERS = {
    "run.directory": "runs/converted",
    "model.source": "FILL-IN",
    "data.train": [{"source": "FILL-IN.jsonl", "format": "messages"}],
    "data.row_tokens": 8192,
    "batch.rows_per_step": 8,
    "optimizer.learning_rate": 1e-5,
}
"""Values of required fields for which the input has none."""


@dataclasses.dataclass(kw_only=True)
class Draft:
    """Dotted fields of a config, and comments about them and about options."""

    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    origins: dict[str, str] = dataclasses.field(default_factory=dict)
    """Option that a field comes from, by field."""
    tasks: list[str] = dataclasses.field(default_factory=list)
    """Fields that a person must fill in or check."""
    not_converted: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reason, by option with its value."""
    not_needed: list[str] = dataclasses.field(default_factory=list)
    """Options that need no field."""

    def set(self, field: str, value: Any, origin: str) -> None:
        """Sets a field. The first value counts, and another one is reported."""
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
        for section in config_errors.SECTIONS:
            for field in config_errors.SECTIONS[section].model_fields:
                if f"{section}.{field}" in self.fields:
                    nested.setdefault(section, {})[field] = self.fields[f"{section}.{field}"]
        return nested

    def complete(self) -> None:
        """Makes the config valid: adds required fields, and drops values that are refused.

        Raises: UserError if a problem has no field of its own.
        """
        for field, value in PLACEHOLDERS.items():
            if field not in self.fields:
                self.set(field, value, "FILL IN")
                self.add_task(f"{field}: the input has none")
        if not self.fields.keys() & {"run.steps", "run.epochs"}:
            self.set("run.epochs", 1, "FILL IN")
            self.add_task("run.epochs: the input has none")
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
