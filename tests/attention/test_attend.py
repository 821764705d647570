"""Properties of every strategy: the numbers of one device, causality, isolation, no padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.attention.attend import find_collectives, make_attend
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.strategies.strategy import Strategy, combine
from jaxsp.core import axes
from tests import batches, tolerances
from tests.attention import oracle
from tests.attention.strategies import make_strategy

L = 48
K = 8


pytestmark = pytest.mark.usefixtures("small_blocks")

RING = make_strategy(seq=4, ulysses_degree=1)
GATHER = make_strategy(seq=4, ulysses_degree=1, tokens="all_gather", kv_heads_per_gather=2)
ULYSSES_RING = make_strategy(seq=4, ulysses_degree=2)
ULYSSES_GATHER = make_strategy(seq=4, ulysses_degree=2, tokens="all_gather")


def attend_over_rows(devices, kernel="blockwise", window=None):
    """Attention over whole rows. Args: devices: a strategy, or the number of Ulysses' devices."""
    strategy = devices if isinstance(devices, Strategy) else combine(devices)
    if kernel is oracle.attention:
        kernel = functools.partial(kernel, score=ScoreConfig(window=window))
    attend = make_attend(
        strategy=strategy, kernel=kernel, layer_scores=[ScoreConfig(window=window)]
    )
    return batches.attend_on_shards(attend) if strategy.seq > 1 else attend


