"""Tests of file types: each gives the same records, and a truncated file is an error."""

import csv
import io
import json

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxsp.core.errors import UserError
from jaxsp.data.ingest import file_types
from tests.messages import assert_names


def select_text(names):
    return [name for name in names if name in ("text", "note")] if "text" in names else []


RECORDS = [
    {
        "text": f'{number}\u00e4\u4e2d\U0001f600 "quoted", [{{}}]\r\nnew\tline\\'
        + "x" * (number % 50),
        "note": "n" * number,
    }
    for number in range(1, 301)
]
"""Records with characters that file types must escape."""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def compressed(content: bytes, codec: str | None) -> bytes:
    if codec is None:
        return content
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def as_csv(delimiter: str) -> bytes:
    lines = io.StringIO()
    table = csv.DictWriter(lines, ["text", "note"], delimiter=delimiter)
    table.writeheader()
    table.writerows(RECORDS)
    return lines.getvalue().encode()


def as_arrow(new) -> bytes:
    columns = {name: [record[name] for record in RECORDS] for name in ("text", "note")}
    table = pa.table(columns)
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return sink.getvalue()


def as_parquet() -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(RECORDS), sink, row_group_size=70)
    return sink.getvalue()


LINES = "\n".join(
    json.dumps(record, ensure_ascii=number % 2 == 0) for number, record in enumerate(RECORDS)
).encode()

CONTENT = {
    "a.jsonl": LINES,
    "a.ndjson": LINES.replace(b"\n", b"\n\n  \r\n") + b"\n",
    "lines.json": b"\xef\xbb\xbf" + LINES,
    "array.json": json.dumps(RECORDS).encode(),
    "indented.JSON": b"\xef\xbb\xbf\n"
    + json.dumps(RECORDS, indent=2, ensure_ascii=False).encode()
    + b"\n",
    "a.csv": as_csv(","),
    "marked.csv": b"\xef\xbb\xbf" + as_csv(","),
    "a.tsv": as_csv("\t"),
    "a.parquet": as_parquet(),
    "file.arrow": as_arrow(pa.ipc.new_file),
    "stream.arrow": as_arrow(pa.ipc.new_stream),
}


def read(path, columns=select_text):
    return list(file_types.read_file(str(path), columns))


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        (name, codec)
        for name in CONTENT
        for codec in (
            (None, "gzip", "zstd") if file_types.detect_file_type(name).is_compressible else (None,)
        )
    ],
)
@pytest.mark.parametrize("size", [1, 100, 2**20])
def test_every_file_type_gives_every_record(tmp_path, monkeypatch, name, codec, size):
    monkeypatch.setattr(file_types, "_CHUNK_BYTES", size)
    monkeypatch.setattr(file_types, "_BATCH_BYTES", size)
    path = tmp_path / (name + {None: "", "gzip": ".gz", "zstd": ".ZST"}[codec])
    path.write_bytes(compressed(CONTENT[name], codec))
    records = read(path)
    assert [record for _, record, _ in records] == RECORDS
    assert {problem for _, _, problem in records} == {None}
    assert len({place for place, _, _ in records}) == len(RECORDS)


def test_places_are_lines_rows_or_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
    (tmp_path / "a.json").write_text('[{"text": "x"},\n{"text": "y"}]')
    (tmp_path / "a.csv").write_text('text\n"x\ny"\n\nz\n')
    (tmp_path / "a.txt").write_text("x")
    parquet.write_table(pa.table({"text": ["x", "y"]}), tmp_path / "a.parquet")
    for name, places in {
        "a.jsonl": ["a.jsonl, line 1", "a.jsonl, line 3"],
        "a.json": ["a.json, record 1", "a.json, record 2"],
        "a.csv": ["a.csv, line 2", "a.csv, line 5"],
        "a.txt": ["a.txt"],
        "a.parquet": ["a.parquet, row 1", "a.parquet, row 2"],
    }.items():
        assert [place for place, _, _ in read(name)] == places


@pytest.mark.parametrize("cut", [1, 4, 8, 9, 0.5, 0.99])
@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl.gz",
        "a.csv.gz",
        "a.txt.gz",
        "a.jsonl.zst",
        "a.json.zst",
        "a.parquet",
        "file.arrow",
        "stream.arrow",
    ],
)
def test_a_truncated_file_is_an_error(tmp_path, name, cut):
    codec = {".gz": "gzip", ".zst": "zstd"}.get(name[name.rindex(".") :])
    inner = {"a.txt.gz": "a.jsonl", "a.json.zst": "array.json"}.get(
        name, name.removesuffix(".gz").removesuffix(".zst")
    )
    content = compressed(CONTENT[inner], codec)
    (tmp_path / name).write_bytes(content[: -int(cut if cut >= 1 else cut * len(content))])
    with pytest.raises(UserError, match=rf"^{name}: .*broken"):
        read(name)


@pytest.mark.parametrize(
    ("name", "content", "count", "bad"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\xff"}\n{"text": "y"}',
            3,
            {"a.jsonl, line 2": ["UTF-8"]},
        ),
        (
            "a.json",
            b'[{"text": "x"}, {"text": "\xff"}, 1234, 5]',
            4,
            {"a.json, record 2": ["UTF-8"]},
        ),
        (
            "b.json",
            b'[{"text": "x"}, {"text": "a", "text": "b"}, {"text": ""}]',
            3,
            {"b.json, record 2": ["text", "twice"]},
        ),
        ("a.txt", b"\xff\xfex\0", 1, {"a.txt": ["UTF-8"]}),
        ("a.csv", b"text,note\nx,\xff\ny,2\n", 2, {"a.csv, line 2": ["UTF-8"]}),
        (
            "b.csv",
            b"text,note\nx\ny,2\nz,3,4\n",
            3,
            {"b.csv, line 2": ["1", "2"], "b.csv, line 4": ["3", "2"]},
        ),
        (
            "c.jsonl",
            b"[" * 100_000 + b'\n{"text": "x"}',
            2,
            {"c.jsonl, line 1": ["JSON", "maximum recursion"]},
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 2**20])
def test_an_unreadable_record_counts_and_has_a_problem(
    tmp_path, monkeypatch, name, content, count, bad, size
):
    monkeypatch.setattr(file_types, "_CHUNK_BYTES", size)
    (tmp_path / name).write_bytes(content)
    records = read(name)
    assert len(records) == count
    problems = {place: problem for place, _, problem in records if problem}
    assert list(problems) == list(bad)
    for place, parts in bad.items():
        assert_names(problems[place], *parts)


def test_json_in_tables_is_parsed(tmp_path):
    messages = [
        [{"role": "a", "arguments": {"x": 1}}],
        [{"role": "b", "arguments": {"x": ["y", None]}}],
        None,
    ]
    dataset = datasets.Dataset.from_dict({"messages": messages}, on_mixed_types="use_json")
    dataset.data.validate(full=True)
    parquet.write_table(dataset.data.table, tmp_path / "a.parquet")
    records = [record["messages"] for _, record, _ in read("a.parquet", lambda names: names)]
    assert records == messages
