"""cuDNN attention on a GPU against the float32 reference: packed and not, in each way that heads are taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp import attention
from jaxsp.attention import Attend, KernelSettings
from jaxsp.attention.hybrid import OUTER_STRATEGIES
from jaxsp.attention.kernels import blockwise, cudnn, cudnn_limits, cudnn_slots, segments
from jaxsp.attention.kernels.workload import KernelWorkload
from tests import batches, tolerances
from tests.attention import oracle

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def takes(gpu):
    """Whether cuDNN takes rows of so many slots on this GPU: a function that skips where it does not."""

    def check(max_pieces, head_dim=64, window=None):
        work = KernelWorkload(
            num_heads=8,
            num_kv_heads=8,
            head_dim=head_dim,
            row_tokens=2048,
            num_rows=1,
            max_segments=max_pieces,
            window=window,
            dtype="bfloat16",
        )
        if obstacles := cudnn_limits.unsupported_reasons(work, devices=[gpu]):
            pytest.skip(f"cuDNN {obstacles[0].reason}")

    return check


L = 2048

PIECES = [
    [(0, 700), (700, 1), (701, 128), (829, 129), (958, 512), (1470, 20), (1490, 513), (2003, 45)],
    [(3, 5), (100, 120), (240, 130), (500, 1300), (1900, 1)],
    [(0, L)],
    [],
]
"""Pieces of four rows: with nothing between them, with gaps, one for the whole row, none."""

SLOTS = {
    2: [[(0, 1000), (1000, 1048)], [(5, 1100)], [(0, L)], []],
    30: PIECES,
    1: [[(0, L)], [(0, 1000)], [(0, 1)], []],
}
"""The same by the number of slots: one for which a single packed call does, one that needs several, and rows as a whole."""


def rows(slots, which):
    arrays = np.zeros((2, len(which), slots), np.int32)
    for row, index in enumerate(which):
        for slot, (start, length) in enumerate(SLOTS[slots][index]):
            arrays[:, row, slot] = start, length
    return arrays


def arrays(B, tokens, h, g, K):
    """q, k, v and a cotangent of the output, float32 that bfloat16 holds exactly."""
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal((B, tokens, heads, K), np.float32) for heads in (h, g, g, h))
    return [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in drawn]


@functools.partial(jax.jit, static_argnums=(0, 1))
def results(kernel, dtype, q, k, v, dout, starts, lengths):
    """The output, dq, dk and dv, in float32."""
    is_whole = isinstance(kernel, Attend)
    attend = kernel if is_whole else attention.make_attend(seq=1, kernel=kernel, window=None)
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
    return {
        name: x.astype(jnp.float32)
        for name, x in zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), strict=True)
    }


def run(kernel, dtype, *inputs):
    return jax.tree.map(np.asarray, results(kernel, dtype, *inputs))


kernels = functools.cache(
    # by name, as in training: padding in q, k and v is not set to zero
    lambda head_chunks, window=None: attention.make_attend(
        kernel="cudnn", settings=KernelSettings(head_chunks=head_chunks), window=window
    )
)

CASES = [
    (30, [0], 8, 8, 64, 1, None),
    (30, [0, 1], 8, 2, 64, 1, None),
    (30, [1, 0], 8, 2, 128, 2, None),  # parts of whole K/V heads
    (30, [3, 0, 2], 4, 1, 128, 4, None),  # parts that share a K/V head
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
"""Slots, rows, query heads, K/V heads, head size, parts, window."""


@pytest.mark.parametrize(("slots", "which", "h", "g", "K", "head_chunks", "window"), CASES)
def test_cudnn_is_as_near_to_the_reference_as_bfloat16_allows(
    slots, which, h, g, K, head_chunks, window, takes
):
    takes(slots, K, window)
    inputs = [*arrays(len(which), L, h, g, K), *rows(slots, which)]
    with jax.default_matmul_precision("highest"):
        right = run(functools.partial(oracle.attention, window=window), jnp.float32, *inputs)
    found = run(kernels(head_chunks, window), jnp.bfloat16, *inputs)
    for name in right:
        assert batches.difference(found[name], right[name]) < tolerances.KERNEL_BF16, name


in_halves = functools.cache(
    lambda head_chunks, outer: attention.make_attend(
        kernel="cudnn",
        strategy=OUTER_STRATEGIES[outer](seq=1),
        settings=KernelSettings(head_chunks=head_chunks),
    )
)


@pytest.mark.parametrize("outer", ["ring", "all_gather"])
@pytest.mark.parametrize(
    ("slots", "which", "h", "g", "K", "head_chunks", "window"),
    [case for case in CASES if case[-1] is None],
)
def test_halves_of_rows_are_as_near(slots, which, h, g, K, head_chunks, window, takes, outer):
    """As ring and gather compute them: chunks of themselves, and rectangles between them, merged by their log-sum-exps."""
    takes(slots, K)
    inputs = [*arrays(len(which), L, h, g, K), *rows(slots, which)]
    with jax.default_matmul_precision("highest"):
        right = run(oracle.attention, jnp.float32, *inputs)
    found = run(in_halves(head_chunks if outer == "ring" else 1, outer), jnp.bfloat16, *inputs)
    for name in right:
        assert batches.difference(found[name], right[name]) < tolerances.KERNEL_BF16, name


@pytest.mark.parametrize(("K", "window"), [(64, None), (256, 100)])
def test_the_blockwise_kernel_is_as_near(K, window, takes):
    inputs = [*arrays(2, L, 8, 2, K), *rows(30, [0, 1])]
    with jax.default_matmul_precision("highest"):
        right = run(functools.partial(oracle.attention, window=window), jnp.float32, *inputs)
    found = run(functools.partial(blockwise.attention, window=window), jnp.bfloat16, *inputs)
    for name in right:
        assert batches.difference(found[name], right[name]) < tolerances.KERNEL_BF16, name


@pytest.mark.parametrize("slots", [1, 30])
def test_the_statistic_is_the_log_sum_exp_and_lies_where_the_kernel_takes_it_from(slots, takes):
    """Were it laid out otherwise, gradients would be wrong; this says so by itself."""
    takes(slots)
    q, k, v, _ = arrays(2, L, 4, 2, 64)
    starts, lengths = rows(slots, [0, 1])
    small = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    _, found_BhL = jax.jit(functools.partial(cudnn.forward, head_chunks=1, window=None))(
        *small, starts, lengths
    )
    piece_BL = np.asarray(segments.segment_ids(jnp.asarray(starts), jnp.asarray(lengths), L))
    scores = np.einsum("bqhK,bkhK->bhqk", q, np.repeat(k, 2, axis=2)) * 64**-0.5
    sees = (piece_BL[:, :, None] == piece_BL[:, None]) & np.tril(np.ones((L, L), bool))
    right_BhL = np.log(np.exp(scores, where=sees[:, None], out=np.zeros_like(scores)).sum(-1))
    inside_BhL = np.broadcast_to((piece_BL >= 0)[:, None], right_BhL.shape)
    assert np.abs(np.asarray(found_BhL) - right_BhL)[inside_BhL].max() < tolerances.LSE_BF16


@pytest.mark.parametrize("h", [4, 8])
def test_a_piece_knows_nothing_of_the_others(h, takes):
    """The derivative of a piece's outputs towards all inputs outside it is exactly zero, and its outputs ignore them."""
    takes(30)
    starts, lengths = rows(30, [0, 1])
    q, k, v, dout = arrays(2, L, h, 2, 128)
    before = run(kernels(1), jnp.bfloat16, q, k, v, dout, starts, lengths)["out"]
    piece = np.asarray(segments.segment_ids(jnp.asarray(starts), jnp.asarray(lengths), L))
    for m in range(8):
        own = (piece == m)[..., None, None]
        others = [np.where(own, x, -3 * x) for x in (q, k, v)]
        found = run(kernels(1), jnp.bfloat16, *others, dout * own, starts, lengths)
        assert batches.same_bits(found["out"][piece == m], before[piece == m]), m
        for name in ("dq", "dk", "dv"):
            assert (found[name][piece != m] == 0).all(), (name, m)
        assert (found["dv"][piece == m] != 0).any(), m


