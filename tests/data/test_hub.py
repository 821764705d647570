"""Tests of saved and hub data sets: the same records as from files, and errors in one line."""

import json
import pathlib

import datasets
import pytest

from jaxsp.core.errors import UserError, at
from jaxsp.data import sources
from jaxsp.data.data_config import DataConfig
from tests.data import source_configs
from tests.data.source_configs import make_source
from tests.messages import assert_names

COMMIT = "0123456789abcdef" * 2 + "01234567"

TRAIN, TEST = (
    datasets.Dataset.from_dict({"text": [f"{name} {row}" for row in range(5)]})
    for name in ("train", "test")
)


@pytest.fixture(autouse=True)
def _no_bars(own_cache):
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def read(source, format="text", **fields):
    one = make_source(source=source, format=format, **fields)
    with at("data.train.0.source", source):
        return source_configs.read(one, data=DataConfig(train=[one], row_tokens=8))


def problem(source, **fields):
    with pytest.raises(UserError) as raised:
        read(source, **fields)
    (line,) = raised.value.problems
    return line


def test_a_saved_data_set_is_read_in_its_order(tmp_path):
    TRAIN.save_to_disk("one")
    records = read("one")
    assert records["text"] == TRAIN["text"]
    assert records["place"] == [f"one, row {row}" for row in (1, 2, 3, 4, 5)]
    TRAIN.select([3, 1]).save_to_disk("two", num_shards=2)
    assert read("two")["text"] == ["train 3", "train 1"]


def test_a_saved_data_set_with_other_data_and_the_same_fingerprint_is_read_again(tmp_path):
    TRAIN.save_to_disk("one")
    source = make_source(source="one", format="text")
    data = DataConfig(train=[source], row_tokens=8)
    first = sources.read(source, data=data).fingerprint
    before = json.loads(pathlib.Path("one/state.json").read_text())["_fingerprint"]
    TEST.save_to_disk("one")
    state = json.loads(pathlib.Path("one/state.json").read_text())
    # as `map` leaves it, of a function that reads another file now
    pathlib.Path("one/state.json").write_text(json.dumps(state | {"_fingerprint": before}))
    assert sources.read(source, data=data).fingerprint != first


def test_a_damaged_saved_data_set_is_refused(tmp_path):
    datasets.Dataset.from_list([{"text": "a text"}] * 9).save_to_disk("one")
    (path,) = pathlib.Path("one").glob("*.arrow")
    path.write_bytes(path.read_bytes().replace(b"a text", b"a \xffext"))
    assert_names(problem("one"), "broken", "UTF8", "Copy")


def test_the_configured_split_is_read_by_default_train(tmp_path):
    datasets.DatasetDict(train=TRAIN, test=TEST).save_to_disk("both")
    datasets.DatasetDict(test=TEST).save_to_disk("single")
    datasets.DatasetDict(a=TRAIN, b=TEST).save_to_disk("other")
    assert read("both")["text"] == TRAIN["text"]
    assert (
        read("both", split="test")["text"]
        == read("single")["text"]
        == read("other", split="b")["text"]
        == TEST["text"]
    )
    assert_names(problem("other"), "split", "a or b", start="data.train.0.source = other: ")
    assert_names(problem("both", split="dev"), "train or test", start="data.train.0.split = dev: ")


@pytest.mark.parametrize(
    ("split", "indices"),
    [
        ("train[:2]", [0, 1]),
        ("train[2:]", [2, 3, 4]),
        ("train[:50%]", [0, 1]),
        ("train[50%:]", [2, 3, 4]),
        ("train[-1:]", [4]),
        ("train[1:3]+train[4:5]", [1, 2, 4]),
        ("train[3:100]", [3, 4]),
    ],
)
def test_a_part_of_a_split_is_the_same_for_every_kind_of_source(tmp_path, split, indices):
    """`datasets` itself is the oracle of the rows: 50% of 5 is 2."""
    TRAIN.save_to_disk("one")
    datasets.DatasetDict(train=TRAIN, test=TEST).save_to_disk("both")
    TRAIN.to_json("file.jsonl")
    assert datasets.load_dataset("json", data_files="file.jsonl", split=split)["text"] == [
        TRAIN["text"][row] for row in indices
    ]
    for source in ("one", "both", "file.jsonl"):
        assert read(source, split=split)["text"] == [TRAIN["text"][row] for row in indices], source
    assert [place.rpartition(" ")[2] for place in read("file.jsonl", split=split)["place"]] == [
        str(row + 1) for row in indices
    ]
    assert read("both", split=split)["place"][0] == f"both ({split}), row 1"
    assert read("file.jsonl")["text"] == TRAIN["text"], "the whole is cached apart from its parts"


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        ("train[:95", ["train[:95%]", "train[100:200]"]),
        ("train[:200%]", ["train[:95%]", "train[100:200]"]),
        ("train[7:9]", ["train", "5", "train[:95%]"]),
        ("train[3:2]", ["record", "train[:95%]"]),
        ("train[:5%](pct1_dropremainder)", ["rounding on a split with less than 100"]),
        ("dev[:5]", ["split", "train"]),
    ],
)
def test_an_empty_or_unknown_part_of_a_split_is_refused(tmp_path, split, parts):
    TRAIN.save_to_disk("one")
    TRAIN.to_json("file.jsonl")
    for source in ("one", "file.jsonl"):
        message = problem(source, split=split)
        assert_names(message, *parts, start=f"data.train.0.split = {split}: ")
        assert f"{sources._UNKNOWN_LENGTH:,}" not in message


