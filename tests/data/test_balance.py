"""Attention work of each device in each ring step."""

import numpy as np
import pytest

from jaxsp.core.layout import KEPT_ORDER, Layout
from jaxsp.data import loader

ROWS = {
    "one document": [(0, 96)],
    "over chunks and in one, with gaps": [(1, 9), (12, 3), (16, 50), (70, 26)],
    "one token each": [(token, 1) for token in range(96)],
    "documents of a chunk": [(6 * chunk, 6) for chunk in range(16)],
    "none": [],
}
LAYOUTS = [
    Layout(degree=degree, chunks_per_device=chunks)
    for degree, chunks in ((2, 2), (4, 2), (4, 4), (3, 8), (1, 4))
]


def count(rows, layout):
    places = np.array([place for row in rows for place in row], np.int32).reshape(-1, 2)
    row_starts = np.cumsum([0, *map(len, rows)])
    return loader.count_row_work(
        places[:, 0],
        places[:, 1],
        row_starts,
        row_tokens=96,
        layout=layout,
    )


def count_pairs(row, layout):
    """Twice the pairs before each token, and one more for itself, token by token."""
    device = layout.place_of_token(96) // (96 // layout.degree)
    work = np.zeros((layout.degree, layout.degree), int)
    for start, length in row:
        for query in range(start, start + length):
            for key in range(start, query + 1):
                step = (device[query] - device[key]) % layout.degree
                work[step, device[query]] += 1 if key == query else 2
    return work


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_work_is_the_number_of_pairs_of_tokens(layout):
    work = count(ROWS.values(), layout)
    for (name, row), row_work in zip(ROWS.items(), work, strict=True):
        expected = count_pairs(row, layout)
        if layout.keeps_order:
            expected = expected.sum(keepdims=True)
        np.testing.assert_array_equal(row_work, expected, err_msg=name)
        assert row_work.sum() == sum(length**2 for _, length in row)


def test_one_document_is_balanced_and_groups_wait_for_the_slowest():
    for layout in LAYOUTS:
        work = count([[(0, 96)]], layout)
        assert loader.compute_imbalance(work[None], has_ring_steps=True) == pytest.approx(
            1, abs=0.1
        )
    work = np.array([[[[4, 2], [1, 3]], [[1, 1], [1, 1]]]])
    for has_ring_steps, slowest in ((True, 4 + 3), (False, 5)):
        imbalance = loader.compute_imbalance(work, has_ring_steps=has_ring_steps)
        assert imbalance == pytest.approx(slowest / ((5 + 2) / 2))
    assert loader.compute_imbalance(np.zeros((1, 1, 1, 1)), has_ring_steps=True) == 1
    assert count([[(0, 3), (5, 4)]], KEPT_ORDER).tolist() == [[[25]]]
