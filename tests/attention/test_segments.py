"""Segments in chunks of rows, compared with a mask of all pairs of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.segments import Chunks
from tests import batches

L = 48


def rows(count=40):
    """Starts and lengths of the segments of random rows, an empty row and a row of one segment."""
    arrays = batches.make_ragged_rows(num_rows=count, num_tokens=L, vocab_size=11, seed=3)
    starts = arrays["starts_BM"]
    lengths = arrays["lengths_BM"]
    starts[:2] = 0
    lengths[:2] = 0
    lengths[1, 0] = L
    return starts, lengths


def attention_mask(starts, lengths, num_tokens=L):
    """Keys that each query attends to: [B, L, L]."""
    segment = segments.segment_ids(jnp.asarray(starts), jnp.asarray(lengths), num_tokens)
    segment = np.asarray(segment)
    same = (segment[:, :, None] == segment[:, None, :]) & (segment >= 0)[:, :, None]
    return same & np.tri(num_tokens, dtype=bool)


def test_a_chunk_keeps_the_segments_that_have_tokens_in_it():
    starts, lengths = segments.clip_to_chunk(
        jnp.int32([[0, 3, 9]]), jnp.int32([[3, 5, 2]]), first_token=jnp.int32(4), num_tokens=6
    )
    assert (starts.tolist(), lengths.tolist()) == ([[0, 5, 0]], [[4, 1, 0]])


@pytest.mark.parametrize("num_chunks", [2, 6, 16])
def test_the_segments_of_a_chunk_give_the_diagonal_block_of_the_mask(num_chunks):
    starts, lengths = rows()
    size = L // num_chunks
    expected = attention_mask(starts, lengths)
    for chunk in range(num_chunks):
        chunk_starts, chunk_lengths = segments.clip_to_chunk(
            jnp.asarray(starts),
            jnp.asarray(lengths),
            first_token=jnp.int32(chunk * size),
            num_tokens=size,
        )
        actual = attention_mask(chunk_starts, chunk_lengths, size)
        tokens = slice(chunk * size, (chunk + 1) * size)
        assert np.array_equal(actual, expected[:, tokens, tokens])


@pytest.mark.parametrize("num_chunks", [2, 6, 16])
def test_one_block_per_row_gives_the_mask_between_chunks(num_chunks):
    starts, lengths = rows()
    size = L // num_chunks
    expected = attention_mask(starts, lengths)
    num_blocks = 0
    for chunk in range(1, num_chunks):
        first_query = chunk * size
        earlier_chunks = [(earlier * size, size) for earlier in range(chunk)]
        for first_key, num_keys in [*earlier_chunks, (0, first_query)]:
            block = segments.find_off_diagonal_block(
                jnp.asarray(starts),
                jnp.asarray(lengths),
                queries=Chunks(jnp.int32([first_query]), size),
                keys=Chunks(jnp.int32([first_key]), num_keys),
            )
            query_mask = np.asarray(block.query_mask(size))
            key_mask = np.asarray(block.key_mask(num_keys))
            actual = query_mask[:, :, None] & key_mask[:, None, :]
            queries = slice(first_query, first_query + size)
            keys = slice(first_key, first_key + num_keys)
            assert np.array_equal(actual, expected[:, queries, keys])
            assert bool(block.is_any()) == actual.any()
            num_blocks += actual.any()
    assert num_blocks


def test_a_block_ends_with_the_chunk_of_queries():
    block = segments.find_off_diagonal_block(
        jnp.int32([[3]]),
        jnp.int32([[20]]),
        queries=Chunks(jnp.int32([8]), 8),
        keys=Chunks(jnp.int32([0]), 8),
    )
    assert [x.tolist() for x in block] == [[8], [3], [5]]


def test_the_block_of_the_example():
    block = segments.find_off_diagonal_block(
        jnp.int32([[3]]),
        jnp.int32([[9]]),
        queries=Chunks(jnp.int32([8]), 8),
        keys=Chunks(jnp.int32([0]), 8),
    )
    assert [x.tolist() for x in block] == [[4], [3], [5]]


def test_keys_and_queries_of_several_chunks_are_counted_together():
    """Chunks of 4 tokens: keys 0 to 3 and 8 to 11, queries 12 to 15 and 20 to 23."""
    block = segments.find_off_diagonal_block(
        jnp.int32([[3], [9], [12], [4]]),
        jnp.int32([[18], [5], [9], [2]]),
        queries=Chunks(jnp.int32([12, 20]), 4),
        keys=Chunks(jnp.int32([0, 8]), 4),
    )
    assert [x.tolist() for x in block] == [[5, 2, 0, 0], [3, 5, 0, 0], [5, 3, 0, 0]]
