"""What values of a JSON file are, and how messages write them."""

import json
from typing import Any


def is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    )  # not for NaN either


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def format_value(value: Any) -> str:
    """A value as one would write it, its beginning if it is long."""
    written = value if isinstance(value, str) else json.dumps(value, default=str)
    return written if len(written) <= 80 else f"{written[:77]}..."
