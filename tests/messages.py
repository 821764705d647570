"""What tests check of a message: fields, values, numbers, names and suggestions, in any wording."""

import re


def holding(*parts: object) -> str:
    """Returns a regular expression for text with these parts in this order, in one line.

    A part that begins or ends with a digit is not found in a longer number: 4 is not in 14, 4.5 or
    4,000.

    Example: `pytest.raises(errors.UserError, match=messages.holding("mesh.seq = 6", 1, "2 or 4"))`.
    """
    return ".*".join(map(_pattern, map(str, parts)))


def _pattern(part: str) -> str:
    before = r"(?<![\d.,])" if part[0].isdigit() else ""
    after = r"(?![.,]?\d)" if part[-1].isdigit() else ""
    return before + re.escape(part) + after
