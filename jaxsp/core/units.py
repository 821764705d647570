"""Units of memory and of time, and numbers with them as text."""

import re
from datetime import timedelta

MIB = 2**20
GIB = 2**30


_UNITS = {"h": timedelta(hours=1), "m": timedelta(minutes=1), "s": timedelta(seconds=1)}

_MAX_DURATION = timedelta(hours=240_000)
"""Longest duration: its seconds have 9 digits, so that `parse_duration` accepts its text."""


def format_bytes(num_bytes: int | float) -> str:
    """Formats a number of bytes. Examples: `8.7 MiB`, `1.5 GiB`, `1,200 GiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if num_bytes >= unit / 10:
            digits = 0 if num_bytes >= 1000 * unit else 1
            return f"{num_bytes / unit:,.{digits}f} {name}"
    return f"{num_bytes / 1024:,.1f} KiB"


def format_count(number: float, noun: str) -> str:
    """Formats a number of things: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def parse_duration(value: object) -> timedelta:
    """Parses a number with a unit: `25s`, `110m` or `1.5h`. A `timedelta` is returned unchanged.
    Raises: ValueError with the rule, for a field's validator."""
    if isinstance(value, timedelta):
        return value
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smh])", str(value))
    if match is None:
        raise ValueError("must be a number with a unit, such as 25s, 110m or 12h")
    duration = float(match[1]) * _UNITS[match[2]]
    if duration > _MAX_DURATION:
        raise ValueError(f"must be at most {format_duration(_MAX_DURATION)}")
    return duration


def format_duration(duration: timedelta) -> str:
    """Formats a duration for `parse_duration`, in the largest unit that divides it."""
    for name, unit in _UNITS.items():
        if duration and duration % unit == timedelta():
            return f"{duration // unit}{name}"
    seconds = f"{duration.total_seconds():.3f}".rstrip("0").rstrip(".")
    return f"{seconds}s"


def format_seconds(seconds: float | int) -> str:
    """Formats a duration for output: `0.726 s`, `39.2 s`, `4 min 10 s`, `2 h 5 min`."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(whole_seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"
