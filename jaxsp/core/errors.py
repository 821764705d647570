"""User errors, one line per problem; and exit codes of the commands."""

import enum
import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of controls, of marks that reorder or hide text, of surrogates and of line
separators."""


class ExitCode(enum.IntEnum):
    """Exit codes of the commands."""

    OK = 0
    INTERNAL_ERROR = 1
    """An error in jaxsp or on the machine; the traceback is printed."""
    USER_ERROR = 2
    """Invalid config, arguments or data."""
    NEEDS_ATTENTION = 3
    """The run stopped and needs attention, for example after a NaN loss."""
    HUNG = 75
    """The process hung; the same command resumes from the checkpoint (sysexits.h: EX_TEMPFAIL)."""
    INTERRUPTED = 130


def escape(text: str, *, keep: str = "") -> str:
    r"""Escapes characters that control a terminal: `\x1b` for an escape character.

    Documents, file names and keys could otherwise forge lines, or set title and clipboard.

    Args: keep: characters to leave as they are, such as line breaks.
    """
    if text.isprintable():
        return text
    kept = "\u200c\u200d" + keep  # joiners, which Persian words and emoji need, are harmless
    return "".join(
        ascii(character)[1:-1]
        if unicodedata.category(character) in _CONTROLS and character not in kept
        else character
        for character in text
    )


class UserError(ValueError):
    """One or more problems with the user's input. Commands print one line each and exit with 2.

    Each problem has the field and its value, the rule, and a suggestion with values that work:
    `mesh.seq = 6: must divide 32 query heads. Use 1, 2, 4, 8, 16 or 32.`
    """

    def __init__(self, problems: str | Iterable[str], *, is_named: bool = False):
        """Args: is_named: True if the problems begin with a field, so that `at` adds nothing."""
        lines = [problems] if isinstance(problems, str) else [*problems]
        super().__init__(lines)
        self.problems = [_to_line(problem) for problem in lines]
        self.is_named = is_named

    def __str__(self) -> str:
        return "\n".join(self.problems)


def _to_line(problem: str) -> str:
    """A problem, safe to print, and short: the end of a long line has the suggestion."""
    line = escape(problem)
    return line if len(line) <= 10_000 else f"{line[:5000]} ... {line[-5000:]}"


@contextmanager
def at(name: str, *value: object) -> Iterator[None]:
    """Context that adds the name and value of a field to the user errors of its block.

    `with at("data.train.0.source", "notes.txt"):` names a field and its value, for whatever the
    block raises: `data.train.0.source = notes.txt: is a folder. Name a file.` A problem of
    `.split = x` is that of data.train.0.split. Without a value, the name is a place inside of what
    an outer `at` names, such as `record 3`, or what has the field of `.hidden_size = 0`.
    """
    try:
        yield
    except UserError as error:
        if not error.is_named:
            prefix = " = ".join([name, *map(str, value)])
            place = name.rpartition(".")[0] if value else name
            is_field = re.compile(r"\.\w[^/:]*( = |: )").match  # and not ../texts.jsonl
            error.problems = [
                _to_line(f"{place if is_field(problem) else f'{prefix}: '}{problem}")
                for problem in error.problems
            ]
            error.is_named = bool(value)
        raise


def format_choices(values: Iterable[object]) -> str:
    """Joins values for the end of a message: `1, 2 or 4`."""
    *words, last = [str(value) for value in values] or [""]
    return f"{', '.join(words)} or {last}" if words else last


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean x?` for a word that is close to a known one, otherwise no text."""
    near = find_nearest(word, known)
    return f" Did you mean {near}?" if near else ""


def find_nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word with the same letters, or with one typo (two from six letters on).

    None if there is no such word, or if two are equally near: a wrong suggestion is worse than
    none.
    """
    known = [*known]
    letters = {each: re.sub("[_-]", "", each).lower() for each in (word, *known)}
    limit = 1 if len(letters[word]) < 6 else 2
    typos = {each: _count_typos(letters[word], letters[each], limit) for each in known}
    fewest = min(typos.values(), default=limit + 1)
    nearest = [each for each, count in typos.items() if count == fewest]
    return nearest[0] if fewest <= limit and len(nearest) == 1 else None


def _count_typos(a: str, b: str, limit: int) -> int:
    """Counts letters added, missing, replaced, or exchanged with the next; at most `limit` + 1."""
    while a and a[0] == b[:1]:
        a = a[1:]
        b = b[1:]
    if limit == 0 or not a or not b:
        return min(len(a) + len(b), limit + 1)
    rests = [(a[1:], b), (a, b[1:]), (a[1:], b[1:])]
    if a[:2] == b[1::-1]:
        rests.append((a[2:], b[2:]))
    return 1 + min(_count_typos(*rest, limit - 1) for rest in rests)


class NeedsAttentionError(Exception):
    """Valid input, but the run cannot continue. Commands print the reason and exit with 3."""


class ProblemCollector(list[str]):
    """Collects problems from several places, to report them together."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Adds the problems of a UserError raised in the block, and continues after the block."""
        try:
            yield
        except UserError as error:
            self += error.problems

    def raise_if_any(self) -> None:
        """Raises UserError with all problems, if there are any."""
        if self:
            raise UserError(dict.fromkeys(self))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__
