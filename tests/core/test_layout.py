"""The order of a row's tokens before it is cut into shares."""

import numpy as np
import pytest

from jaxsp.core import layout

DEGREES = (1, 2, 3, 4, 6, 8)


def test_a_drawn_row():
    assert layout.chunk_order(4) == (0, 7, 1, 6, 2, 5, 3, 4)
    assert layout.token_order(16, 4).tolist() == [
        0,
        1,
        14,
        15,
        2,
        3,
        12,
        13,
        4,
        5,
        10,
        11,
        6,
        7,
        8,
        9,
    ]
    assert layout.spans(1, 6, row_tokens=16, degree=4) == [(1, 2), (14, 16), (2, 4)]
    assert layout.spans(12, 16, row_tokens=16, degree=4) == [(6, 10)], (
        "the last device's two chunks are neighbours"
    )


@pytest.mark.parametrize("degree", DEGREES)
def test_what_is_laid_out_comes_back(degree):
    row = np.random.default_rng(0).integers(0, 100, 96)
    laid_out = row[layout.token_order(96, degree)]
    assert np.array_equal(laid_out[layout.place_of_token(96, degree)], row)


@pytest.mark.parametrize("degree", DEGREES)
def test_any_share_of_any_degree_is_its_spans(degree):
    order = layout.token_order(96, degree)
    for shares in (1, 2, 3, 4, 6, 8, 12, 96):
        for begin in range(0, 96, 96 // shares):
            spans = layout.spans(begin, begin + 96 // shares, row_tokens=96, degree=degree)
            assert [token for span in spans for token in range(*span)] == order[
                begin : begin + 96 // shares
            ].tolist()
    assert layout.spans(5, 5, row_tokens=96, degree=degree) == []


@pytest.mark.parametrize("degree", DEGREES)
def test_every_device_has_as_much_before_its_tokens(degree):
    before = layout.token_order(96, degree).reshape(degree, -1).sum(1)
    assert len(set(before.tolist())) == 1


def test_degree_1_is_the_row_as_it_is_of_any_length():
    assert layout.token_order(7, 1).tolist() == list(range(7))
    assert layout.spans(2, 5, row_tokens=7, degree=1) == [(2, 5)]
