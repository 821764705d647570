"""Tests of file types: each gives the same records, and a truncated file is an error."""

import csv
import io
import json

import datasets
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from jaxsp.core.errors import UserError
from jaxsp.data import file_types
from tests.data.source_configs import make_source
from tests.messages import assert_names, assert_refused


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
            (None, "gzip", "zstd")
            if file_types.detect_file_type(name)[0] in file_types.COMPRESSIBLE
            else (None,)
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


def test_a_stream_cut_between_two_batches_is_an_error(tmp_path):
    whole = CONTENT["stream.arrow"]
    ends = [
        whole.index(b"\xff\xff\xff\xff", start + 1)
        for start in [whole.index(b"\xff\xff\xff\xff", 5)]
    ]
    (tmp_path / "a.arrow").write_bytes(whole[: ends[0]])
    with pytest.raises(UserError, match=r"^a\.arrow: .*broken.*row 70.*stream"):
        read("a.arrow")


BROKEN = [
    ("a.json", '[{"text": "x"}, {"text": "y"}', ["first record", "delimiter"]),
    ("a.json", '[{"text": "x"}] {"text": "y"}', ["first record", "Extra data"]),
    ("a.json", "[" * 100_000, ["first record", "maximum recursion"]),
    ("a.csv", 'text,note\nx,1\n"y,2\nz,3\n', ["line 2", "unexpected end of data"]),
    ("a.csv", 'text,note\nx,1\n"y" z,2\n', ["line 2", "',' expected after '\"'"]),
    ("a.jsonl.gz", '{"text": "x"}', ["first record", "incorrect header check"]),
    ("a.parquet", "PAR1 nonsense", ["first record"]),
    ("a.arrow", "nonsense", ["first record"]),
    ("a.arrow", "", ["first record"]),
]


@pytest.mark.parametrize("size", [5, 2**20])
@pytest.mark.parametrize(("name", "content", "parts"), BROKEN)
def test_an_error_names_the_last_record_before_the_damage(
    tmp_path, monkeypatch, name, content, parts, size
):
    monkeypatch.setattr(file_types, "_CHUNK_BYTES", size)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        read(name)
    (problem,) = caught.value.problems
    assert_names(problem, "broken", *parts, start=f"{name}: ")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.csv", "", ["first line", "empty"]),
        ("a.csv", "text,text\nx,y", ["first line", "twice"]),
        ("a.jsonl.gz", "", ["empty", "compressed"]),
        (
            "a.txt",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0",
            ["git-lfs", "git lfs pull"],
        ),
    ],
)
def test_a_file_without_the_content_of_its_type_is_an_error(tmp_path, name, content, parts):
    (tmp_path / name).write_text(content)
    with assert_refused(*parts, start=f"{name}: "):
        read(name)


@pytest.mark.parametrize(
    ("name", "content", "count", "bad"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"a": oops\n\n{"text": "y"}', 3, {"line 2": ["JSON"]}),
        ("b.jsonl", b'{"m": {"b": 1, "b": 2}}\n{"text": "y"}', 2, {"line 1": ["b", "twice"]}),
        ("b.csv", b"text,note\nx\ny,2\nz,3,4\n", 3, {"line 2": ["1", "2"], "line 4": ["3", "2"]}),
        ("c.jsonl", b"[" * 100_000 + b'\n{"text": "x"}', 2, {"line 1": ["JSON", "recursion"]}),
    ],
)
def test_an_unreadable_record_counts_and_has_a_problem(tmp_path, name, content, count, bad):
    (tmp_path / name).write_bytes(content)
    records = read(name)
    assert len(records) == count
    problems = {place.split(", ")[1]: problem for place, _, problem in records if problem}
    assert list(problems) == list(bad)
    for place, parts in bad.items():
        assert_names(problems[place], *parts)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_byte_that_is_not_utf8_is_refused_with_the_text(tmp_path, name):
    contents = {"a.jsonl": b'{"text": "\xff"}', "a.json": b'[{"text": "\xff"}]'}
    (tmp_path / name).write_bytes(contents.get(name, b"text\n\xff\n"))
    ((_, record, _),) = read(name)
    with assert_refused("text", "Unicode"):
        make_source(source="x", format="text").convert(record)


def test_invalid_utf8_in_a_table_is_damage(tmp_path):
    texts = pa.array([b"x", b"\xff", b"y"]).view(pa.string())
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), pa.schema({"text": pa.string()})) as writer:
        writer.write_batch(pa.record_batch([texts], names=["text"]))
    with assert_refused("broken", "UTF8", start="a.arrow: "):
        read("a.arrow")


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


MAP = pa.map_(pa.string(), pa.struct({"a": pa.int64(), "b": pa.int64()}))


@pytest.mark.parametrize("write", [parquet.write_table, feather.write_feather])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (MAP, [("k", {"a": 1})]),
        (pa.struct({"extra": MAP}), {"extra": [("k", None)]}),
        (pa.list_(pa.struct({"extra": MAP})), [{"extra": [("k", {"b": 2})]}, {}]),
        (pa.list_(pa.struct({"x": pa.int64()}), 2), [{"x": 1}, {}]),
    ],
    ids=["map", "struct", "list", "fixed size"],
)
def test_maps_in_tables_become_pairs(tmp_path, write, kind, value):
    """Objects lose null fields; pairs keep nulls."""
    table = pa.table({"text": ["x", "y"], "note": pa.array([value, None], kind)})
    write(table, tmp_path / ("a.parquet" if write is parquet.write_table else "a.arrow"))
    (name,) = (path.name for path in tmp_path.iterdir())
    records = [record for _, record, _ in read(name)]
    assert records == [{"text": "x", "note": value}, {"text": "y", "note": None}]


def test_a_file_of_several_arrow_streams_is_refused(tmp_path):
    """`cat` writes such files."""

    def stream(table):
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, table.schema) as writer:
            writer.write_table(table)
        return buffer.getvalue().to_pybytes()

    first = stream(pa.table({"text": ["a", "b"]}))
    second = stream(pa.table({"text": ["c"]}))
    for rest, noun in ((second, "one whole Arrow stream"), (second[:-4], "")):
        (tmp_path / "a.arrow").write_bytes(first + rest)
        with pytest.raises(UserError, match=rf"^a\.arrow: .*broken.*row 2 .*{noun}"):
            read("a.arrow")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_with_a_duplicate_of_a_selected_column_is_refused(tmp_path, name):
    table = pa.table([["a"], ["b"], [1], [2]], names=["text", "text", "other", "other"])
    if name == "a.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match=rf"^{name}: .*text.*twice"):
        read(name)
    parquet.write_table(table.select([0, 2, 3]), tmp_path / "b.parquet")
    assert [record for _, record, _ in read("b.parquet")] == [{"text": "a"}]
