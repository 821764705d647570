"""User errors, one line per problem."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """One or more mistakes in what the user gave; the commands print a line for each and exit with 2.

    Each problem names the field and its value, the rule, and a way out with values that work:
    `mesh.seq = 6: 32 query heads cannot be shared by 6 devices. Use 1, 2, 4, 8, 16 or 32.`
    """

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def format_choices(values: Iterable[object]) -> str:
    """`1, 2 or 4`, for the end of a problem's sentence."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean x?` for a word that is nearly a known one, otherwise nothing."""
    near = find_nearest(word, known)
    return f" Did you mean {near}?" if near else ""


def find_nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word with the same letters, or with one typo (two from six letters on).

    None if there is no such word, and if two are equally near: a wrong suggestion is worse than
    none.
    """
    letters = _letters(word)
    distances = sorted((_count_typos(letters, _letters(other)), other) for other in known)
    most = 1 if len(letters) < 6 else 2
    if not distances or distances[0][0] > most:
        return None
    is_tie = len(distances) > 1 and distances[0][0] == distances[1][0]
    return None if is_tie else distances[0][1]


def _letters(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _count_typos(a: str, b: str) -> int:
    """Number of typos between two words: letters added, left out, replaced, or two exchanged."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(b, 1):
            typos = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                typos = min(typos, last[j - 2] + 1)
            row.append(typos)
    return row[-1]


class NeedsAttentionError(Exception):
    """A run that cannot go on, though nothing was asked wrongly; the commands print the reason and exit with 3."""


class ProblemCollector(list[str]):
    """Collects what is wrong in several places, to say it all at once."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Takes the problems of a UserError raised in the block, and goes on after it."""
        try:
            yield
        except UserError as error:
            self += error.problems

    def raise_if_any(self) -> None:
        """Raises: UserError if there is any problem."""
        if self:
            raise UserError(dict.fromkeys(self))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__
