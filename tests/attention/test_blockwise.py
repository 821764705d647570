"""The blockwise kernel: agreement with the oracle, blocks that it never reads, and its memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels import blockwise
from jaxsp.attention.kernels.kernel import ScoreConfig
from tests import batches, tolerances
from tests.attention import oracle

L = 100
"""Tokens of a row: one of the block sizes below divides it."""

ROWS = [
    [(0, 30), (30, 34), (64, 36)],  # full
    [(0, 5), (5, 90)],  # padding at the end
    [(0, 8), (8, 8), (16, 1), (17, 33)],  # segments that end with blocks, one of one token
    [(0, 100)],
    [],
    [(12, 20), (40, 20), (60, 1)],  # padding everywhere
]

SHAPES = [
    (8, 2, 16, 512, None),
    (8, 1, 16, 100, None),
    (6, 3, 16, 16, None),
    (4, 2, 64, 8, 2),
    (4, 2, 96, 8, 10),  # a block's first token attends to one token of the second block before
    # Shorter than some segments, longer than others; not a multiple of a block
    (2, 1, 192, 16, 20),
    (2, 2, 256, 100, 33),
    (2, 1, 264, 40, None),  # larger heads have blocks of their own size
]
"""Query heads, K/V heads, head size, tokens of a block, window."""


@pytest.mark.parametrize(("h", "g", "K", "block", "window"), SHAPES)
def test_blockwise_equals_the_oracle(h, g, K, block, window, monkeypatch):
    name = "LARGE_HEAD_BLOCK_TOKENS" if K > 256 else "BLOCK_TOKENS"
    monkeypatch.setattr(blockwise, name, block)
    inputs = [*oracle.draw(len(ROWS), L, h, g, K), *oracle.make_slots(ROWS, 4)]
    score = ScoreConfig(window=window)
    attends = make_attend(kernel="blockwise", layer_scores=[score]), oracle.make_attend(score)
    actual, expected = (oracle.differentiate(attend)(*inputs) for attend in attends)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.KERNEL, name


def blocks_read(length, window):
    """Number of blocks of keys that the blocks of queries of one long segment visit together."""
    x = jnp.zeros((length, 1, 8))
    segment = jnp.zeros(length, jnp.int32)
    first = np.asarray(blockwise.make_segment_row(x, x, x, segment, window=window).first_block)
    return int((np.arange(len(first)) + 1 - first).sum())


def test_blocks_read_grow_with_the_row_with_a_window_and_with_its_square_without():
    for tokens in (4096, 8192, 16384):
        n = tokens // blockwise.BLOCK_TOKENS
        assert blocks_read(tokens, tokens) == n * (n + 1) // 2
        # a block's first token attends to one token of the fifth block before
        window = 4 * blockwise.BLOCK_TOKENS + 2
        assert blocks_read(tokens, window) == 6 * n - (5 + 4 + 3 + 2 + 1)


@pytest.mark.parametrize(
    ("poison", "clean", "window"),
    [
        (slice(0, 24), slice(24, 64), None),  # the earlier segment
        (slice(24, 64), slice(0, 24), None),  # the later segment
        (slice(40, 64), slice(0, 40), None),  # the future
        (slice(24, 40), slice(56, 64), 17),  # before the window: token 56 attends from 40 on
    ],
)
def test_blocks_of_others_of_the_future_and_before_the_window_are_never_read(
    poison, clean, window, monkeypatch
):
    """A masked weight of 0 times NaN is NaN, so a finite result has read no block with NaN."""
    monkeypatch.setattr(blockwise, "BLOCK_TOKENS", 8)
    q, k, v, dout = oracle.draw(1, 64, 4, 2, 8)
    # Future queries stay finite: they add to the gradients of the k and v before them.
    is_segment = 24 in (poison.stop, clean.stop)
    for x in (q, k, v, dout) if is_segment else (k, v):
        x[:, poison] = np.nan
    attend = make_attend(kernel="blockwise", layer_scores=[ScoreConfig(window=window)])
    slots = oracle.make_slots([[(0, 24), (24, 40)]], 3)
    actual = oracle.differentiate(attend)(q, k, v, dout, *slots)
    for name in actual if is_segment else ("out", "dq"):
        assert np.isfinite(actual[name][:, clean]).all(), name
        assert np.isnan(actual[name][:, poison]).any(), name


@functools.cache
def compiled(length):
    """Compiled forward and backward pass over one row of segments of at most 1000 tokens."""
    attend = make_attend(kernel="blockwise")

    def results(q, k, v, dout, starts, lengths):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return out, pull(dout)

    shapes = [jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)] * 4
    slots = [jax.ShapeDtypeStruct((1, -(-length // 1000)), jnp.int32)] * 2
    return jax.jit(results).lower(*shapes, *slots).compile()


LONG = 64 * 1024


def test_memory_is_linear_in_length(record_property):
    """One head's score matrix of 65,536 tokens would take 16 GiB, and four times that for twice the
    tokens."""
    lengths = (LONG // 4, LONG // 2, LONG)
    taken = [compiled(length).memory_analysis().temp_size_in_bytes for length in lengths]
    record_property("temporary bytes", taken)
    quarter, half, whole = taken
    assert (whole - half) / (half - quarter) == pytest.approx(2, rel=tolerances.LINEAR), taken
    assert whole < 2 * half < 4 * quarter


def test_one_product_of_a_cpu_sums_over_the_rows_of_scores():
    """XLA for CPUs takes twice as long for such products."""
    program = compiled(LONG // 4).as_text()
    assert len(re.findall(r" dot\(.*lhs_contracting_dims=\{1\}", program)) == 1
