"""Base class and field types of the config's sections."""

import dataclasses
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from jaxsp.config import yaml_io
from jaxsp.core import files, units

HERE = "\0"
"""Placeholder for a section's dotted name in messages; `Schema.explain_errors` replaces it."""

BROKEN_RULES = "rules"  # type of pydantic's error for `ConfigSection.find_problems`


class ConfigSection(pydantic.BaseModel):
    """A section of the config: frozen, without unknown keys, documented by attribute docstrings.

    A field without a default that works for everyone has an example, for the end of error messages.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    def find_problems(self) -> Iterator[str]:
        """Yields a line for each broken rule about several fields of the section.
        The section is HERE: `f"{self.show('momentum')}: must be 0. Use {HERE}.momentum=0."`"""
        yield from ()

    def show(self, name: str) -> str:
        """A field with its value, for the lines of `find_problems`."""
        return f"{HERE}.{name} = {yaml_io.format_value(getattr(self, name))}"

    @pydantic.model_validator(mode="after")
    def _check_rules(self) -> "ConfigSection":
        problems = [
            f"{self.show(name)}: must not contain a NUL character. Remove it."
            for name, value in self
            if _has_nul(value)
        ]
        if problems := [*problems, *self.find_problems()]:
            raise PydanticCustomError(BROKEN_RULES, "rules", {"problems": problems})
        return self


def _takes_null(field: FieldInfo) -> bool:
    """True if null is not the default of a field in other words: it is a value, or is refused."""
    return field.is_required() or field.default is None or type(None) in get_args(field.annotation)


def _has_nul(value: Any) -> bool:
    """True if a text in a value contains NUL, which file names cannot contain."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Annotation of a field whose value selects one of several classes, each with its own fields.

    `optimizer: Annotated[Optimizer, Choice(selector="name", types=(AdamW, Sgd), default="adamw")]`
    reads `{name: sgd, momentum: 0.9}` as Sgd(momentum=0.9). The selector is a field of each class,
    whose default is the name of the class.
    """

    selector: str
    types: tuple[type[ConfigSection], ...]
    default: str | None = None
    """Name of the class if the selector is not set."""
    is_name: bool = False
    """True if a value may be only a name, which selects the class with its defaults."""

    def by_name(self) -> dict[str, type[ConfigSection]]:
        """The classes by name."""
        return {own.model_fields[self.selector].default: own for own in self.types}

    def find(self, value: Any) -> str | None:
        """Returns the name that a value selects, even if no class has it."""
        if self.is_name and isinstance(value, str):
            return value
        if isinstance(value, dict):
            return str(value[self.selector]) if self.selector in value else self.default
        return getattr(value, self.selector, None)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        by_name = {name: handler.generate_schema(own) for name, own in self.by_name().items()}
        union = core_schema.tagged_union_schema(by_name, discriminator=self.find)
        return core_schema.no_info_before_validator_function(self._prepare, union)

    def _prepare(self, value: Any) -> Any:
        """Replaces a name by its mapping, and drops null fields that have another default, or that
        only other classes have."""
        if self.is_name and isinstance(value, str) and value in self.by_name():
            return {self.selector: value}
        own = self.by_name().get(self.find(value) or "")
        if own is None or not isinstance(value, dict):
            return value
        return {
            name: entry
            for name, entry in value.items()
            if entry is not None
            or (
                _takes_null(own.model_fields[name])
                if name in own.model_fields
                else not self.owners(name)
            )
        }

    def owners(self, name: str) -> list[str]:
        """Names of the classes that have a field."""
        return [own for own, kind in self.by_name().items() if name in kind.model_fields]


MAX_COUNT = 2**31 - 1  # largest count, because arrays on the devices have 32-bit integers

PositiveCount = Annotated[int, pydantic.Field(ge=1, le=MAX_COUNT)]
NonNegativeCount = Annotated[int, pydantic.Field(ge=0, le=MAX_COUNT)]
NonNegativeFloat = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
PositiveNumber = Annotated[
    float,
    pydantic.Field(gt=0, le=MAX_COUNT, allow_inf_nan=False),
    pydantic.AfterValidator(lambda number: int(number) if number.is_integer() else number),
    pydantic.PlainSerializer(lambda number: number),
]
"""Number of which a whole one is an integer, for texts."""
Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]


def parse_positive_duration(value: object) -> timedelta:
    """Parses a duration. Raises: ValueError with the rule, also for a duration of 0."""
    duration = units.parse_duration(value)
    if not duration:
        raise ValueError("must be longer than 0s")
    return duration


Duration = Annotated[
    timedelta,
    pydantic.BeforeValidator(units.parse_duration),
    pydantic.PlainSerializer(units.format_duration),
]

PositiveDuration = Annotated[Duration, pydantic.BeforeValidator(parse_positive_duration)]


def _parse_date(value: object) -> object:
    """Parses a date given as text. Raises: ValueError with the rule."""
    try:
        return date.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be a date, such as 2026-11-25") from None


Date = Annotated[date, pydantic.BeforeValidator(_parse_date)]


def is_count(value: object) -> bool:
    """True for an integer from 1 to MAX_COUNT."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


def _check_count_or_auto(value: object) -> object:
    """Raises: ValueError with the rule, instead of one of pydantic's for each type."""
    if value != "auto" and not is_count(value):
        raise ValueError("must be auto, or an integer of at least 1")
    return value


CountOrAuto = Annotated[
    Literal["auto"] | PositiveCount, pydantic.BeforeValidator(_check_count_or_auto)
]


def with_examples(*examples: Any, **rules: Any) -> Any:
    """Annotation of a field with examples of its value, as in YAML."""
    return pydantic.Field(examples=list(examples), **rules)


FOR_TRAINING: dict[str, pydantic.JsonValue] = {"is_for_training": True}
"""`json_schema_extra` of the fields that `for_training` declares."""


def for_training(*examples: Any, default: Any = None, **rules: Any) -> Any:
    """Declares a field that only training commands require; others use its default."""
    return pydantic.Field(default, examples=list(examples), json_schema_extra=FOR_TRAINING, **rules)


def expand_home(value: str | None) -> str | None:
    """Replaces a leading `~`. Raises: UserError for a path or URL that cannot exist."""
    if value is None:
        return None
    if files.is_url(value):
        files.check_url(value)
        return value.rstrip("/")
    path = files.expand_user(value)
    return str(path) if value.startswith("~") else value
