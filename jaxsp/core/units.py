"""Units of memory, and numbers of bytes as text."""

MIB = 2**20
GIB = 2**30


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