def test_messages_survive_save_to_disk(tmp_path):
    calls = [
        {"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, {"b": "x"})
    ]
    messages = [
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        for call in calls
    ]
    datasets.Dataset.from_dict(
        {"messages": messages, "id": [1, 2]}, on_mixed_types="use_json"
    ).save_to_disk("one")
    assert [
        json.loads(record)["messages"] for record in read("one", "messages")["record"]
    ] == messages


def cached(tmp_path: pathlib.Path, *subsets: str) -> None:
    """Writes org/name as `datasets` caches it: a folder for each subset, named after the commit."""
    for subset in subsets:
        files = {}
        for split, content in (("train", TRAIN), ("test", TEST)):
            files[split] = str(tmp_path / f"{split}.parquet")
            content.to_parquet(files[split])
        builder = datasets.load_dataset_builder(
            "parquet", data_files=files, cache_dir=str(tmp_path / "made" / subset)
        )
        builder.download_and_prepare()
        folder = tmp_path / f"cache/org___name/{subset}/0.0.0/{COMMIT}"
        folder.parent.mkdir(parents=True)
        result = pathlib.Path(builder.cache_dir).rename(folder)
        for path in result.glob("parquet-*.arrow"):
            path.rename(result / path.name.replace("parquet-", "name-"))
        info = (
            (result / "dataset_info.json")
            .read_text()
            .replace('"dataset_name": "parquet"', '"dataset_name": "name"')
        )
        (result / "dataset_info.json").write_text(
            info.replace('"config_name": "default"', f'"config_name": "{subset}"')
        )


def test_a_file_has_priority_over_a_hub_data_set_with_its_name(tmp_path):
    cached(tmp_path, "default")
    assert read("org/name")["text"] == TRAIN["text"]
    records = read("org/name", split="test[:1]+train[4:]")
    assert records["text"] == [TEST["text"][0], TRAIN["text"][4]]
    records = read("org/name", split="test", revision=COMMIT)
    assert (records["text"], records["place"][0]) == (TEST["text"], "org/name, row 1")
    assert_names(
        problem("org/name", split="dev"), "train or test", start="data.train.0.split = dev: "
    )
    assert_names(problem("org/name", revision="v2"), COMMIT, start="data.train.0.revision = v2: ")
    (tmp_path / "org").mkdir()
    (tmp_path / "org/name").write_text("a file comes first")
    assert read("org/name")["text"] == ["a file comes first"]


def test_a_data_set_with_several_subsets_needs_a_subset(tmp_path):
    cached(tmp_path, "de", "en")
    assert_names(
        problem("org/name"), "subset", "de", "en", start="data.train.0.source = org/name: "
    )
    assert read("org/name", subset="en")["text"] == TRAIN["text"]
    assert_names(problem("org/name", subset="fr"), "de", "en", "subset")


def generation_error():
    error = datasets.exceptions.DatasetGenerationError(
        "An error occurred while generating the dataset"
    )
    error.__cause__ = ValueError("Not a parquet file\n" + "x" * 10_000)
    return error


NOT_FOUND = datasets.exceptions.DatasetNotFoundError


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (NOT_FOUND("Dataset 'org/name' is a gated dataset on the Hub."), ["gated", "hf auth"]),
        (ConnectionError("Couldn't reach 'org/name' on the Hub"), ["no such file", "reach"]),
        (generation_error(), ["Not a parquet file", "hf download org/name"]),
        (OSError(28, "No space left on device"), ["No space left on device"]),
    ],
)
def test_a_failure_of_the_hub_is_one_line_with_a_suggestion(monkeypatch, error, parts):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    message = problem("org/name", revision="v2")
    assert_names(message, *parts, start="data.train.0.source = org/name: ")
    assert len(message) < 800
