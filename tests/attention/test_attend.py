"""What every kind of attention promises: one device's numbers on many, causality, isolation, nothing from padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp import attention
from jaxsp.attention.kernels import blockwise_rows, segments
from jaxsp.attention.strategy import Strategy
from jaxsp.attention.ulysses import Ulysses
from jaxsp.core import axes
from tests import batches, tolerances
from tests.attention import oracle
from tests.attention.strategies import make_strategy

L, K = 48, 8


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_rows, "BLOCK_TOKENS", 8)
        yield


RING, GATHER = (
    make_strategy(seq=4, ulysses_degree=1),
    make_strategy(seq=4, ulysses_degree=1, outer_strategy="all_gather", kv_heads_per_gather=2),
)
HYBRID, HYBRID_GATHER = (
    make_strategy(seq=4, ulysses_degree=2),
    make_strategy(seq=4, ulysses_degree=2, outer_strategy="all_gather"),
)


def make_attend(devices, kernel="blockwise", window=None):
    """attend on whole rows: each of so many devices takes its share, by Ulysses, or as a kind says."""
    strategy = devices if isinstance(devices, Strategy) else Ulysses(seq=devices)
    if kernel is oracle.attention:
        kernel = functools.partial(kernel, window=window)
    attend = attention.make_attend(strategy=strategy, kernel=kernel, window=window)
    return batches.attend_on_shards(attend) if strategy.seq > 1 else attend


def arrays(B, H=8, G=4):
    """q, k, v and a cotangent of the output. Made by numpy, as are the results' comparisons: jax would compile each step."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, L, heads, K), np.float32) for heads in (H, G, G, H)]


@functools.cache
def compiled(devices, kernel="blockwise", window=None):
    """The output, dq, dk and dv."""
    attend = make_attend(devices, kernel, window)

    @jax.jit
    def results(q, k, v, dout, starts, lengths):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), strict=True))

    return lambda *inputs: jax.tree.map(np.asarray, results(*inputs))