def test_a_row_of_a_million_tokens_is_right_to_its_end(takes):
    """One piece of half of it and 60 others; the last is looked at, alone. Places reach 2**29, and the sums of dq 2**31."""
    takes(64)
    tokens, last = 2**20, 2048
    cuts = np.linspace(tokens // 2, tokens - last, 60, dtype=np.int32)
    starts = np.zeros((1, 64), np.int32)
    starts[0, 1:61] = cuts
    lengths = np.zeros_like(starts)
    lengths[0, :61] = np.diff([0, *cuts, tokens])
    keys = jax.random.split(jax.random.key(0), 4)
    big = [
        jax.random.normal(key, (1, tokens, heads, 128), jnp.bfloat16)
        for key, heads in zip(keys, (4, 1, 1, 4), strict=True)
    ]
    end = [x[:, -last:].astype(jnp.float32) for x in big]
    with jax.default_matmul_precision("highest"):
        right = run(oracle.attention, jnp.float32, *end, np.int32([[0]]), np.int32([[last]]))
    found = results(kernels(1), jnp.bfloat16, *big, starts, lengths)
    assert all(bool(jnp.isfinite(x).all()) for x in found.values())
    for name in right:
        assert (
            batches.difference(np.asarray(found[name][:, -last:]), right[name])
            < tolerances.KERNEL_BF16
        ), name
    assert len(cudnn_slots.plan_calls(num_rows=1, row_tokens=tokens, max_segments=64)) == 3
