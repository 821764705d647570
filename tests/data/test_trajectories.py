"""Trajectories: their numbers are those of tokens, in files and in rows."""

import json

import numpy as np
import pytest

from jaxsp.data import sources, tokenize
from jaxsp.data.data_config import DataConfig
from jaxsp.data.documents import Documents
from jaxsp.data.packing import Segments
from jaxsp.data.plain import Trajectories
from tests import messages
from tests.messages import assert_refused

RECORD = {
    "input_ids": [5, 6, 7, 8, 9],
    "loss_mask": [0, 0, 1, 0, 1],
    "advantages": 0.5,
    "old_logps": [-1.0, -2.0],
}


def convert(record, **fields):
    content = Trajectories(source="x", **fields).convert(record)
    assert {name: array.dtype.name for name, array in content.items()} == {
        **dict.fromkeys(("input_ids", "labels"), "int32"),
        **dict.fromkeys(("advantages", "old_logps", "ref_logps"), "float32"),
    }
    return {name: array.tolist() for name, array in content.items()}


def test_numbers_of_loss_tokens_or_of_all_tokens_are_read():
    expected = convert(RECORD)
    assert expected["labels"] == [-100, -100, 7, -100, 9]
    assert expected["advantages"] == [0, 0, 0.5, 0, 0.5]
    assert expected["old_logps"] == [0, 0, -1, 0, -2]
    assert np.isnan(expected["ref_logps"]).tolist() == [False, False, True, False, True]
    whole = {"old_logps": [float("nan"), 3, -1, 4, -2], "advantages": [9, 9, 0.5, 9, 0.5]}
    own = convert(RECORD | whole | {"ref_logps": [-3, -4]})
    assert own.pop("ref_logps") == [0, 0, -3, 0, -4]
    assert own == {name: expected[name] for name in own}


def test_padding_is_dropped_with_its_numbers():
    padded = {name: [0, *RECORD[name], 0] for name in ("input_ids", "loss_mask")}
    padded["attention_mask"] = [0, 1, 1, 1, 1, 1, 0]
    padded["old_logps"] = [7, 7, 7, -1, 7, -2, 7]
    assert str(convert(RECORD | padded)) == str(convert(RECORD))


def test_other_names_are_mapped():
    own = RECORD | {"old_log_probs": RECORD["old_logps"], "response_mask": RECORD["loss_mask"]}
    del own["old_logps"], own["loss_mask"]
    assert str(convert(own, fields={"old_logps": "old_log_probs"})) == str(convert(RECORD))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss_mask": None}, ["has no loss_mask"]),
        ({"old_logps": [-1.0]}, ["old_logps has 1 number", "2 tokens with a loss"]),
        ({"old_logps": -1.0}, ["old_logps has 1 number"]),
        ({"advantages": [1, 2, 3]}, ["advantages has 3 numbers"]),
        ({"advantages": float("inf")}, ["advantages", "not finite"]),
        ({"old_logps": [-1.0, None]}, ["old_logps is not a list"]),
        ({"old_logps": [-1.0, 1e39]}, ["old_logps", "not finite in float32"]),
        ({"ref_logps": [[-1.0], [-2.0]]}, ["ref_logps is not a list"]),
        ({"ref_logps": [-1.0, float("nan")]}, ["ref_logps", "not finite"]),
        ({"old_logps": None}, ["old_logps is null"]),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change, says):
    with assert_refused(*says):
        convert(RECORD | change)


def tokenized(folder, records):
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    source = Trajectories(source=str(folder / "a.jsonl"))
    data = DataConfig(train=(source,), row_tokens=8, on_bad_record="skip")
    return tokenize.tokenize_dataset(sources.read(source, data=data), tokenizer=None, vocab_size=99)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_rows_have_the_number_of_each_label(tmp_path):
    records = [RECORD, {"input_ids": [1]}, RECORD | {"advantages": 2}]
    made = tokenized(tmp_path, records)
    numbers = ("advantages", "old_logps")
    documents = Documents([made], row_tokens=8, numbers=numbers)
    row = Segments(document=np.array([1]), offset=np.array([0]), length=np.array([5]))
    part = documents.read_slice(row, 1, 8)
    assert part["labels"].tolist() == [7, -100, 9, *[-100] * 4]
    assert {name: part[name].tolist() for name in numbers} == {
        "advantages": [2, 0, 2, 0, 0, 0, 0],
        "old_logps": [-1, 0, -2, 0, 0, 0, 0],
    }


def test_the_digest_depends_on_the_numbers(tmp_path):
    digests = {tokenized(tmp_path, [RECORD | {"advantages": value}]).digest for value in (1, 2, 1)}
    assert len(digests) == 2


def test_what_an_objective_needs_is_checked(tmp_path):
    made = tokenized(tmp_path, [RECORD, RECORD | {"advantages": [1, 2]}])
    numbers = {"numbers": ("advantages", "ref_logps"), "row_tokens": 8}
    with pytest.raises(ValueError, match=messages.containing("a.jsonl, line 1", "no ref_logps")):
        Documents([made], **numbers)
    numbers = {"numbers": ("advantages",), "row_tokens": 8}
    Documents([made], **numbers)
    with pytest.raises(ValueError, match=messages.containing("a.jsonl, line 2", "advantages")):
        Documents([made], equal_numbers=("advantages",), **numbers)


@pytest.mark.parametrize("action", ["split", "truncate", "error"])
def test_trajectories_are_never_cut(action, tmp_path):
    long = {"input_ids": [*range(10)], "loss_mask": [1] * 10, "old_logps": [-1] * 10}
    made = tokenized(tmp_path, [RECORD, RECORD | long])
    options = {"row_tokens": 8, "numbers": ("advantages",)}
    with pytest.raises(ValueError, match=f"long_documents = {action}: .*line 2.*Use drop"):
        Documents([made], long_documents=action, **options)
    assert Documents([made], long_documents="drop", **options).lengths.tolist() == [5]
