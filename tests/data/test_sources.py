"""Files become records; whatever cannot be used is named with its file and line."""

import concurrent.futures
import json
import os
import threading
import time

import datasets
import pytest

from jaxsp.core import config, errors, processes
from jaxsp.data import sources


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def read(source, format="text"):
    return sources.read(config.Source(source=source, format=format), field="data.train.0.source")


def write_parquet(path, columns):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path)


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    text = "\ufeffeins\r\nzwei \U0001f600\n\n"
    (tmp_path / "a.md").write_bytes(text.encode())
    assert read("a.md")["text"] == [text]


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
    write_parquet("a.parquet", {name: [record[name] for record in records] for name in ("input_ids", "labels")})
    for file in ("a.jsonl", "a.parquet"):
        found = read(file, format="tokens")
        assert found["input_ids"] == [[5, 6, 7], [8], []]
        assert found["labels"] == [[-100, 6, 7], [8], []]
    (tmp_path / "b.json").write_text('{"text": "one", "more": {"a": 1}}\n{"text": "2020-01-01", "more": 3}\n')
    write_parquet("b.parquet", {"text": ["one", "2020-01-01"]})
    assert read("b.json")["text"] == read("b.parquet")["text"] == ["one", "2020-01-01"]


def test_long_and_many_records_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BATCH", 100)
    texts = ["x" * (number % 70) + str(number) for number in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = read("a.jsonl")
    assert found["text"] == texts
    assert found.data.column("text").num_chunks > 5


def test_a_source_is_read_once_and_again_when_it_changes(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("one")
    first = read("a.txt")
    with monkeypatch.context() as broken:
        broken.setattr(sources, "_write", None)
        assert read("a.txt")["text"] == ["one"]
        assert read("a.txt")._fingerprint == first._fingerprint
    file.write_text("another")
    assert read("a.txt")["text"] == ["another"]


def test_of_several_that_want_a_source_one_reads_it(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    write, begun = sources._write, []

    def slow(*arguments):
        begun.append(arguments)
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(sources, "_write", slow)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(read, ["a.txt"] * 4):
            assert found["text"] == ["one"]
    assert len(begun) == 1


@pytest.mark.parametrize("comes", [True, False])
def test_process_0_reads_first_where_it_comes(tmp_path, monkeypatch, comes):
    cached, order = tmp_path / "records.arrow", []
    monkeypatch.setattr(sources, "_FIRST_S", 10.0 if comes else 0.3)
    here = threading.local()

    def make(index):
        here.process = processes.Process(index=index, num_processes=2)
        with sources.made_once(cached):
            order.append(index)

    monkeypatch.setattr(sources.processes, "here", lambda: here.process)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        other = pool.submit(make, 1)
        if comes:
            time.sleep(0.2)
            pool.submit(make, 0).result(5)
        other.result(5)
    assert order == ([0, 1] if comes else [1])


def test_a_cache_that_is_only_read_needs_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever may do everything finds no folder that cannot be written
    with sources.made_once(tmp_path / "records.arrow"):
        assert not list(tmp_path.glob("*.lock"))


BAD = [
    # (files, source, format, what the message must say)
    ({}, "no.txt", "text", ["no such file", "Give a file"]),
    ({}, "no/**/*.txt", "text", ["no file matches"]),
    ({"a/b.txt": "x"}, "a", "text", ["is a folder", "a/**/*.jsonl"]),
    ({"a.txt": "x", "a.jsonl": "{}"}, "a.*", "text", ["several kinds", "a.jsonl", "a.txt"]),
    ({"a.txt": "x"}, "a.txt", "tokens", ["plain text holds no input_ids"]),
    ({"a.txt": ""}, "a.txt", "text", ["no record with text"]),
    ({"a.jsonl": "\n"}, "a.jsonl", "text", ["no record with text"]),
    ({"a.jsonl": '{"input_ids": []}'}, "a.jsonl", "tokens", ["no record with input_ids"]),
    ({"a.txt": b"\xff\xfe\x00"}, "a.txt", "text", ["a.txt", "not UTF-8"]),
    ({"a.jsonl": '{"text": "x"}\n\n{"text": "y"'}, "a.jsonl", "text", ["a.jsonl, line 3", "not JSON"]),
    ({"a.jsonl": b'{"text": "x"}\n{"text": "\xff"}'}, "a.jsonl", "text", ["a.jsonl, line 2", "not JSON"]),
    ({"a.jsonl": '["x"]'}, "a.jsonl", "text", ["a.jsonl, line 1", "list, not a record"]),
    ({"a.jsonl": '{"text": "x"}\n{"body": "y"}'}, "a.jsonl", "text", ["a.jsonl, line 2", "has no text; it has body"]),
    ({"a.jsonl": '{"text": null}'}, "a.jsonl", "text", ["a.jsonl, line 1", "has no text"]),
    ({"a.jsonl": '{"text": "x"}\n{"text": 7}'}, "a.jsonl", "text", ["a.jsonl, line 2", "text is a int"]),
    ({"a.jsonl": '{"text": "\\ud800"}'}, "a.jsonl", "text", ["a.jsonl, line 1", "not Unicode"]),
    ({"a.jsonl": '{"text": "x"}'}, "a.jsonl", "tokens", ["a.jsonl, line 1", "has no input_ids; it has text"]),
    ({"a.jsonl": '{"input_ids": [1]}\n{"input_ids": "1 2"}'}, "a.jsonl", "tokens", ["line 2: input_ids is not a list"]),
    ({"a.jsonl": '{"input_ids": [1, 2.5]}'}, "a.jsonl", "tokens", ["line 1: input_ids is not a list"]),
    ({"a.jsonl": '{"input_ids": [[1], [2, 3]]}'}, "a.jsonl", "tokens", ["line 1: input_ids is not a list"]),
    ({"a.jsonl": '{"input_ids": [true]}'}, "a.jsonl", "tokens", ["line 1: input_ids is not a list"]),
    ({"a.jsonl": '{"input_ids": [2147483648]}'}, "a.jsonl", "tokens", ["line 1: input_ids is not a list"]),
    (
        {"a.jsonl": '{"input_ids": [1, 2], "labels": [1, 2]}\n{"input_ids": [1, 2], "labels": [1]}'},
        "a.jsonl",
        "tokens",
        ["line 2", "1 labels for 2 input_ids"],
    ),
    (
        {"a.jsonl": '{"input_ids": [1], "labels": [1]}\n{"input_ids": [1, 2]}'},
        "a.jsonl",
        "tokens",
        ["line 2", "has no labels"],
    ),
    (
        {"a.jsonl": '{"input_ids": [1]}\n{"input_ids": [1], "labels": [1]}'},
        "a.jsonl",
        "tokens",
        ["line 2", "has labels", "first record has none"],
    ),
    ({"a.CSV": "text"}, "a.CSV", "text", ["a.CSV: .csv files are not read"]),
    ({"a.jsonl.gz": b"x"}, "a.jsonl.gz", "text", [".gz files are not read"]),
    ({"a.parquet": b"PAR1 nonsense"}, "a.parquet", "text", ["a.parquet", "not parquet"]),
]


def test_the_same_name_in_another_folder_is_another_file(tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.TXT").write_text(folder)
        os.utime(tmp_path / folder / "a.TXT", (1, 1))  # as archives and containers do
        monkeypatch.chdir(tmp_path / folder)
        assert read("a.TXT")["text"] == [folder]


def test_json_lines_have_several_names(tmp_path):
    for name in ("a.JSONL", "b.ndjson"):
        (tmp_path / name).write_text('{"text": "x"}')
        assert read(name)["text"] == ["x"]


@pytest.mark.parametrize(("files", "source", "format", "says"), BAD)
def test_a_bad_source_is_named_with_its_place(tmp_path, files, source, format, says):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(errors.UserError) as caught:
        read(source, format)
    (problem,) = caught.value.problems
    assert problem.startswith(f"data.train.0.source = {source}: ")
    for words in says:
        assert words in problem
    assert not list((tmp_path / "cache").rglob("*.arrow")), "half a file would be taken for a whole one"


@pytest.mark.parametrize(
    ("columns", "format", "says"),
    [
        ({"text": ["x", None]}, "text", "a.parquet, record 2: has no text"),
        ({"text": [1, 2]}, "text", "a.parquet, record 1: text is a int"),
        ({"body": ["x"]}, "text", "a.parquet, record 1: has no text"),
        ({"input_ids": [[1, 2], [3, None]]}, "tokens", "a.parquet, record 2: input_ids is not a list"),
        ({"input_ids": [[1.5]]}, "tokens", "a.parquet, record 1: input_ids is not a list"),
        ({"input_ids": [[1, 2]], "labels": [[1]]}, "tokens", "a.parquet, record 1: 1 labels for 2 input_ids"),
    ],
)
def test_a_bad_parquet_record_is_named(columns, format, says):
    write_parquet("a.parquet", columns)
    with pytest.raises(errors.UserError, match=says):
        read("a.parquet", format)
