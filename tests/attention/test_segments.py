"""Segments in chunks of rows, compared with a mask of all pairs of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.segments import Chunks
from tests import batches

L = 48


def make_rows(count=40):
    """Starts and lengths of the segments of random rows, an empty row and a row of one segment."""
    arrays = batches.make_ragged_rows(num_rows=count, num_tokens=L, vocab_size=11, seed=3)
    starts = arrays["starts_BM"]
    lengths = arrays["lengths_BM"]
    starts[:2] = 0
    lengths[:2] = 0
    lengths[1, 0] = L
    return jnp.asarray(starts), jnp.asarray(lengths)


def attention_mask(starts, lengths, num_tokens=L):
    """Keys that each query attends to: [B, L, L]."""
    segment = np.asarray(segments.segment_ids(starts, lengths, num_tokens))
    same = (segment[:, :, None] == segment[:, None, :]) & (segment >= 0)[:, :, None]
    return same & np.tri(num_tokens, dtype=bool)


@pytest.mark.parametrize("num_chunks", [2, 6, 16])
def test_parts_in_chunks_and_blocks_between_them_give_the_mask(num_chunks):
    rows = make_rows()
    size = L // num_chunks
    expected = attention_mask(*rows)
    num_blocks = 0
    for chunk in range(num_chunks):
        first_query = chunk * size
        queries = slice(first_query, first_query + size)
        first_token = jnp.int32(first_query)
        clipped = segments.clip_to_chunk(*rows, first_token=first_token, num_tokens=size)
        assert np.array_equal(attention_mask(*clipped, size), expected[:, queries, queries])
        if chunk == 0:
            continue
        earlier_chunks = [(earlier * size, size) for earlier in range(chunk)]
        for first_key, num_keys in [*earlier_chunks, (0, first_query)]:
            block = segments.find_off_diagonal_block(
                *rows,
                queries=Chunks(jnp.int32([first_query]), size),
                keys=Chunks(jnp.int32([first_key]), num_keys),
            )
            query_mask = np.asarray(block.query_mask(size))
            key_mask = np.asarray(block.key_mask(num_keys))
            actual = query_mask[:, :, None] & key_mask[:, None, :]
            keys = slice(first_key, first_key + num_keys)
            assert np.array_equal(actual, expected[:, queries, keys])
            assert bool(block.is_any()) == actual.any()
            num_blocks += actual.any()
    assert num_blocks


def test_keys_and_queries_of_several_chunks_are_counted_together():
    """Chunks of 4 tokens: keys 0 to 3 and 8 to 11, queries 12 to 15 and 20 to 23."""
    block = segments.find_off_diagonal_block(
        jnp.int32([[3], [9], [12], [4]]),
        jnp.int32([[18], [5], [9], [2]]),
        queries=Chunks(jnp.int32([12, 20]), 4),
        keys=Chunks(jnp.int32([0, 8]), 4),
    )
    assert [x.tolist() for x in block] == [[5, 2, 0, 0], [3, 5, 0, 0], [5, 3, 0, 0]]
