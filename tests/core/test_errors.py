"""Messages: escapes of foreign text, and words that are meant."""

import pickle

import pytest

from jaxsp.core import errors
from jaxsp.core.errors import UserError, at


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
