"""Durations: text with a unit in configs, and their form in output."""

import re
from datetime import timedelta

_UNITS = {"h": timedelta(hours=1), "m": timedelta(minutes=1), "s": timedelta(seconds=1)}

_MAX_DURATION = timedelta(hours=240_000)
"""Longest duration: its seconds have 9 digits, so that `parse` accepts every text of `to_text`."""


def parse(value: object) -> timedelta:
    """Parses a number with a unit: `25s`, `110m` or `1.5h`. A `timedelta` is returned unchanged.
    Raises: ValueError with the rule, for a field's validator."""
    if isinstance(value, timedelta):
        return value
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smh])", str(value))
    if match is None:
        raise ValueError("must be a number with a unit, such as 25s, 110m or 12h")
    duration = float(match[1]) * _UNITS[match[2]]
    if duration > _MAX_DURATION:
        raise ValueError(f"must be at most {to_text(_MAX_DURATION)}")
    return duration


def to_text(duration: timedelta) -> str:
    """Formats a duration so that `parse` returns it, in the largest unit that divides it."""
    for name, unit in _UNITS.items():
        if duration and duration % unit == timedelta():
            return f"{duration // unit}{name}"
    seconds = f"{duration.total_seconds():.3f}".rstrip("0").rstrip(".")
    return f"{seconds}s"


def describe(seconds: float | int) -> str:
    """Formats a duration for output: `0.726 s`, `39.2 s`, `4 min 10 s`, `2 h 5 min`."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(whole_seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"
