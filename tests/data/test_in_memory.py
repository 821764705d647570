"""Records in memory become sources of data."""

import json
import pathlib

import datasets
import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.data import in_memory
from tests import messages

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

GIVEN = [
    (["a", "b"], "text", [{"text": "a"}, {"text": "b"}]),
    ([CHAT], "messages", [{"messages": CHAT}]),
    ([{"messages": CHAT, "id": 1}], "messages", [{"messages": CHAT, "id": 1}]),
    ([[1, 2], np.array([3])], "tokens", [{"input_ids": [1, 2]}, {"input_ids": [3]}]),
    ([{"input_ids": np.arange(2)}], "tokens", [{"input_ids": [0, 1]}]),
    (
        [{"input_ids": [0, 1], "loss_mask": [0, 1], "advantages": 1.0, "old_logps": [-1.0]}],
        "trajectories",
        ...,
    ),
    ((x for x in "a"), "text", [{"text": "a"}]),
    ([{"text": "a", "input_ids": [1, 2]}], "tokens", ...),
    ([{"prompt": "a", "completion": "b"}], "prompt_completion", ...),
    ([{"prompt": "a", "completion": "b", "label": True}], "unpaired", ...),
    ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "preference", ...),
    (datasets.Dataset.from_list([{"text": "a"}]), "text", None),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(("given", "name", "records"), GIVEN, ids=lambda given: repr(given)[:30])
def test_records_are_written_and_their_format_is_found(given, name, records):
    original = list(given) if records is ... else records
    fields = {"train": [{"source": given, "weight": 2}], "row_tokens": 8}
    written = in_memory.write_sources(fields)
    (source,) = written["train"]
    assert source == {"source": source["source"], "weight": 2, "name": "train", "format": name}
    assert written["row_tokens"] == 8
    path = pathlib.Path(source["source"])
    if records is None:
        assert datasets.Dataset.from_parquet(str(path)).to_list() == given.to_list()
    else:
        assert list(map(json.loads, path.read_text().splitlines())) == original
    assert [file.name for file in path.parent.iterdir()] == [path.name], "no other file is left"


def test_equal_records_are_one_file_and_given_fields_stay():
    own = {"source": ["a"], "name": "mine", "format": "text", "fields": {"text": "x"}}
    paths = {"source": "notes/*.txt", "format": "text"}
    first, second, third = in_memory.write_sources({"eval": [{"source": ["a"]}, own, paths]})[
        "eval"
    ]
    assert first["source"] == second["source"]
    assert (first["name"], second) == ("eval", own | {"source": first["source"]})
    assert third is paths


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, ["data.train.0.source", "int"]),
        (datasets.DatasetDict(), ["data.train.0.source", "DatasetDict"]),
        (["a", {"text": object()}], ["data.train.0.source[1]", "JSON"]),
    ],
    ids=["number", "splits", "object"],
)
def test_other_values_are_refused(given, says, tmp_path):
    with pytest.raises(UserError, match="^" + messages.containing(*says)):
        in_memory.write_sources({"train": [{"source": given}]})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
