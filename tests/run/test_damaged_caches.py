"""Damaged caches of tokens are noticed and rebuilt; nothing else is learned."""

import json
import pathlib

import pytest

from jaxsp.core.errors import NeedsAttentionError, ProblemCollector, UserError
from jaxsp.data import store, tokenizers
from jaxsp.data.store import DamagedCacheError
from jaxsp.run import config_file, data_sets
from tests import batches, small_runs
from tests.data.test_documents import row_of

TEXTS = [f"document {number} " + "word " * 9 * number for number in range(12)]


def read_rows(record_format="text"):
    """Ids and labels of every document, as a run reads them."""
    source = {"source": f"{record_format}.jsonl", "format": record_format}
    data = {"train": [source], "row_tokens": 2048, "num_workers": 1}
    fields = small_runs.make_fields(
        pathlib.Path(), model={"config": batches.SMALL_LLAMA}, data=data
    )
    config = config_file.parse(fields)
    opened = data_sets.open_sources(config, for_training=True, problems=ProblemCollector())
    tokenizer = tokenizers.make_byte_tokenizer()
    train, _ = data_sets.make_data_sets(
        opened, config, tokenizer, vocab_size=300, for_training=True
    )
    rows = []
    for number, length in enumerate(train.documents.lengths.tolist()):
        part = train.documents.read_slice(row_of((number, 0, length)), 0, length)
        rows.append((part["tokens"].tolist(), part["labels"].tolist()))
    return rows


@pytest.fixture(autouse=True)
def cache(own_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK_IDS", 64)
    records = {
        "text": [{"text": text} for text in TEXTS],
        "prompt_completion": [{"prompt": text, "completion": text[::-1]} for text in TEXTS],
    }
    for record_format, items in records.items():
        lines = "".join(f"{json.dumps(item)}\n" for item in items)
        (tmp_path / f"{record_format}.jsonl").write_text(lines)
    return tmp_path / "cache/jaxsp"


def list_files(cache):
    (meta,) = cache.rglob("meta.json")
    return sorted(meta.parent.iterdir())


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("record_format", ["text", "prompt_completion"])
def test_a_damaged_file_is_made_again_and_nothing_else_is_learned(cache, record_format):
    expected = read_rows(record_format)
    for path in list_files(cache):
        content = path.read_bytes()
        for damage in (
            lambda path: flip(path, int(0.4 * path.stat().st_size)),
            lambda path: flip(path, path.stat().st_size - 1),
            lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
            pathlib.Path.unlink,
        ):
            damage(path)
            try:
                assert read_rows(record_format) == expected
            except DamagedCacheError:  # while documents are read
                assert read_rows(record_format) == expected, "the same command again"
            assert path.read_bytes() == content, path.name


def test_damage_found_while_documents_are_read_ends_the_run(cache):
    read_rows()
    (path,) = (path for path in list_files(cache) if path.name == "tokens")
    flip(path, path.stat().st_size - 1)
    with pytest.raises(DamagedCacheError, match=r"IS DAMAGED.*same command") as caught:
        read_rows()
    assert isinstance(caught.value, NeedsAttentionError)
    assert not path.exists()


def test_a_damaged_cache_that_cannot_be_removed_is_a_user_error(cache, monkeypatch):
    read_rows()
    (path,) = (path for path in list_files(cache) if path.name == "meta.json")
    path.write_bytes(b"")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "rename", refuse)
    with pytest.raises(UserError, match=r"Permission.*HF_DATASETS_CACHE"):
        read_rows()