# K/V heads: more than seq, as many, fewer; not divided by it, neither dividing nor divided
@pytest.mark.parametrize(
    "window", [None, 15]
)  # 15: longer than some pieces and than a share, shorter than others
@pytest.mark.parametrize(
    ("seq", "H", "G"), [(2, 8, 4), (4, 8, 4), (8, 8, 4), (2, 6, 3), (6, 12, 4)]
)
def test_many_devices_give_what_one_gives(seq, H, G, window):
    starts = np.int32([[0, 10, 24, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
    lengths = np.int32([[10, 14, 20, 0], [40, 0, 0, 0], [0, 0, 0, 0]])
    inputs = [*arrays(3, H, G), starts, lengths]
    found, right = (
        compiled(seq, window=window)(*inputs),
        compiled(1, oracle.attention, window)(*inputs),
    )
    for name in right:
        assert batches.difference(found[name], right[name]) < tolerances.ULYSSES, name


def test_ulysses_is_two_all_to_alls_and_no_gather():
    q, k, v, _ = arrays(1)
    text = (
        jax.jit(make_attend(4)).lower(q, k, v, np.int32([[0]]), np.int32([[L]])).compile().as_text()
    )
    assert text.count(" all-to-all(") == 2
    for other in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute"):
        assert f" {other}" not in text
    assert len(attention.find_collectives(text)) == 2


def test_only_collectives_of_attention_count():
    share = PartitionSpec(None, axes.SEQ)
    whole = lambda x: jax.lax.all_gather(x, axes.SEQ, axis=1, tiled=True)
    gathered = jax.shard_map(
        whole,
        mesh=batches.mesh(1, 1, 4),
        in_specs=share,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    text = jax.jit(gathered).lower(arrays(1)[0]).compile().as_text()
    assert " all-gather" in text
    assert attention.find_collectives(text) == []


PADDED = (
    np.int32([[4, 20, 0], [0, 0, 0], [0, 0, 0]]),
    np.int32([[10, 20, 0], [0, 0, 0], [40, 0, 0]]),
)
"""Starts and lengths: padding before, between and after pieces; a row without any."""

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
    found, right = compiled(seq, nan_at_padding)(*inputs), compiled(1, oracle.attention)(*inputs)
    for name in right:
        assert batches.difference(found[name], right[name]) < tolerances.ULYSSES, name
        assert (found[name][~INSIDE] == 0).all(), name


WHOLE = [(1, oracle.attention), (1, "blockwise"), (4, "blockwise")]

WINDOWS = pytest.mark.parametrize(("devices", "kernel"), WHOLE)

EACH = pytest.mark.parametrize(
    ("devices", "kernel"),
    [
        *WHOLE,
        *((kind, "blockwise") for kind in (RING, HYBRID_GATHER)),
        *(pytest.param(kind, "blockwise", marks=pytest.mark.slow) for kind in (GATHER, HYBRID)),
    ],
    ids=lambda value: getattr(value, "description", None),
)
"""A new kind is a row here."""


@EACH
def test_nan_at_padding_changes_nothing(devices, kernel):
    inputs = arrays(3)
    poisoned = [np.where(INSIDE[..., None, None], x, np.float32(np.nan)) for x in inputs]
    found, right = (
        compiled(devices, kernel)(*poisoned, *PADDED),
        compiled(devices, kernel)(*inputs, *PADDED),
    )
    for name in right:
        assert batches.same_bits(found[name], right[name]), name
        assert (found[name][~INSIDE] == 0).all(), name


@EACH
def test_an_output_does_not_depend_on_later_tokens(devices, kernel):
    """The derivative of outputs up to t towards inputs after t is exactly zero, and towards t it is not."""
    q, k, v, dout = arrays(3)
    starts, lengths = np.zeros((3, 3), np.int32), np.int32([[L, 0, 0]] * 3)
    for t in (0, 7, 8, 11, 12, 30, 46):
        upto = (np.arange(L) <= t)[None, :, None, None]
        found = compiled(devices, kernel)(q, k, v, dout * upto, starts, lengths)
        for name in ("dq", "dk", "dv"):
            assert (found[name][:, t + 1 :] == 0).all(), (name, t)
            # the first token sees itself alone: its weight is 1 whatever q and k are
            assert (t == 0 and name != "dv") or (found[name][:, t] != 0).all(), (name, t)


@WINDOWS
def test_an_output_depends_on_its_window_alone(devices, kernel):
    """The derivative of an output is zero towards all but itself and the window - 1 tokens before, and not towards their v."""
    window = 13
    q, k, v, dout = arrays(3)
    starts, lengths = np.zeros((3, 3), np.int32), np.int32([[L, 0, 0]] * 3)
    for t in (0, 12, 13, 30, 47):
        one = (np.arange(L) == t)[None, :, None, None]
        found = compiled(devices, kernel, window)(q, k, v, dout * one, starts, lengths)
        seen = (np.arange(L) <= t) & (np.arange(L) > t - window)
        for name in ("dk", "dv"):
            assert (found[name][:, ~seen] == 0).all(), (name, t)
        assert (found["dv"][:, seen] != 0).all(), t


# Shares of 12 tokens at seq=4: boundaries inside a share and on its edge, a piece over three shares, one that fills a share
ROWS = np.int32(
    [
        [(0, 7), (7, 5), (12, 33), (45, 3)],
        [(0, 12), (12, 12), (24, 7), (0, 0)],
        [(5, 28), (33, 1), (34, 14), (0, 0)],
    ]
)


@EACH
def test_a_piece_knows_nothing_of_the_others(devices, kernel):
    """The derivative of a piece's outputs towards all inputs outside it is exactly zero, and its outputs ignore them."""
    starts, lengths = ROWS[..., 0], ROWS[..., 1]
    q, k, v, dout = arrays(len(ROWS))
    before = compiled(devices, kernel)(q, k, v, dout, starts, lengths)["out"]
    piece = np.asarray(segments.segment_ids(jnp.asarray(starts), jnp.asarray(lengths), L))
    for m in range(ROWS.shape[1]):
        own = (piece == m)[..., None, None]
        others = [np.where(own, x, -3 * x) for x in (q, k, v)]
        found = compiled(devices, kernel)(*others, dout * own, starts, lengths)
        assert batches.same_bits(found["out"][piece == m], before[piece == m]), m
        for name in ("dq", "dk", "dv"):
            assert (found[name][piece != m] == 0).all(), (name, m)
            assert (found[name] != 0).any(), (name, m)
