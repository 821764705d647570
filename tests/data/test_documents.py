"""Any range of any row is the same range of the row written out in full."""

import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.data import packing, store
from jaxsp.data.documents import Documents, make_slots
from jaxsp.data.packing import Segments


def dataset(documents, labels=None):
    return store.from_columns(
        {"tokens": documents} | ({} if labels is None else {"labels": labels})
    )


def row_of(*segments):
    document, first, length = np.array(segments).reshape(-1, 3).T
    return Segments(document=document, offset=first, length=length)


def written_out(documents, labels, row, row_tokens):
    """The slow and obvious row: every token of every segment, one at a time."""
    actual = []
    for document, first, length in zip(row.document, row.offset, row.length, strict=True):
        tokens = documents[document]
        marks = labels[document] if labels else tokens
        for k in range(first, first + length):
            actual.append((tokens[k], marks[k + 1] if k + 1 < len(tokens) else -100, k))
    actual += [(0, -100, 0)] * (row_tokens - len(actual))
    return np.array(actual).T


def test_every_range_of_a_row_is_cut_from_the_whole_row():
    documents = [[7, 8, 9], [4, 5, 6, 7], list(range(20, 33))]
    labels = [[-100, 8, -100], [4, 5, -100, 7], list(range(20, 33))]
    row = row_of((0, 0, 3), (2, 4, 5), (1, 0, 4))
    for marks in (None, labels):
        stored = Documents([dataset(documents, marks)])
        whole = written_out(documents, marks, row, 14)
        for begin in range(15):
            for end in range(begin, 15):
                share = stored.read_slice(row, begin, end)
                assert np.array_equal(
                    [share["tokens"], share["labels"], share["positions"]], whole[:, begin:end]
                ), (begin, end)
                assert (
                    share["tokens"].dtype
                    == share["labels"].dtype
                    == share["positions"].dtype
                    == np.int32
                )


def test_a_document_over_three_rows_keeps_labels_and_positions():
    stored = Documents([dataset([[1, 2], list(range(100, 120))])], row_tokens=8)
    plan = packing.plan_rows(stored.segments, row_tokens=8, max_segments=4, seed=0)
    shares = []
    for row in map(plan.row, range(len(plan))):
        for document, start, length, first in zip(
            row.document, row.starts, row.length, row.offset, strict=True
        ):
            if document == 1:
                shares.append((first, stored.read_slice(row, int(start), int(start + length))))
    shares.sort(key=lambda found: found[0])
    assert [first for first, _ in shares] == [0, 8, 16]
    assert np.concatenate([share["tokens"] for _, share in shares]).tolist() == list(
        range(100, 120)
    )
    assert np.concatenate([share["labels"] for _, share in shares]).tolist() == [
        *range(101, 120),
        -100,
    ]
    assert np.concatenate([share["positions"] for _, share in shares]).tolist() == list(range(20))


def test_documents_of_several_datasets_follow_each_other_and_empty_ones_are_left_out():
    one = dataset([[1, 2], [], [3, 4, 5], [6, 6], [5]])
    other = dataset([[], [7, 8, 9]], labels=[[], [-100, -100, 9]])
    stored = Documents([one, other])
    assert stored.lengths.tolist() == [2, 3, 2, 3]
    assert [source.num_empty for source in stored.sources] == [1, 1]
    assert [source.num_without_loss for source in stored.sources] == [1, 0]
    share = stored.read_slice(row_of((0, 0, 2), (1, 0, 3), (2, 0, 2), (3, 0, 3)), 0, 10)
    assert share["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9]
    assert share["labels"].tolist() == [2, -100, 4, 5, -100, 6, -100, -100, 9, -100]


def test_loss_tokens_are_those_with_a_label():
    documents = [[7, 8, 9], [4], [], [5, 6, 7, 8]]
    labels = [[7, -100, 9], [4], [], [-100, 6, 7, -100]]
    for marks in (None, labels):
        stored = Documents([dataset(documents, marks)])
        share = stored.read_slice(row_of((0, 0, 3), (1, 0, 4)), 0, 7)
        assert (
            stored.num_loss_tokens == np.sum(share["labels"] != -100) == (5 if marks is None else 3)
        )


def test_slots_are_filled_from_the_front():
    slots = make_slots(row_of((4, 0, 3), (9, 8, 4)), 4)
    assert (slots["starts"].tolist(), slots["lengths"].tolist()) == ([0, 3, 0, 0], [3, 4, 0, 0])
    empty = make_slots(row_of(), 2)
    assert not np.any([empty["starts"], empty["lengths"]])


def test_documents_without_labels_are_an_error():
    for tokens, labels in (([[1], [2]], None), ([[1, 2]], [[1, -100]]), ([[]], None)):
        with pytest.raises(UserError, match=r"label.*-100"):
            Documents([dataset(tokens, labels)])


def test_a_document_with_more_tokens_than_positions_is_an_error(monkeypatch):
    monkeypatch.setattr("jaxsp.data.documents.POSITION_LIMIT", 4)
    assert len(Documents([dataset([[1, 2, 3, 4]])]).lengths) == 1
    with pytest.raises(
        UserError,
        match=r"\b5 tokens.*\b4\b.*data\.long_documents",
    ):
        Documents([dataset([[1, 2, 3, 4, 5]])])
