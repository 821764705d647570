"""What a user did wrong, said in one line per problem."""

import difflib
from collections.abc import Iterable, Mapping


class UserError(ValueError):
    """One or more mistakes in what the user gave; the commands print a line for each and exit with 2.

    Each problem names the field and its value, the rule, and a way out with values that work:
    `mesh.seq = 6: 32 query heads cannot be shared by 6 devices. Use 1, 2, 4, 8, 16 or 32.`
    """

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def choices(values: Iterable[object]) -> str:
    """`1, 2 or 4`, for the end of a problem's sentence."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def nearest(word: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """` Did you mean x?`, or nothing when no known word is near. A mapping says what to call the word it finds."""
    found = difflib.get_close_matches(word, list(known), n=1)
    if not found:
        return ""
    return f" Did you mean {known[found[0]] if isinstance(known, Mapping) else found[0]}?"


class Stopped(Exception):
    """A run that cannot go on, though nothing was asked wrongly; the commands print the reason and exit with 3."""
