"""The blockwise kernel: agreement with the oracle, blocks that it never reads, and its memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import Attend, make_attend
from jaxsp.attention.kernels import blockwise_rows, segments
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.kernels.residuals import CHECKPOINT_NAMES as ATTENTION_NAMES
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
    (2, 1, 264, 40, None),  # larger heads have blocks of their own size
]
"""Query heads, K/V heads, head size, tokens of a block, window."""


@pytest.mark.parametrize(("h", "g", "K", "block", "window"), SHAPES)
def test_blockwise_equals_the_oracle(h, g, K, block, window, monkeypatch):
    name = "LARGE_HEAD_BLOCK_TOKENS" if K > 256 else "BLOCK_TOKENS"
    monkeypatch.setattr(blockwise_rows, name, block)
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


@pytest.mark.slow
def test_a_window_as_long_as_the_row_changes_no_bit(monkeypatch):
    monkeypatch.setattr(blockwise_rows, "BLOCK_TOKENS", 16)
    inputs = [*arrays(len(STARTS), L, 4, 2, K=16), np.int32(STARTS), np.int32(LENGTHS)]
    windows = (None, L, 10**12)
    expected, *actual = (run(blockwise_attend(window), *inputs) for window in windows)
    assert all(batches.is_bitwise_equal(results, expected) for results in actual)


def blocks_read(length, window):
    """Number of blocks of keys that the blocks of queries of one long segment visit together."""
    x = jnp.zeros((length, 1, 8))
    segment = jnp.zeros(length, jnp.int32)
    first = np.asarray(blockwise_rows.make_segment_row(x, x, x, segment, window=window).first_block)
    return int((np.arange(len(first)) + 1 - first).sum())


def test_blocks_read_grow_with_the_row_with_a_window_and_with_its_square_without():
    blocks = [4096 // blockwise_rows.BLOCK_TOKENS * scale for scale in (1, 2, 4)]
    for n, scale in zip(blocks, (1, 2, 4), strict=True):
        assert blocks_read(4096 * scale, 4096 * scale) == n * (n + 1) // 2
        # a block's first token attends to one token of the fifth block before
        assert blocks_read(4096 * scale, 4 * blockwise_rows.BLOCK_TOKENS + 2) == 6 * n - (
            5 + 4 + 3 + 2 + 1
        )


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


LONG = 64 * 1024


@functools.cache
def compiled(length, heads=1, K=8):
    """Compiled forward and backward pass over one row of segments of at most 1000 tokens."""
    num_segments = -(-length // 1000)
    shapes = [jax.ShapeDtypeStruct((1, length, heads, K), jnp.float32)] * 4
    slots = [jax.ShapeDtypeStruct((1, num_segments), jnp.int32)] * 2
    return jax.jit(functools.partial(results, blockwise_attend())).lower(*shapes, *slots).compile()


def test_memory_is_linear_in_length(record_property):
    """One head's score matrix of 65,536 tokens would take 16 GiB, and four times that for twice the
    tokens."""
    lengths = (LONG // 4, LONG // 2, LONG)
    taken = {
        length: compiled(length, heads=4, K=32).memory_analysis().temp_size_in_bytes
        for length in lengths
    }
    for length, size in taken.items():
        record_property(f"temporary MiB at {length} tokens", round(size / 2**20, 2))
    quarter, half, whole = taken.values()
    assert (whole - half) / (half - quarter) == pytest.approx(2, rel=tolerances.LINEAR), taken
    assert whole < 2 * half < 4 * quarter


def test_one_product_of_a_cpu_sums_over_the_rows_of_scores():
    """XLA for CPUs takes twice as long for such products."""
    program = compiled(LONG // 4, heads=4, K=32).as_text()
    assert len(re.findall(r" dot\(.*lhs_contracting_dims=\{1\}", program)) == 1


def num_forward_passes(*names):
    """Attention forward passes in a checkpointed layer and its gradient, which keeps these names.

    Only they compute a maximum.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    q, k, v, _ = map(jnp.asarray, arrays(1, 64, 4, 2, K=8))
    starts = jnp.int32([[0]])
    lengths = jnp.int32([[64]])
    attend = blockwise_attend()

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(q):
        return attend(2 * q, k, v, starts, lengths) ** 2

    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda q: layer(q).sum()))(q)
    return sum(equation.primitive.name == "reduce_max" for equation in batches.equations(jaxpr))


def test_attention_is_not_recomputed_if_its_named_residuals_are_kept():
    out, lse = ATTENTION_NAMES
    assert num_forward_passes(out, lse) == 1
    assert num_forward_passes(out) == 2
    assert num_forward_passes(lse) == 2
    assert num_forward_passes() == 2
