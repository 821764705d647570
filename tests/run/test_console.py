"""Labeled lines in a file, in a log and on terminals."""

import io

import pytest
import rich.console

from jaxsp.run import console as output

COMMAND = f"jaxsp export {'folder/' * 15}run hf"
WORDS = [f"word{number}" for number in range(40)]
PAIRS = [("training", " ".join(WORDS)), ("", "a second line"), ("next", COMMAND)]


def print_pairs(*, columns, is_terminal):
    file = io.StringIO()
    console = rich.console.Console(
        file=file, width=columns, force_terminal=is_terminal, color_system=None
    )
    output.print_pairs(console, PAIRS)
    return file.getvalue()


@pytest.mark.parametrize("columns", [1, 300])
def test_a_log_has_the_lines_of_the_file(columns):
    assert print_pairs(columns=columns, is_terminal=False) == output.format_pairs(PAIRS)


@pytest.mark.parametrize(("columns", "limit"), [(1, 17), (40, 40), (300, 100)])
def test_labeled_lines_are_wrapped_at_words_except_commands(columns, limit):
    lines = print_pairs(columns=columns, is_terminal=True).splitlines()
    assert lines[-1] == f"next       {COMMAND}"
    texts = [line[output.LABEL_COLUMNS + 1 :] for line in lines[:-1]]
    assert " ".join(texts).split() == [*WORDS, "a", "second", "line"]
    assert max(map(len, lines[:-1])) <= limit
    labels = [line[: output.LABEL_COLUMNS].strip() for line in lines[:-1]]
    assert labels == ["training", *[""] * (len(labels) - 1)]


def test_other_lines_are_wrapped_at_words_on_a_terminal_only():
    file = io.StringIO()
    for is_terminal in (True, False):
        console = rich.console.Console(
            file=file, width=40, force_terminal=is_terminal, color_system=None
        )
        output.print_line(console, " ".join(WORDS))
    *wrapped, whole = file.getvalue().splitlines()
    assert whole == " ".join(WORDS)
    assert " ".join(wrapped).split() == WORDS
