"""Tests of sources: files become records, and errors name file and line."""

import json
import os
import pathlib
import time

import datasets
import pytest

from jaxsp.core.errors import UserError, at
from jaxsp.data import sources
from jaxsp.data.data_config import DataConfig
from tests.data import source_configs
from tests.data.source_configs import make_source
from tests.messages import assert_names, numbers

pytestmark = pytest.mark.usefixtures("own_cache")


def settings(**fields):
    return DataConfig(train=[make_source(source="x", format="text")], row_tokens=8, **fields)


def read(source, format="text", data=None, **fields):
    with at("data.train.0.source", source):
        return source_configs.read(
            make_source(source=source, format=format, **fields), data=data or settings()
        )


def problems(source, format="text", data=None, **fields):
    """Returns the problems of a source, without its field."""
    with pytest.raises(UserError) as caught:
        read(source, format, data, **fields)
    assert all(
        "\n" not in problem and problem.startswith("data.train.0.")
        for problem in caught.value.problems
    )
    return [
        problem.removeprefix(f"data.train.0.source = {source}: ")
        for problem in caught.value.problems
    ]


def write_parquet(path, columns):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path)


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    text = "eins\r\nzwei \ufeff\U0001f600\n\n"
    (tmp_path / "a.md").write_bytes(text.encode())
    (tmp_path / "b.md").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read("*.md")["text"] == [text, text]


def test_a_glob_is_sorted_and_goes_into_folders(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read("**/*.txt")["text"] == ["a/b/c.txt", "a/z.txt", "b.txt"]


def test_the_standard_library_and_the_home_folder_have_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("mine")
    assert read("~/mine.txt")["text"] == ["mine"]
    (text,) = read("{stdlib}/json/__init__.py")["text"]
    assert "JSON (JavaScript Object Notation)" in text


def test_json_lines_and_parquet_give_the_same_records(tmp_path):
    records = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "note": "x"},
        {"input_ids": [8], "labels": [8]},
        {"input_ids": [], "labels": []},
    ]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    write_parquet(
        "a.parquet",
        {name: [record[name] for record in records] for name in ("input_ids", "labels")},
    )
    for file in ("a.jsonl", "a.parquet"):
        actual = read(file, format="tokens")
        assert actual["input_ids"] == [[5, 6, 7], [8], []]
        assert actual["labels"] == [[-100, 6, 7], [8], []]
    (tmp_path / "b.json").write_text(
        '{"text": "one", "more": {"a": 1}}\n{"text": "2020-01-01", "more": 3}\n'
    )
    write_parquet("b.parquet", {"text": ["one", "2020-01-01"]})
    assert read("b.json")["text"] == read("b.parquet")["text"] == ["one", "2020-01-01"]


REFUSED = [
    # (files, source, format, parts of the message)
    ({}, "no/such.jsonl", "text", ["HuggingFaceH4/ultrachat_200k"]),
    ({}, "no/such.txt.gz", "text", ["HuggingFaceH4/ultrachat_200k"]),
    ({}, "no/**/*.txt", "text", ["*", "**"]),
    ({"a/b.txt": "x"}, "a", "text", ["folder", "a/**/*.txt"]),
    ({"a.txt": "x", "a.jsonl": "{}"}, "a.*", "text", ["a.jsonl and a.txt"]),
    ({"a.txt": "x"}, "a.txt", "tokens", ["input_ids", "format: text", ".jsonl"]),
    ({"a.txt.gz": "x"}, "a.txt.gz", "prompt_completion", ["prompt or completion", "format: text"]),
    ({"a.ZIP": "text"}, "a.ZIP", "text", ["a.ZIP", ".zip files", ".jsonl"]),
    ({"a.tar.gz": "text"}, "a.tar.gz", "text", ["a.tar.gz", ".tar.gz files", ".jsonl"]),
    (
        {"a.parquet.gz": "text"},
        "a.parquet.gz",
        "text",
        ["a.parquet.gz", ".parquet.gz files", ".jsonl"],
    ),
    ({"a.gz": "text"}, "a.gz", "text", ["a.gz", "compressed", "a.jsonl.gz"]),
]


@pytest.mark.parametrize(("made", "source", "format", "parts"), REFUSED)
def test_an_unreadable_source_is_an_error_with_a_suggestion(tmp_path, made, source, format, parts):
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (problem,) = problems(source, format)
    assert_names(problem, *parts)


def write_lines(path, records):
    path.write_text(
        "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)
    )


