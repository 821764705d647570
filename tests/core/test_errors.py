"""Messages: escapes of foreign text, and words that are meant."""

import pickle

import pytest

from jaxsp.core import errors
from jaxsp.core.errors import UserError, at


@pytest.mark.parametrize(
    "character",
    "\x00 \x07 \x1b \x7f \x9b \x9d \u200f \u2028 \u202e \u2066 \u061c \ufeff \r \n \udcff".split(
        " "
    ),
)
def test_characters_that_control_a_terminal_are_escaped_in_problems(character):
    (problem,) = UserError(f"a.jsonl{character}b: wrong").problems
    assert problem == f"a.jsonl{ascii(character)[1:-1]}b: wrong"
    assert problem.isprintable()


def test_other_text_stays_and_line_breaks_where_they_are_ours():
    text = "caf\u00e9 \u4e2d\u6587 \u05d0 \U0001f468\u200d\U0001f467 \u3000\xa0 \\ {'a': \"b\"}"
    assert errors.escape(text) == text
    assert errors.escape("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


def test_a_long_problem_keeps_its_begin_and_its_suggestion():
    (problem,) = UserError(f"run.steps = {'9' * 10**6}: must be small. Use 1.").problems
    assert len(problem) < 10_100
    assert problem.startswith("run.steps = 999")
    assert problem.endswith("999: must be small. Use 1.")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("Learning-Rate", "learning_rate"),
        ("laerning_rat", "learning_rate"),  # two exchanged, one missing
        ("laerning_rts", None),  # a third typo
        ("step", "steps"),
        ("stesp", "steps"),
        ("tesp", None),
        ("rung", None),  # as near to rang as to runs
        ("x" * 100_000, None),
    ],
)
def test_the_nearest_word_has_few_typos(word, nearest):
    assert errors.find_nearest(word, ["learning_rate", "steps", "rang", "runs"]) == nearest


def test_an_error_gets_the_name_of_its_field_once():
    with (
        pytest.raises(UserError) as caught,
        at("data", 1),
        at("data.train.0.source", "a.jsonl"),
        at("record 3"),
    ):
        raise UserError(["must be text.", "must be short."])
    with (
        pytest.raises(UserError, match=r"^data\.train\.0\.split = x: must be y\.$"),
        at("data.train.0.source", "a.jsonl"),
    ):
        raise UserError(".split = x: must be y.")
    with pytest.raises(UserError, match=r"^a = \.\./x: \.\./x, line 2: no\.$"), at("a", "../x"):
        raise UserError("../x, line 2: no.")
    assert pickle.loads(pickle.dumps(caught.value)).problems == [
        "data.train.0.source = a.jsonl: record 3: must be text.",
        "data.train.0.source = a.jsonl: record 3: must be short.",
    ]
