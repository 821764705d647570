"""Damaged caches of tokens are noticed and rebuilt; nothing else is learned."""

import json
import pathlib

import numpy as np
import pytest

from jaxsp.core.errors import NeedsAttentionError, ProblemCollector, UserError
from jaxsp.data import store, tokenizers
from jaxsp.data.documents import Documents
from jaxsp.data.store import DamagedCacheError
from jaxsp.run import config_file, data_sets
from tests import batches
from tests.data.test_documents import row_of

TEXTS = [f"document {number} " + "word " * 9 * number for number in range(12)]


@pytest.fixture(autouse=True)
def cache(own_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK_IDS", 64)
    records = {
        "text": [{"text": text} for text in TEXTS],
        "tokens": [{"input_ids": list(text.encode())} for text in TEXTS],
        "prompt_completion": [{"prompt": text, "completion": text[::-1]} for text in TEXTS],
    }
    for record_format, items in records.items():
        lines = "".join(f"{json.dumps(item)}\n" for item in items)
        (tmp_path / f"{record_format}.jsonl").write_text(lines)
    return tmp_path / "cache/jaxsp"


def read_rows(record_format="text"):
    """Ids and labels of every document, as a run reads them, and again after damage."""
    fields = {
        "run": {"directory": "run", "steps": 1},
        "model": {"config": batches.SMALL_LLAMA},
        "data": {
            "train": [{"source": f"{record_format}.jsonl", "format": record_format}],
            "row_tokens": 2048,
            "num_workers": 1,
        },
        "batch": {"rows_per_step": 1},
        "optimizer": {"learning_rate": 0.1},
    }
    config = config_file.parse(fields)
    problems = ProblemCollector()
    opened = data_sets.open_sources(config, for_training=True, problems=problems)
    problems.raise_if_any()
    tokenizer = tokenizers.make_byte_tokenizer()
    train, _ = data_sets.make_data_sets(
        opened, config, tokenizer, vocab_size=300, for_training=True
    )
    try:
        rows = []
        for number, length in enumerate(train.documents.lengths.tolist()):
            part = train.documents.read_slice(row_of((number, 0, length)), 0, length)
            rows.append((part["tokens"].tolist(), part["labels"].tolist()))
        return rows
    except DamagedCacheError:
        return read_rows(record_format)  # the same command again


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


def test_a_changed_bit_of_any_token_is_noticed_when_it_is_read(cache, capfd):
    expected = read_rows()
    path = find_array(cache, "tokens")
    place = find_ids(path, expected[7][0])
    for offset in (0, 5, 4 * len(expected[7][0]) - 1):
        flip(path, place + offset)
        assert read_rows() == expected
    with pytest.raises(DamagedCacheError, match=r"IS DAMAGED.*same command") as caught:
        read_damaged(path, place)
    assert isinstance(caught.value, NeedsAttentionError)
    assert not path.exists()


def test_labels_are_checked_when_the_data_are_opened(cache, capfd):
    expected = read_rows("prompt_completion")
    path = find_array(cache, "labels")
    flip(path, path.read_bytes().rindex(np.array(expected[7][0][-9:], np.int32).tobytes()))
    capfd.readouterr()
    assert read_rows("prompt_completion") == expected
    assert capfd.readouterr().err.count("IS DAMAGED") == 1


def find_ids(path, ids):
    return path.read_bytes().index(np.array(ids, np.int32).tobytes())


def read_damaged(path, place):
    flip(path, place)
    documents = Documents([store.open_or_build(path.parent, None)])
    assert documents.read_slice(row_of((0, 0, 9)), 0, 9)["tokens"].tolist()  # another block
    documents.read_slice(row_of((7, 0, 9)), 0, 9)


def find_array(cache, name):
    (path,) = (path for path in cache.rglob(name) if path.is_file())
    return path


@pytest.mark.parametrize("record_format", ["text", "tokens"])
def test_a_damaged_file_is_made_again(cache, capfd, record_format):
    expected = read_rows(record_format)
    folder = find_array(cache, "tokens").parent
    damage = [(file.name, kind) for file in folder.iterdir() for kind in ("cut", "missing")]
    damage += [("records.arrow", "flip"), ("meta.json", "flip"), ("meta.json.crc32", "flip")]
    assert len(damage) == 13
    for name, kind in damage:
        path = folder / name
        if kind == "missing":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(path.read_bytes()[:-3])
        else:
            flip(path, path.stat().st_size // 2)
        capfd.readouterr()
        assert read_rows(record_format) == expected
        output = capfd.readouterr().err
        assert output.count("IS DAMAGED") == 1
        assert str(folder) in output


def test_a_damaged_cache_that_cannot_be_removed_is_a_user_error(cache, monkeypatch):
    read_rows()
    find_array(cache, "tokens").write_bytes(b"")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "rename", refuse)
    with pytest.raises(UserError, match=r"IS DAMAGED.*Permission.*HF_DATASETS_CACHE"):
        read_rows()
