"""Damaged caches of tokens are noticed and rebuilt; nothing else is learned."""

import json
import pathlib

import numpy as np
import pytest

from jaxsp.core.errors import NeedsAttentionError, ProblemCollector, UserError
from jaxsp.data import store as token_cache
from jaxsp.data import tokenizers
from jaxsp.data.documents import Documents
from jaxsp.data.store import DamagedCacheError
from jaxsp.run import config_file, data_sets
from tests import batches
from tests.data.test_row_reader import row_of

TEXTS = [f"document {number} " + "word " * 9 * number for number in range(12)]


@pytest.fixture(autouse=True)
def cache(own_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "BLOCK_IDS", 64)
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
    (path,) = cache.rglob("*.arrow")
    place = find_ids(path, expected[7][0])
    for offset in (0, 5, 4 * len(expected[7][0]) - 1):
        flip(path, place + offset)
        assert read_rows() == expected
    with pytest.raises(DamagedCacheError, match=r"\.arrow .*same command") as caught:
        read_damaged(path, place)
    assert isinstance(caught.value, NeedsAttentionError)
    assert not path.exists()


def test_labels_are_checked_when_the_data_are_opened(cache, capfd):
    expected = read_rows("prompt_completion")
    (path,) = cache.rglob("*.arrow")
    stored = expected[7][0]
    flip(path, path.read_bytes().rindex(np.array(stored[-9:], np.int32).tobytes()))
    capfd.readouterr()
    assert read_rows("prompt_completion") == expected
    assert capfd.readouterr().err.count("IS DAMAGED") == 1


def find_ids(path, ids):
    return path.read_bytes().index(np.array(ids, np.int32).tobytes())


def read_damaged(path, place):
    flip(path, place)
    dataset, stats = token_cache.open_file(path)
    documents = Documents([dataset], stats=[stats])
    assert documents.read_slice(row_of((0, 0, 9)), 0, 9)["tokens"].tolist()  # another block
    documents.read_slice(row_of((7, 0, 9)), 0, 9)


@pytest.mark.parametrize("record_format", ["text", "tokens"])
def test_a_damaged_file_is_made_again(cache, capfd, record_format):
    expected = read_rows(record_format)
    (path,) = cache.rglob("*.arrow")
    lengths = np.cumsum([0, *(len(tokens) for tokens, _ in expected)])
    size = path.stat().st_size
    place_of_lengths = path.read_bytes().index(lengths[:9].tobytes()) + 8
    for place in (place_of_lengths, size - 200, size - 1, None):  # also statistics, and checksum
        if place is None:
            path.write_bytes(path.read_bytes()[: int(0.7 * size)])
        else:
            flip(path, place)
        capfd.readouterr()
        assert read_rows(record_format) == expected
        output = capfd.readouterr().err
        assert output.count("IS DAMAGED") == 1
        assert str(path) in output


def test_a_damaged_cache_that_cannot_be_removed_is_a_user_error(cache, monkeypatch):
    read_rows()
    (path,) = cache.rglob("*.arrow")
    path.write_bytes(b"")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "unlink", refuse)
    with pytest.raises(UserError, match=r"\.arrow.*Permission.*HF_DATASETS_CACHE"):
        read_rows()
