"""Compares cuDNN attention on a GPU with the float32 oracle: packed and whole rows, head chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels import cudnn_bins, cudnn_limits, segments
from jaxsp.attention.kernels.cudnn import CudnnKernel
from jaxsp.attention.kernels.kernel import AttentionWorkload, KernelSettings, ScoreConfig
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.selection import TOKEN_EXCHANGES
from jaxsp.attention.strategy import combine
from tests import batches, tolerances
from tests.attention import oracle

pytestmark = pytest.mark.gpu

_PLAIN = ScoreConfig()


@pytest.fixture(autouse=True)
def require_support(gpu):
    """A function that skips the test if cuDNN does not support a workload on this GPU."""

    def check(max_segments, head_dim=64, window=None):
        work = AttentionWorkload(
            num_heads=8,
            num_kv_heads=8,
            head_dim=head_dim,
            row_tokens=2048,
            num_rows=1,
            max_segments=max_segments,
            window=window,
            dtype="bfloat16",
        )
        if obstacles := cudnn_limits.unsupported_reasons(work, devices=[gpu]):
            pytest.skip(f"cuDNN {obstacles[0].reason}")

    return check


L = 2048

SEGMENTS = [
    [(0, 700), (700, 1), (701, 128), (829, 129), (958, 512), (1470, 20), (1490, 513), (2003, 45)],
    [(3, 5), (100, 120), (240, 130), (500, 1300), (1900, 1)],
    [(0, L)],
    [],
]
"""Segments of four rows: without gaps, with gaps, one for the whole row, none."""

SLOTS = {
    2: [[(0, 1000), (1000, 1048)], [(5, 1100)], [(0, L)], []],
    30: SEGMENTS,
    1: [[(0, L)], [(0, 1000)], [(0, 1)], []],
}
"""Segments by number of slots: 2 need one packed call, 30 need several, and 1 is whole rows."""


def make_inputs(slots, which, h, g, K):
    """q, k, v and a cotangent of the output in float32, exact in bfloat16; and slots of rows."""
    values = oracle.draw(len(which), L, h, g, K)
    exact = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in values]
    return [*exact, *oracle.make_slots([SLOTS[slots][index] for index in which], slots)]


def run_oracle(inputs, score=_PLAIN):
    with jax.default_matmul_precision("highest"):
        return oracle.differentiate(oracle.make_attend(score))(*inputs)


@functools.cache
def compile_attend(kernel="cudnn", tokens=None, head_chunks=1, window=None):
    """Results in float32 of an attention in bfloat16. Padding in q, k and v is not set to 0."""
    attend = make_attend(
        kernel=kernel,
        strategy=combine(1, tokens and TOKEN_EXCHANGES[tokens](degree=1)),
        settings=KernelSettings(head_chunks=head_chunks),
        layer_scores=[ScoreConfig(window=window)],
    )
    run = oracle.differentiate(attend)

    def results(q, k, v, dout, starts, lengths):
        narrow = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, dout))
        return jax.tree.map(np.float32, run(*narrow, starts, lengths))

    return results


def check(actual, expected):
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.KERNEL_BF16, name


CASES = [
    (30, [0], 8, 8, 64, 1, None),
    (30, [0, 1], 8, 2, 64, 1, None),
    (30, [1, 0], 8, 2, 128, 2, None),  # chunks of whole K/V heads
    (30, [3, 0, 2], 4, 1, 128, 4, None),  # chunks that share a K/V head
    (30, [0, 3], 7, 1, 128, 1, None),
    (2, [0], 8, 2, 128, 1, None),
    (2, [1, 3, 0], 4, 4, 64, 2, None),
    (1, [0], 8, 2, 128, 1, None),
    (1, [1, 0], 8, 1, 64, 1, None),
    (1, [0, 1], 8, 4, 128, 4, None),
    (30, [0, 1], 8, 2, 96, 1, None),
    (30, [0, 1], 4, 2, 192, 1, None),
    (30, [1, 0], 4, 1, 256, 1, None),
    (1, [0, 1], 4, 2, 192, 1, None),
    (1, [0, 1], 4, 2, 256, 2, None),
    (30, [0, 1], 8, 2, 128, 1, 100),  # shorter than a slot of any call
    (30, [1, 2], 8, 2, 64, 2, 600),  # longer than a slot of the second
    (30, [1, 0], 4, 1, 256, 1, 129),
    (2, [0, 1], 8, 2, 128, 1, 2),
    (1, [0, 1], 8, 2, 128, 1, 100),
    (1, [1, 0], 4, 2, 256, 1, 1000),
]
"""Slots, rows, query heads, K/V heads, head size, head chunks, window."""


@pytest.mark.parametrize(("slots", "which", "h", "g", "K", "head_chunks", "window"), CASES)
@pytest.mark.parametrize("tokens", [None, "ring", "all_gather"])
def test_cudnn_differs_from_the_oracle_by_bfloat16_rounding_only(
    slots, which, h, g, K, head_chunks, window, tokens, require_support
):
    """Rows of two chunks test ring and all-gather: chunks and the blocks between them, merged by
    their log-sum-exps."""
    if tokens is not None and window is not None:
        pytest.skip("windows have no blocks between chunks")
    require_support(slots, K, window)
    inputs = make_inputs(slots, which, h, g, K)
    chunks = head_chunks if tokens != "all_gather" else 1
    actual = compile_attend("cudnn", tokens, chunks, window)(*inputs)
    check(actual, run_oracle(inputs, ScoreConfig(window=window)))


@pytest.mark.parametrize(("K", "window"), [(64, None), (256, 100)])
def test_the_blockwise_kernel_differs_by_bfloat16_rounding_only(K, window, require_support):
    inputs = make_inputs(30, [0, 1], 8, 2, K)
    actual = compile_attend("blockwise", window=window)(*inputs)
    check(actual, run_oracle(inputs, ScoreConfig(window=window)))


@pytest.mark.parametrize("slots", [1, 30])
def test_the_softmax_statistics_are_log_sum_exps_in_the_expected_layout(slots, require_support):
    """In another layout, the gradients would be wrong, and the tests above would fail too."""
    require_support(slots)
    q, k, v, _, starts, lengths = make_inputs(slots, [0, 1], 4, 2, 64)
    bf16_inputs = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    functions = CudnnKernel().make_row_functions(KernelSettings(), ScoreConfig())
    _, actual_BhL = jax.jit(functions.forward)(*bf16_inputs, Segments(starts, lengths))
    segment_BL = np.asarray(segments.segment_ids(jnp.asarray(starts), jnp.asarray(lengths), L))
    scores = np.einsum("bqhK,bkhK->bhqk", q, np.repeat(k, 2, axis=2)) * 64**-0.5
    is_visible = (segment_BL[:, :, None] == segment_BL[:, None]) & np.tril(np.ones((L, L), bool))
    expected_BhL = np.log(
        np.exp(scores, where=is_visible[:, None], out=np.zeros_like(scores)).sum(-1)
    )
    is_token_BhL = np.broadcast_to((segment_BL >= 0)[:, None], expected_BhL.shape)
    assert np.abs(np.asarray(actual_BhL) - expected_BhL)[is_token_BhL].max() < tolerances.LSE_BF16


@pytest.mark.parametrize("h", [4, 8])
def test_segments_are_isolated(h, require_support):
    """A segment's outputs ignore the inputs of other segments, and their gradients are exactly
    0."""
    require_support(30)
    q, k, v, dout, starts, lengths = make_inputs(30, [0, 1], h, 2, 128)
    attend = compile_attend()
    before = attend(q, k, v, dout, starts, lengths)["out"]
    segment = np.asarray(segments.segment_ids(jnp.asarray(starts), jnp.asarray(lengths), L))
    for m in range(8):
        own = (segment == m)[..., None, None]
        others = [np.where(own, x, -3 * x) for x in (q, k, v)]
        actual = attend(*others, dout * own, starts, lengths)
        assert batches.is_bitwise_equal(actual["out"][segment == m], before[segment == m]), m
        for name in ("dq", "dk", "dv"):
            assert (actual[name][segment != m] == 0).all(), (name, m)
        assert (actual["dv"][segment == m] != 0).any(), m


def test_the_last_segment_of_a_row_of_a_million_tokens_is_correct(require_support):
    """One segment of half of the tokens and 60 others; the last is compared with a row of its own.

    Offsets reach 2**29, and those of the sums of dq 2**31.
    """
    require_support(64)
    tokens = 2**20
    last = 2048
    cuts = [0, *np.linspace(tokens // 2, tokens - last, 60, dtype=np.int32).tolist()]
    places = list(zip(cuts, np.diff([*cuts, tokens]).tolist(), strict=True))
    keys = jax.random.split(jax.random.key(0), 4)
    big = [
        jax.random.normal(key, (1, tokens, heads, 128), jnp.bfloat16)
        for key, heads in zip(keys, (4, 1, 1, 4), strict=True)
    ]
    end = [np.asarray(x[:, -last:], np.float32) for x in big]
    actual = compile_attend()(*big, *oracle.make_slots([places], 64))
    assert all(np.isfinite(x).all() for x in actual.values())
    expected = run_oracle([*end, *oracle.make_slots([[(0, last)]], 1)])
    check({name: x[:, -last:] for name, x in actual.items()}, expected)
    assert len(cudnn_bins.plan_calls(num_rows=1, row_tokens=tokens, max_segments=64)) == 3
