"""Sources in object stores, with a real S3-compatible server."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxsp.core.errors import UserError, at
from jaxsp.data import sources
from jaxsp.data.data_config import DataConfig
from jaxsp.system.object_store import ObjectStore
from tests.checkpoint import store_server
from tests.checkpoint.store_server import BUCKET
from tests.data import source_configs
from tests.data.source_configs import make_source
from tests.messages import assert_names

DATA = DataConfig(train=(make_source(source="unused", format="text"),), row_tokens=8)

FIELD = "data.train.0.source"


@pytest.fixture(scope="module")
def files():
    with store_server.run_server():
        yield store_server.open_filesystem()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def downloads(monkeypatch):
    """Names of downloaded objects."""
    names = []
    download = ObjectStore.download

    def count(self, paths, infos):
        names.extend(paths)
        download(self, paths, infos)

    monkeypatch.setattr(ObjectStore, "download", count)
    return names


def read(url, **fields):
    source = make_source(source=url, format="text", **fields)
    with at(FIELD, url):
        return source_configs.read(source, data=DATA)


def as_parquet(texts):
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"text": texts}), sink)
    return sink.getvalue().to_pybytes()


def as_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", as_lines(["x", "y"])),
        ("a.jsonl.gz", gzip.compress(as_lines(["x", "y"]), mtime=0)),
        ("a.json", b'[{"text": "x"}, {"text": "y"}]'),
        ("a.csv", b"text\nx\ny\n"),
        ("a.parquet", as_parquet(["x", "y"])),
    ],
)
def test_files_of_every_type_are_read_from_a_store(files, name, content):
    files.pipe_file(f"{BUCKET}/types/{name}", content)
    found = read(f"s3://{BUCKET}/types/{name}")
    assert found["text"] == ["x", "y"]
    assert found["place"][0].startswith(f"s3://{BUCKET}/types/{name}, ")


def test_a_glob_is_downloaded_once_per_version_of_each_file(files, downloads):
    for name in ("b", "a", "deep/c"):
        files.pipe_file(f"{BUCKET}/glob/{name}.txt", name.encode())
    pattern = f"s3://{BUCKET}/glob/*.txt"
    assert read(pattern)["text"] == ["a", "b"]
    assert downloads == ["glob/a.txt", "glob/b.txt"]
    assert read(f"s3://{BUCKET}/glob/**/*.txt")["text"] == ["a", "b", "deep/c"]
    assert downloads == ["glob/a.txt", "glob/b.txt", "glob/deep/c.txt"]
    files.pipe_file(f"{BUCKET}/glob/a.txt", b"A")  # with the same size
    assert read(pattern)["text"] == ["A", "b"]
    assert read(pattern, split="train[:1]")["text"] == ["A"]
    assert downloads[3:] == ["glob/a.txt"]


def test_a_damaged_download_is_downloaded_again(files, downloads, cache, capfd):
    files.pipe_file(f"{BUCKET}/damaged/a.txt", b"abc")
    url = f"s3://{BUCKET}/damaged/a.txt"
    assert read(url)["text"] == ["abc"]
    (downloaded,) = cache.rglob("a.txt")
    downloaded.write_text("abd")
    assert read(url)["text"] == ["abc"]
    assert len(downloads) == 2
    assert capfd.readouterr().err.count("IS DAMAGED") == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"s3://{BUCKET}/empty/*.txt", ["no object matches", "**"]),
        (f"s3://{BUCKET}/glob", ["no object matches", f"s3://{BUCKET}/glob/*.jsonl"]),
        ("s3://missing/a.txt", ["bucket missing"]),
        ("s3://key:secret@bucket/a.txt", ["credentials"]),
        (f"s3://{BUCKET}", ["s3://bucket/path"]),
        (f"s3://{BUCKET}/a.zip", ["no object matches"]),
    ],
)
def test_a_source_that_cannot_be_read_is_a_user_error(files, url, words):
    with pytest.raises(UserError) as caught:
        read(url)
    assert_names(caught.value.problems[0], *words, start=f"{FIELD} = {url}: ")


def test_errors_name_the_url_and_the_line(files):
    files.pipe_file(f"{BUCKET}/bad/a.jsonl", b'{"text": "x"}\n{"body": "y"}\n')
    files.pipe_file(f"{BUCKET}/bad/b.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9])
    with pytest.raises(UserError, match=rf"s3://{BUCKET}/bad/a\.jsonl, line 2: has no text"):
        read(f"s3://{BUCKET}/bad/a.jsonl")
    with pytest.raises(UserError, match=rf"s3://{BUCKET}/bad/b\.jsonl\.gz: is broken"):
        read(f"s3://{BUCKET}/bad/b.jsonl.gz")


def test_two_sources_cannot_read_the_same_object(files):
    files.pipe_file(f"{BUCKET}/same/a.txt", b"x")
    urls = (f"s3://{BUCKET}/same/a.txt", f"s3://{BUCKET}/same/*.txt")
    records = {url: sources.read(make_source(source=url, format="text"), data=DATA) for url in urls}
    with pytest.raises(UserError, match="count twice"):
        sources.check_no_duplicates(records)