def arrays(B, H=8, G=4):
    """q, k, v and a cotangent of the output, made by numpy: JAX would compile each step."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, L, heads, K), np.float32) for heads in (H, G, G, H)]


# Inputs of all tests have three rows of four slots, so that they share programs
@functools.cache
def compiled(devices, kernel="blockwise", window=None):
    """The output, dq, dk and dv."""
    attend = attend_over_rows(devices, kernel, window)

    @jax.jit
    def results(q, k, v, dout, starts, lengths):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), strict=True))

    return lambda *inputs: jax.tree.map(np.asarray, results(*inputs))


# K/V heads: more than seq, as many, fewer; not divided by it, neither dividing nor divided.
# Window of 15: longer than some segments and than a shard, shorter than others
@pytest.mark.parametrize(
    ("seq", "H", "G", "window"),
    [(2, 8, 4, None), (4, 8, 4, 15), (8, 8, 4, 15), (2, 6, 3, 15), (6, 12, 4, None)],
)
def test_many_devices_equal_one(seq, H, G, window):
    starts = np.int32([[0, 10, 24, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
    lengths = np.int32([[10, 14, 20, 0], [40, 0, 0, 0], [0, 0, 0, 0]])
    inputs = [*arrays(3, H, G), starts, lengths]
    actual = compiled(seq, window=window)(*inputs)
    expected = compiled(1, oracle.attention, window)(*inputs)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.ULYSSES, name


def test_ulysses_is_two_all_to_alls_and_no_gather():
    q, k, v, _ = arrays(1)
    text = (
        jax.jit(attend_over_rows(4))
        .lower(q, k, v, np.int32([[0]]), np.int32([[L]]))
        .compile()
        .as_text()
    )
    assert text.count(" all-to-all(") == 2
    for other in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute"):
        assert f" {other}" not in text
    assert len(find_collectives(text)) == 2


def test_only_collectives_of_attention_count():
    shard = PartitionSpec(None, axes.SEQ)
    whole = lambda x: jax.lax.all_gather(x, axes.SEQ, axis=1, tiled=True)
    gathered = jax.shard_map(
        whole,
        mesh=batches.mesh(1, 1, 4),
        in_specs=shard,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    text = jax.jit(gathered).lower(arrays(1)[0]).compile().as_text()
    assert " all-gather" in text
    assert find_collectives(text) == []


PADDED = (
    np.int32([[4, 20, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
    np.int32([[10, 20, 0, 0], [0, 0, 0, 0], [40, 0, 0, 0]]),
)
"""Starts and lengths: padding before, between and after segments; a row without segments."""

INSIDE = np.asarray(segments.segment_mask(*map(jnp.asarray, PADDED), L))


@jax.custom_vjp
def nan_at_padding(q, k, v, starts, lengths):
    return _poisoned(starts, lengths, oracle.attention(q, k, v, starts, lengths))


def _poisoned(starts, lengths, x):
    return jnp.where(
        segments.segment_mask(starts, lengths, x.shape[1])[..., None, None], x, jnp.nan
    )


def _forward(*inputs):
    return nan_at_padding(*inputs), inputs


def _backward(inputs, dout):
    starts, lengths = inputs[3:]
    gradients = jax.vjp(lambda q, k, v: oracle.attention(q, k, v, starts, lengths), *inputs[:3])[1](
        dout
    )
    return (*(_poisoned(starts, lengths, gradient) for gradient in gradients), None, None)


nan_at_padding.defvjp(_forward, _backward)


@pytest.mark.parametrize("seq", [1, 4])
def test_a_kernel_that_gives_nan_at_padding_changes_nothing(seq):
    inputs = [*arrays(3), *PADDED]
    actual = compiled(seq, nan_at_padding)(*inputs)
    expected = compiled(1, oracle.attention)(*inputs)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.ULYSSES, name
        assert (actual[name][~INSIDE] == 0).all(), name


WHOLE = [(1, oracle.attention), (1, "blockwise"), (4, "blockwise")]

WINDOWS = pytest.mark.parametrize(("devices", "kernel"), WHOLE)

EACH = pytest.mark.parametrize(
    ("devices", "kernel"),
    [
        *WHOLE,
        *((strategy, "blockwise") for strategy in (ULYSSES_GATHER,)),
        *(
            pytest.param(strategy, "blockwise", marks=pytest.mark.slow)
            for strategy in (RING, GATHER, ULYSSES_RING)
        ),
    ],
    ids=lambda value: getattr(value, "description", None),
)
"""Strategies and kernels; a new strategy is a row here."""


@EACH
def test_nan_at_padding_changes_nothing(devices, kernel):
    inputs = arrays(3)
    poisoned = [np.where(INSIDE[..., None, None], x, np.float32(np.nan)) for x in inputs]
    actual = compiled(devices, kernel)(*poisoned, *PADDED)
    expected = compiled(devices, kernel)(*inputs, *PADDED)
    for name in expected:
        assert batches.is_bitwise_equal(actual[name], expected[name]), name
        assert (actual[name][~INSIDE] == 0).all(), name


@EACH
def test_an_output_does_not_depend_on_later_tokens(devices, kernel):
    """Gradients of outputs up to t are exactly zero for inputs after t, and nonzero for input t."""
    q, k, v, dout = arrays(3)
    starts = np.zeros((3, 4), np.int32)
    lengths = np.int32([[L, 0, 0, 0]] * 3)
    for t in (0, 7, 8, 11, 12, 30, 46):
        upto = (np.arange(L) <= t)[None, :, None, None]
        actual = compiled(devices, kernel)(q, k, v, dout * upto, starts, lengths)
        for name in ("dq", "dk", "dv"):
            assert (actual[name][:, t + 1 :] == 0).all(), (name, t)
            # The first token attends only to itself, with weight 1 for any q and k
            assert (t == 0 and name != "dv") or (actual[name][:, t] != 0).all(), (name, t)


@WINDOWS
def test_an_output_depends_only_on_its_window(devices, kernel):
    """Gradients are zero except for the token and the window - 1 before it; dv is nonzero there."""
    window = 15
    q, k, v, dout = arrays(3)
    starts = np.zeros((3, 4), np.int32)
    lengths = np.int32([[L, 0, 0, 0]] * 3)
    for t in (0, 14, 15, 30, 47):
        is_t = (np.arange(L) == t)[None, :, None, None]
        actual = compiled(devices, kernel, window)(q, k, v, dout * is_t, starts, lengths)
        seen = (np.arange(L) <= t) & (np.arange(L) > t - window)
        for name in ("dk", "dv"):
            assert (actual[name][:, ~seen] == 0).all(), (name, t)
        assert (actual["dv"][:, seen] != 0).all(), t


# Shards of 12 tokens at seq=4: boundaries inside and at the edge of a shard, a segment over three
# shards, and one that fills a shard
ROWS = np.int32(
    [
        [(0, 7), (7, 5), (12, 33), (45, 3)],
        [(0, 12), (12, 12), (24, 7), (0, 0)],
        [(5, 28), (33, 1), (34, 14), (0, 0)],
    ]
)


@EACH
def test_a_segment_does_not_depend_on_the_others(devices, kernel):
    """Its outputs ignore inputs outside of it, whose gradients are exactly zero."""
    starts = ROWS[..., 0]
    lengths = ROWS[..., 1]
    q, k, v, dout = arrays(len(ROWS))
    before = compiled(devices, kernel)(q, k, v, dout, starts, lengths)["out"]
    segment = np.asarray(segments.segment_ids(jnp.asarray(starts), jnp.asarray(lengths), L))
    for m in range(ROWS.shape[1]):
        own = (segment == m)[..., None, None]
        others = [np.where(own, x, -3 * x) for x in (q, k, v)]
        actual = compiled(devices, kernel)(*others, dout * own, starts, lengths)
        assert batches.is_bitwise_equal(actual["out"][segment == m], before[segment == m]), m
        for name in ("dq", "dk", "dv"):
            assert (actual[name][segment != m] == 0).all(), (name, m)
            assert (actual[name] != 0).any(), (name, m)
