"""Base class and field types of the config's sections."""

from datetime import date, timedelta
from typing import Annotated, Any

import pydantic

from jaxsp.core import durations, paths, urls


class ConfigSection(pydantic.BaseModel):
    """A section of the config: frozen, without unknown keys, documented by attribute docstrings.

    A field without a default that works for everyone has an example, for the end of error messages.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


MAX_COUNT = 2**31 - 1
"""Largest count, because arrays on the devices have 32-bit integers."""

PositiveCount = Annotated[int, pydantic.Field(ge=1, le=MAX_COUNT)]
NonNegativeCount = Annotated[int, pydantic.Field(ge=0, le=MAX_COUNT)]
NonNegativeFloat = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]


def parse_positive_duration(value: object) -> timedelta:
    """Parses a duration. Raises: ValueError with the rule, also for a duration of 0."""
    duration = durations.parse(value)
    if not duration:
        raise ValueError("must be longer than 0s")
    return duration


Duration = Annotated[
    timedelta,
    pydantic.BeforeValidator(durations.parse),
    pydantic.PlainSerializer(durations.to_text),
]

PositiveDuration = Annotated[
    timedelta,
    pydantic.BeforeValidator(parse_positive_duration),
    pydantic.PlainSerializer(durations.to_text),
]


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


def with_examples(*examples: Any, **rules: Any) -> Any:
    """Annotation of a field with examples of its value, as in YAML."""
    return pydantic.Field(examples=list(examples), **rules)


def expand_home(value: str | None) -> str | None:
    """Replaces a leading `~`. Raises: UserError for a path or URL that cannot exist."""
    if value is None:
        return None
    if urls.is_url(value):
        urls.check(value)
        return value.rstrip("/")
    path = paths.expand_user(value)
    return str(path) if value.startswith("~") else value
