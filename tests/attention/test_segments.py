"""What pieces leave to do for parts of rows, against each pair of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.kernels import segments
from tests import batches

L = 48


def rows(count=40):
    """Starts and lengths of rows of many kinds of pieces."""
    arrays = batches.ragged(num_rows=count, num_tokens=L, vocab_size=11, seed=3)
    starts, lengths = arrays["starts_BM"], arrays["lengths_BM"]
    starts[0], lengths[0] = 0, 0
    starts[1], lengths[1] = 0, 0
    lengths[1, 0] = L
    return starts, lengths


def sees(starts, lengths):
    """Which tokens each token sees: [B, L, L]."""
    piece = np.asarray(segments.segment_ids(jnp.asarray(starts), jnp.asarray(lengths), L))
    same = (piece[:, :, None] == piece[:, None, :]) & (piece >= 0)[:, :, None]
    return same & np.tri(L, dtype=bool)


def test_a_chunk_has_the_pieces_that_have_tokens_there():
    starts, lengths = segments.clip_to_chunk(
        jnp.int32([[0, 3, 9]]), jnp.int32([[3, 5, 2]]), first_token=jnp.int32(4), num_tokens=6
    )
    assert (starts.tolist(), lengths.tolist()) == ([[0, 5, 0]], [[4, 1, 0]])


@pytest.mark.parametrize("num_chunks", [2, 6, 16])
def test_a_chunk_sees_of_itself_what_its_pieces_say(num_chunks):
    starts, lengths = rows()
    size, right = L // num_chunks, sees(starts, lengths)
    for chunk in range(num_chunks):
        own = segments.clip_to_chunk(
            jnp.asarray(starts),
            jnp.asarray(lengths),
            first_token=jnp.int32(chunk * size),
            num_tokens=size,
        )
        piece = np.asarray(segments.segment_ids(*own, size))
        found = (
            (piece[:, :, None] == piece[:, None, :])
            & (piece >= 0)[:, :, None]
            & np.tri(size, dtype=bool)
        )
        part = slice(chunk * size, (chunk + 1) * size)
        assert np.array_equal(found, right[:, part, part])


@pytest.mark.parametrize("num_chunks", [2, 6, 16])
def test_between_chunks_one_rectangle_is_all_there_is(num_chunks):
    starts, lengths = rows()
    size, right, some = L // num_chunks, sees(starts, lengths), 0
    for queries in range(num_chunks):
        for keys, num_keys in [(chunk * size, size) for chunk in range(queries)] + [
            (0, queries * size)
        ] * (queries > 0):
            where = segments.find_off_diagonal_block(
                jnp.asarray(starts),
                jnp.asarray(lengths),
                first_query=jnp.int32(queries * size),
                num_queries=size,
                first_key=jnp.int32(keys),
                num_keys=num_keys,
            )
            found = (
                np.asarray(where.query_mask(size))[:, :, None]
                & np.asarray(where.key_mask(num_keys))[:, None, :]
            )
            assert np.array_equal(
                found, right[:, queries * size : (queries + 1) * size, keys : keys + num_keys]
            )
            assert bool(where.is_any()) == found.any()
            some += found.any()
    assert some


def test_a_rectangle_ends_with_the_chunk_of_queries():
    where = segments.find_off_diagonal_block(
        jnp.int32([[3]]),
        jnp.int32([[20]]),
        first_query=jnp.int32(8),
        num_queries=8,
        first_key=jnp.int32(0),
        num_keys=8,
    )
    assert [x.tolist() for x in where] == [[8], [3], [5]]


def test_the_drawn_rectangle():
    where = segments.find_off_diagonal_block(
        jnp.int32([[3]]),
        jnp.int32([[9]]),
        first_query=jnp.int32(8),
        num_queries=8,
        first_key=jnp.int32(0),
        num_keys=8,
    )
    assert [x.tolist() for x in where] == [[4], [3], [5]]
