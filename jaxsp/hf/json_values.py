"""Checks of JSON values, and how messages print them."""

import json
from typing import Any

from jaxsp.config import yaml_io


def is_number(value: Any) -> bool:
    """True for a finite number; bool is not a number here."""
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return is_numeric and abs(value) < 1e300  # False for NaN


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def format_value(value: Any) -> str:
    """A value as JSON, cut to 80 characters."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = f"a large {type(value).__name__}"
    return yaml_io.shorten(text)
