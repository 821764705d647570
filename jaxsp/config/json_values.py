"""Rules for the values of JSON files."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxsp.config import yaml_io
from jaxsp.config.fields import MAX_COUNT


def is_number(value: Any) -> bool:
    """True for a finite number; bool is not a number here."""
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return is_numeric and abs(value) < 1e300  # False for NaN


def is_integer(value: Any) -> bool:
    """True for an integer of 32 bits, like sizes of arrays; bool is not an integer here."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_COUNT


class Rule(NamedTuple):
    """Check of a value, and the end of the sentence `... must be`."""

    is_valid: Callable[[Any], bool]
    text: str


POSITIVE = Rule(lambda x: is_number(x) and x > 0, "a number above 0")
NOT_NEGATIVE = Rule(lambda x: is_number(x) and x >= 0, "a number from 0")
SWITCH = Rule(lambda x: isinstance(x, bool), "true or false")


def find_problem(rules: Mapping[str, Rule], name: str, value: Any) -> str | None:
    """Problem of a value, with its name; None if it is right, or has no rule."""
    if name not in rules:
        return None
    rule = rules[name]
    try:
        is_valid = rule.is_valid(value)
    except (TypeError, OverflowError):  # [] in a set, or an integer of 400 digits as a float
        is_valid = False
    return None if is_valid else f"{name} = {yaml_io.format_value(value)}: must be {rule.text}."
