"""The blockwise kernel: agreement with the oracle, blocks that it never reads, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import Attend, make_attend
from jaxsp.attention.kernels import blockwise_rows, segments
from jaxsp.attention.kernels.kernel import ScoreConfig
from tests import batches, tolerances
from tests.attention import oracle

L = 100
"""Tokens of a row: one of the block sizes below divides it."""

STARTS = [[0, 30, 64, 0], [0, 5, 0, 0], [0, 8, 16, 17], [0, 0, 0, 0], [0, 0, 0, 0], [12, 40, 60, 0]]
LENGTHS = [
    [30, 34, 36, 0],
    [5, 90, 0, 0],
    [8, 8, 1, 33],
    [100, 0, 0, 0],
    [0, 0, 0, 0],
    [20, 20, 1, 0],
]
"""Segments of six rows.

Full; padding at the end; segments that end with blocks, one of one token; one segment; no segment;
padding everywhere.
"""


def arrays(B, L, h, g, K):
    """q, k, v and a cotangent of the output.

    numpy draws them and compares the results: jax would compile each operation.
    """
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, L, heads, K), np.float32) for heads in (h, g, g, h)]


def results(attend, q, k, v, dout, starts, lengths):
    """Output, dq, dk and dv. Called under jit."""
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), strict=True))


def blockwise_attend(window: int | None = None) -> Attend:
    return make_attend(kernel="blockwise", layer_scores=[ScoreConfig(window=window)])


def run(attend, *inputs):
    return jax.tree.map(np.asarray, jax.jit(functools.partial(results, attend))(*inputs))


SHAPES = [
    (8, 2, 16, 512, None),
    (8, 1, 16, 100, None),
    (6, 3, 16, 16, None),
    (4, 2, 64, 8, 2),
    (4, 2, 96, 8, 10),  # a block's first token attends to one token of the second block before
    # Shorter than some segments, longer than others; not a multiple of a block
    (2, 1, 192, 16, 20),
    (2, 2, 256, 100, 33),
]
"""Query heads, K/V heads, head size, tokens of a block, window."""


@pytest.mark.parametrize(("h", "g", "K", "block", "window"), SHAPES)
def test_blockwise_equals_the_oracle(h, g, K, block, window, monkeypatch):
    monkeypatch.setattr(blockwise_rows, "BLOCK_TOKENS", block)
    inputs = [*arrays(len(STARTS), L, h, g, K), np.int32(STARTS), np.int32(LENGTHS)]
    attends = [
        make_attend(kernel=kernel, layer_scores=[ScoreConfig(window=window)])
        for kernel in (
            "blockwise",
            functools.partial(oracle.attention, score=ScoreConfig(window=window)),
        )
    ]
    actual, expected = (run(attend, *inputs) for attend in attends)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.KERNEL, name


def test_the_output_at_padding_is_zero(monkeypatch):
    monkeypatch.setattr(blockwise_rows, "BLOCK_TOKENS", 16)
    q, k, v, _ = map(jnp.asarray, arrays(len(STARTS), L, 8, 2, K=16))
    starts = jnp.int32(STARTS)
    lengths = jnp.int32(LENGTHS)
    out = np.asarray(jax.jit(blockwise_attend())(q, k, v, starts, lengths))
    inside = np.asarray(segments.segment_mask(starts, lengths, L))
    assert (out[~inside] == 0).all()
    assert np.abs(out[inside]).max(-1).min() > 0


@pytest.mark.parametrize(
    "poisoned", ["earlier segment", "later segment", "the future", "before the window"]
)
def test_blocks_of_other_segments_of_the_future_and_before_the_window_are_never_read(
    poisoned, monkeypatch
):
    """A masked weight of 0 times NaN is NaN, so a finite result has read no block with NaN."""
    monkeypatch.setattr(blockwise_rows, "BLOCK_TOKENS", 8)
    q, k, v, dout = arrays(1, 64, 4, 2, K=8)
    starts = np.int32([[0, 24, 0]])
    lengths = np.int32([[24, 40, 0]])
    poison, clean = {
        "earlier segment": (slice(0, 24), slice(24, 64)),
        "later segment": (slice(24, 64), slice(0, 24)),
        "the future": (slice(40, 64), slice(0, 40)),
        "before the window": (
            slice(24, 40),
            slice(56, 64),
        ),  # token 56 attends to 17 tokens, from 40
    }[poisoned]
    # Future queries stay finite: they add to the gradients of the k and v before them.
    is_segment = poisoned.endswith("segment")
    for x in (q, k, v, dout) if is_segment else (k, v):
        x[:, poison] = np.nan
    window = 17 if poisoned == "before the window" else None
    actual = run(blockwise_attend(window), q, k, v, dout, starts, lengths)
    for name in actual if is_segment else ("out", "dq"):
        assert np.isfinite(actual[name][:, clean]).all(), name
        assert np.isnan(actual[name][:, poison]).any(), name


@functools.cache
def compiled(length, heads=1, K=8):
    """Compiled forward and backward pass over one row of segments of at most 1000 tokens."""
    num_segments = -(-length // 1000)
    shapes = [jax.ShapeDtypeStruct((1, length, heads, K), jnp.float32)] * 4
    slots = [jax.ShapeDtypeStruct((1, num_segments), jnp.int32)] * 2
    return jax.jit(functools.partial(results, blockwise_attend())).lower(*shapes, *slots).compile()
