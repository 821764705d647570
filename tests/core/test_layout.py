"""The order of a row's tokens before it is cut into shards."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.core.layout import KEPT_ORDER, Layout

LAYOUTS = [
    Layout(degree=degree, chunks_per_device=chunks)
    for degree, chunks in itertools.product((1, 2, 3, 4, 6, 8), (2, 4))
] + [Layout(degree=degree, chunks_per_device=chunks) for degree, chunks in ((2, 8), (3, 16))]


def test_a_drawn_row():
    layout = Layout(degree=4, chunks_per_device=2)
    assert layout.chunk_order() == (0, 7, 1, 6, 2, 5, 3, 4)
    tokens = [[0, 1], [14, 15], [2, 3], [12, 13], [4, 5], [10, 11], [6, 7], [8, 9]]
    assert layout.token_order(16).tolist() == list(itertools.chain(*tokens))
    assert layout.spans(1, 6, row_tokens=16) == [(1, 2), (14, 16), (2, 4)]
    spans = layout.spans(12, 16, row_tokens=16)
    assert spans == [(6, 10)], "the last device's two chunks are neighbors"


def test_more_chunks_are_dealt_back_and_forth():
    layout = Layout(degree=4, chunks_per_device=4)
    assert layout.chunk_order() == (0, 7, 8, 15, 1, 6, 9, 14, 2, 5, 10, 13, 3, 4, 11, 12)
    assert layout.spans(0, 4, row_tokens=16) == [(0, 1), (7, 9), (15, 16)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_laid_out_comes_back(layout):
    row = np.random.default_rng(0).integers(0, 100, 96)
    laid_out = row[layout.token_order(96)]
    assert np.array_equal(laid_out[layout.place_of_token(96)], row)
    tokens = layout.tokens_in_places(jnp.arange(96), row_tokens=96)
    assert np.array_equal(row[tokens], laid_out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_shard_of_any_degree_is_its_spans(layout):
    order = layout.token_order(96)
    for shards in (1, 2, 3, 4, 6, 8, 12, 96):
        for begin in range(0, 96, 96 // shards):
            spans = layout.spans(begin, begin + 96 // shards, row_tokens=96)
            assert [token for span in spans for token in range(*span)] == order[
                begin : begin + 96 // shards
            ].tolist()
    assert layout.spans(5, 5, row_tokens=96) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_device_has_as_much_before_its_tokens_and_keeps_their_order(layout):
    tokens = layout.token_order(96).reshape(layout.degree, -1)
    assert len(set(tokens.sum(1).tolist())) == 1
    assert (np.diff(tokens) > 0).all()


def test_other_rows_keep_their_order_and_may_have_any_length():
    assert KEPT_ORDER.token_order(7).tolist() == list(range(7))
    assert KEPT_ORDER.spans(2, 5, row_tokens=7) == [(2, 5)]