@pytest.mark.parametrize(
    ("format", "records", "parts"),
    [
        ("text", ['{"text": "\\ud800"}'], ["text", "Unicode"]),
        ("text", ['{"text": "a", "text": "b"}'], ["text", "twice"]),
        ("tokens", [{"text": "x"}], ["input_ids", "format: text"]),
        ("tokens", [{"input_ids": [1, 2.5]}], ["input_ids", "list", "2,147,483,648"]),
        ("tokens", [{"input_ids": [[1], [2, 3]]}], ["input_ids", "list", "2,147,483,648"]),
        ("tokens", [{"input_ids": [True]}], ["input_ids", "list", "2,147,483,648"]),
        ("tokens", [{"input_ids": [2147483648]}], ["input_ids", "list", "2,147,483,648"]),
        ("tokens", [{"input_ids": [1, None]}], ["input_ids", "list", "2,147,483,648"]),
        ("tokens", [{"input_ids": [1], "labels": [1]}], ["labels", "first record"]),
        ("text", ["{"], ["JSON"]),
    ],
)
def test_a_bad_record_is_named_with_its_line_and_problem(tmp_path, format, records, parts):
    good = {"text": "x"} if format == "text" else {"input_ids": [1]}
    write_lines(tmp_path / "a.jsonl", [good, "", *records, good])
    (problem,) = problems("a.jsonl", format)
    assert_names(problem, *parts, "data.on_bad_record=skip", start="a.jsonl, line 3: ")


@pytest.mark.parametrize("pattern", ["top/**/**/*.txt", "top/*.txt", "top/**/*.txt"])
def test_a_glob_reads_each_file_once(tmp_path, pattern):
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "b.txt").write_text("x")
    (tmp_path / "top" / "a.txt").symlink_to("b.txt")
    (tmp_path / "top" / "me").symlink_to(".")
    assert read(pattern)["place"] == ["top/a.txt"]


def test_two_sources_cannot_read_the_same_file_in_the_same_way(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "body": "y"}')
    (tmp_path / "b.jsonl").write_text('{"text": "x"}')

    def check(*given):
        records = {
            f"data.train.{number}": sources.read(
                make_source(format="text", **fields), data=settings()
            )
            for number, fields in enumerate(given)
        }
        sources.check_no_duplicates(records)

    check(
        {"source": "a.jsonl"},
        {"source": "b.jsonl"},
        {"source": "a.jsonl", "fields": {"text": "body"}},
    )
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk("saved")
    check({"source": "saved"}, {"source": "saved"})
    for other in ("./a.jsonl", "*.jsonl"):
        with pytest.raises(UserError) as caught:
            check({"source": "a.jsonl"}, {"source": other, "name": "other", "weight": 2.0})
        assert_names(
            caught.value.problems[0], "a.jsonl", "weight", start=f"data.train.1.source = {other}: "
        )


def test_skipped_records_are_entries_and_too_many_are_refused(tmp_path):
    lines = [{"text": "x"}, "{", {"text": ""}, {"text": 3}]
    write_lines(tmp_path / "a.jsonl", lines)
    records = read("a.jsonl", data=settings(on_bad_record="skip"))
    assert records["place"] == [f"a.jsonl, line {line}" for line in (1, 2, 3, 4)]
    assert records["text"] == ["x", "", "", ""]
    assert [bool(problem) for problem in records["problem"]] == [False, True, False, True]
    write_lines(tmp_path / "a.jsonl", lines * 4)
    few = settings(on_bad_record="skip", max_bad_records=7)
    *named, summary = problems("a.jsonl", data=few)
    assert len(named) == 5
    assert numbers(summary) == [7]
    assert_names(summary, "data.max_bad_records")


def test_the_fingerprint_changes_with_file_and_fields(tmp_path, monkeypatch):
    """`cp -p`, `rsync -t` and tar keep the time of a file."""

    def fingerprint(**fields):
        source = make_source(source="a.txt", format="text", **fields)
        return sources.read(source, data=settings()).fingerprint

    fingerprints = []
    for text in ("AAAA", "BBBB"):
        (tmp_path / "new.txt").write_text(text)
        os.utime(tmp_path / "new.txt", (1, 1))
        (tmp_path / "new.txt").replace(tmp_path / "a.txt")
        fingerprints += [fingerprint(), fingerprint(fields={"text": "body"})]
        time.sleep(0.02)  # file systems count time in steps of some milliseconds
    assert fingerprint(name="another") == fingerprints[2]
    assert len(set(map(str, fingerprints))) == 4


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


def fault(source, **fields):
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
    assert_names(fault("one"), "broken", "UTF8", "Copy")


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
    assert_names(fault("other"), "split", "a or b", start="data.train.0.source = other: ")
    assert_names(fault("both", split="dev"), "train or test", start="data.train.0.split = dev: ")


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
        message = fault(source, split=split)
        assert_names(message, *parts, start=f"data.train.0.split = {split}: ")
        assert f"{sources._UNKNOWN_LENGTH:,}" not in message


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
        fault("org/name", split="dev"), "train or test", start="data.train.0.split = dev: "
    )
    assert_names(fault("org/name", revision="v2"), COMMIT, start="data.train.0.revision = v2: ")
    (tmp_path / "org").mkdir()
    (tmp_path / "org/name").write_text("a file comes first")
    assert read("org/name")["text"] == ["a file comes first"]


def test_a_data_set_with_several_subsets_needs_a_subset(tmp_path):
    cached(tmp_path, "de", "en")
    assert_names(fault("org/name"), "subset", "de", "en", start="data.train.0.source = org/name: ")
    assert read("org/name", subset="en")["text"] == TRAIN["text"]
    assert_names(fault("org/name", subset="fr"), "de", "en", "subset")


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
    message = fault("org/name", revision="v2")
    assert_names(message, *parts, start="data.train.0.source = org/name: ")
    assert len(message) < 800
