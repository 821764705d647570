"""Durations in output."""


def describe(seconds: float | int) -> str:
    """Formats a duration. Examples: `0.726 s`, `39.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if round(seconds) < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"
