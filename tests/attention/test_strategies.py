"""Every strategy with many numbers of heads and devices, kinds of layers, windows and sinks, equals
one device; and the chosen strategy."""

import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.attend import make_attend
from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.attention.halo import Halo
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.ring import Ring
from jaxsp.attention.selection import choose_strategy
from jaxsp.attention.strategy import combine
from jaxsp.attention.workload import GroupRows, count_workloads
from jaxsp.core.layout import Layout
from jaxsp.data import packing
from tests import batches, tolerances
from tests.attention import cudnn_contract, oracle
from tests.attention.strategies import make_strategy

L = 96
K = 8

ROWS = [
    [(0, 10), (10, 14), (24, 70)],
    [(3, 90)],
    [(0, 7), (7, 50), (60, 9), (70, 26)],
    [(0, 96)],
    [],
]
"""Start and length of each segment: over many chunks and in one, with gaps, a full row, none."""

pytestmark = pytest.mark.usefixtures("small_blocks")


def make_inputs(H, G):
    return [*oracle.draw(len(ROWS), L, H, G, K), *oracle.make_slots(ROWS, 5)]


def make_sinks(num_heads):
    return np.linspace(-2, 3, num_heads, dtype=np.float32)


def choose(seq, H, G, *, window=None, **attention_fields):
    model = types.SimpleNamespace(
        num_heads=H, num_kv_heads=G, head_dim=128, layer_scores=[ScoreConfig(window=window)]
    )
    rows = GroupRows(num_rows=1, row_tokens=1000 * seq, max_segments=64, seq=seq, dtype="bfloat16")
    strategy = choose_strategy(AttentionConfig(**attention_fields), rows, model)
    (workload,) = count_workloads(rows, model)
    return strategy, lambda strategy: sum(strategy.sent_bytes(workload).values())


def chosen(*sizes, **fields):
    return choose(*sizes, **fields)[0]


def list_cases():
    """Every strategy for these heads and numbers of devices, by description."""
    heads = [(H, G) for H, G in itertools.product((8, 6, 7, 28, 5), (8, 4, 3, 2, 1)) if H % G == 0]
    products = {(2, 4), (4, 2), (2, 2), (3, 2)}
    by_name = {"12 and 4 heads: Ulysses of 6": (combine(6), 12, 4)}
    for seq, (H, G) in itertools.product((2, 3, 4, 6, 8), heads):
        strategies = [combine(1, Ring(degree=seq)), chosen(seq, H, G)]
        for chunks in (4, 8, 16):
            if L % (chunks * seq) == 0 and (H, G) in ((6, 2), (5, 1)):
                strategies.append(combine(1, Ring(degree=seq, chunks_per_device=chunks)))
                strategies.append(combine(1, AllGather(degree=seq, chunks_per_device=chunks)))
        strategies += [
            combine(1, AllGather(degree=seq, kv_heads_per_gather=number))
            for number in sorted({1, 2, G})
            if G % number == 0
        ]
        if H % seq == 0:
            strategies.append(combine(seq))
        for inner, degree in products:
            if inner * degree == seq and H % inner == 0:
                strategies += [
                    combine(inner, exchange(degree=degree, chunks_per_device=chunks))
                    for exchange in (Ring, AllGather)
                    for chunks in (2, 8)
                    if chunks == 2 or (H, G) == (6, 2)
                ]
        for strategy in strategies:
            by_name[f"{H} and {G} heads: {strategy.description}"] = (strategy, H, G)
    return by_name


CASES = list_cases()


def mark(names, *, quick, e2e=()):
    """The cases with their tiers: others than these are slow."""
    tier = lambda name: (
        [] if name in quick else [getattr(pytest.mark, "e2e" if name in e2e else "slow")]
    )
    return [pytest.param(name, marks=tier(name)) for name in names]


def check(attend, right, inputs, record_property, **options):
    actual = oracle.differentiate(attend)(*inputs, **options)
    assert actual.keys() == right.keys()
    differences = {name: batches.relative_error(actual[name], right[name]) for name in right}
    record_property("largest relative difference", max(differences.values()))
    assert max(differences.values()) < tolerances.STRATEGIES, differences


@functools.cache
def expected(H, G, score=None, *, has_sinks=False):
    options = {"sinks_H": make_sinks(H)} if has_sinks else {}
    attend = oracle.make_attend(score or ScoreConfig())
    return oracle.differentiate(attend)(*make_inputs(H, G), **options)


@pytest.mark.parametrize(
    "name",
    mark(
        CASES,
        quick=[
            "7 and 1 heads: ring of 3",
            "6 and 2 heads: Ulysses of 3 x all_gather of 2 by 1",
            "12 and 4 heads: Ulysses of 6",
        ],
        e2e=["6 and 2 heads: all_gather of 3 by 1 (4 chunks each)"],
    ),
)
def test_every_strategy_equals_one_device(name, record_property):
    strategy, H, G = CASES[name]
    attend = batches.attend_on_shards(make_attend(strategy=strategy, kernel="blockwise"))
    check(attend, expected(H, G), make_inputs(H, G), record_property)


@pytest.mark.parametrize(
    "name",
    mark(
        CASES,
        quick=["8 and 2 heads: Ulysses of 4"],
        e2e=["28 and 4 heads: Ulysses of 4 x ring of 2"],
    ),
)
def test_kinds_softcap_scale_and_sinks_equal_one_device(name, record_property):
    """The kind is traced, as in a scan over layers."""
    strategy, H, G = CASES[name]
    kinds = (ScoreConfig(scale=0.7, softcap=1.5), ScoreConfig(window=13, softcap=2.0))
    attend = batches.attend_on_shards(
        make_attend(strategy=strategy, kernel="blockwise", layer_scores=kinds)
    )
    for kind, score in enumerate(kinds):
        right = expected(H, G, score, has_sinks=True)
        options = {"kind": np.int32(kind), "sinks_H": make_sinks(H)}
        check(attend, right, make_inputs(H, G), record_property, **options)


WINDOWED = [
    *(combine(1, Ring(degree=seq)) for seq in (1, 2, 3, 4, 6, 8)),
    *(combine(1, Ring(degree=seq, chunks_per_device=4)) for seq in (1, 2, 4)),
    *(combine(1, AllGather(degree=seq)) for seq in (1, 4)),
    combine(1, AllGather(degree=3, chunks_per_device=8)),
    *(
        make_strategy(seq=seq, ulysses_degree=degree, tokens=tokens)
        for seq, degree in ((8, 2), (4, 2), (6, 3))
        for tokens in ("ring", "all_gather")
    ),
]

WINDOWS = {
    "only itself": lambda chunk: 1,
    "shorter than a chunk": lambda chunk: chunk // 2,
    "a chunk": lambda chunk: chunk,
    "longer than a chunk": lambda chunk: chunk + 1,
    "several chunks": lambda chunk: 3 * chunk - 1,
    "nearly the row": lambda chunk: L - 1,
    "longer than the row": lambda chunk: L + 1,
}
"""Tokens of a window, by the tokens of a chunk."""

WINDOW_CASES = {
    f"{strategy.description}, {name}": (strategy, WINDOWS[name](strategy.layout.chunk_tokens(L)))
    for strategy in WINDOWED
    for name in WINDOWS
}


@pytest.mark.parametrize(
    "name",
    mark(
        WINDOW_CASES,
        quick=[
            "ring of 4 (4 chunks each), several chunks",
            "Ulysses of 3 x ring of 2, longer than a chunk",
            "all_gather of 1 by 1, a chunk",
        ],
    ),
)
def test_windows_equal_one_device(name, record_property):
    strategy, window = WINDOW_CASES[name]
    score = ScoreConfig(window=window)
    attend = make_attend(strategy=strategy, kernel="blockwise", layer_scores=[score])
    on_mesh = batches.attend_on_shards(attend)
    if window == 1:  # the only weight of a softmax is 1: scores have no gradient
        actual = oracle.differentiate(on_mesh)(*make_inputs(6, 2))
        assert max(np.abs(actual[x]).max() for x in ("dq", "dk")) < tolerances.STRATEGIES
        for key in ("out", "dv"):
            right = expected(6, 2, score)[key]
            assert batches.relative_error(actual[key], right) < tolerances.STRATEGIES
        return
    check(on_mesh, expected(6, 2, score), make_inputs(6, 2), record_property)


def test_tokens_depend_exactly_on_the_tokens_of_their_segment_in_the_window():
    """Gradients of single tokens, at edges of chunks of 12 tokens, of segments and of the row."""
    window = 17
    q, k, v, dout, starts, lengths = make_inputs(2, 1)
    attend = batches.attend_on_shards(
        make_attend(
            strategy=combine(1, Ring(degree=4)),
            kernel="blockwise",
            layer_scores=[ScoreConfig(window=window)],
        )
    )
    segment = np.full((len(q), L), -1)
    for row, places in enumerate(ROWS):
        for number, (start, length) in enumerate(places):
            segment[row, start : start + length] = number

    @jax.jit
    def find_dependence(token):
        compute_token = lambda q, k, v: attend(q, k, v, starts, lengths)[:, token]
        _, pull = jax.vjp(compute_token, q, k, v)
        return [(x != 0).any((2, 3)) for x in pull(dout[:, 0])]

    position = np.arange(L)
    for token in (0, 1, 11, 12, 13, 24, 28, 47, 48, 53, 59, 60, 61, 84, 95):
        distance = token - position
        is_near = (distance >= 0) & (distance < window)
        token_segment = segment[:, token : token + 1]
        is_seen = (segment == token_segment) & (token_segment >= 0) & is_near
        dq, _, dv = find_dependence(token)
        np.testing.assert_array_equal(dv, is_seen)
        assert not dq[:, position != token].any()


def test_halos_end_at_the_beginning_of_the_row():
    for window, hops in ((96, [12] * 7), (30, [12, 12, 5]), (1, [])):
        assert Halo(window=window, chunk_tokens=12, num_chunks=8).hop_tokens == hops


@pytest.mark.parametrize(
    ("seq", "H", "G", "inner"),
    [
        (8, 32, 8, 8),
        (8, 28, 4, 4),
        (16, 28, 4, 4),
        (8, 7, 1, 1),
        (6, 8, 4, 2),
        (64, 32, 8, None),
        (2, 8, 2, 2),  # a ring would send less
        (6, 14, 2, 2),  # a ring of 6 sends as much
    ],
)
def test_auto_is_ulysses_if_possible_else_what_sends_least(seq, H, G, inner):
    strategy, send_bytes = choose(seq, H, G)
    if inner is not None:
        assert strategy.heads.degree == inner
    if H % seq == 0:
        assert strategy == combine(seq)
        return
    degrees = [n for n in range(1, seq) if seq % n == 0 and H % n == 0]
    others = [combine(n, Ring(degree=seq // n)) for n in degrees]
    assert strategy in others
    assert send_bytes(strategy) == min(map(send_bytes, others))


def test_requests_choose_the_degrees_of_every_strategy():
    gather = {"strategy": "all_gather"}
    assert chosen(8, 28, 4, **gather).heads.degree == 4
    for number, degree in ((2, 2), (4, 1)):  # fits the heads of a gather
        exchange = AllGather(degree=8 // degree, kv_heads_per_gather=number)
        strategy = chosen(8, 28, 4, kv_heads_per_gather=number, **gather)
        assert strategy == combine(degree, exchange)
    two = chosen(8, 28, 4, ulysses_degree=2, kv_heads_per_gather=2, **gather)
    assert two == combine(2, AllGather(degree=4, kv_heads_per_gather=2))
    assert (two.seq, two.layout.degree, two.label) == (8, 4, "ulysses 2 x all_gather")
    for strategy in ("ring", "auto"):
        options = {"strategy": strategy}
        assert chosen(8, 28, 4, ulysses_degree=1, **options) == combine(1, Ring(degree=8))
        assert chosen(8, 28, 4, ulysses_degree=2, **options) == combine(2, Ring(degree=4))
        assert chosen(4, 28, 4, ulysses_degree=4, **options) == combine(4)
    assert chosen(4, 28, 4, strategy="ulysses", ulysses_degree=4) == combine(4)
    assert chosen(1, 7, 7, strategy="ring", ulysses_degree=2) == combine(1)
    assert chosen(4, 28, 4, window=100) == combine(4)
    # 1,023 of 32,768 tokens: halos are less than what Ulysses sends; each neighbor sends those of a
    # quarter of the heads between nodes
    assert chosen(32, 28, 4, window=1024).description == "Ulysses of 4 x ring of 8"


def test_masks_of_all_ring_steps_are_not_hoisted_out_of_the_layer_scan():
    """JAX would compute what depends only on the segments in a loop of 6 ring steps before it."""
    attend = batches.attend_on_shards(
        make_attend(strategy=combine(1, Ring(degree=8)), kernel="blockwise")
    )
    starts = jnp.zeros((1, 1), jnp.int32)
    lengths = jnp.full((1, 1), 160, jnp.int32)

    def loss(x):
        layer = lambda x, weight: (x + attend(x * weight, x, x, starts, lengths), None)
        return (jax.lax.scan(layer, x, jnp.ones(3))[0] ** 2).sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((1, 160, 2, K))))
    assert "length=6" in program
    # Masks have 10 tokens. Numbers of chunks for each ring step may be hoisted
    assert not re.findall(r"\[6,2,(?:\d,)*\d\d[0-9,]*\]", program)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "more"), [("blockwise", 1), ("cudnn", 2**0.5)])
def test_merging_in_bfloat16_adds_no_error_to_that_of_one_device(kernel, more, record_property):
    """cuDNN returns each part in bfloat16: one more rounding, the only one in its contract."""
    cudnn_contract.on_cpu()
    inputs = [np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in oracle.draw(2, 512, 4, 2, 64)]
    slots = oracle.make_slots([[(0, 512)], [(0, 100), (100, 412)]], 2)
    wide = [x.astype(np.float32) for x in inputs]
    right = oracle.differentiate(oracle.make_attend())(*wide, *slots)
    errors = []
    for strategy in (combine(1, Ring(degree=8)), combine(1)):
        attend = batches.attend_on_shards(make_attend(strategy=strategy, kernel=kernel))
        actual = oracle.differentiate(attend)(*inputs, *slots)
        errors.append(
            {x: batches.relative_error(np.float32(y), right[x]) for x, y in actual.items()}
        )
    record_property("ring of 8, one device", errors)
    for name, error in errors[1].items():
        assert errors[0][name] <= 1.02 * more * error, (name, errors)


def imbalance(rows, *, row_tokens, degree, zigzag):
    """Number of scores of the busiest device, summed over rows, relative to the mean."""
    layout = Layout(degree=degree if zigzag else 1, chunks_per_device=2)
    order = layout.token_order(row_tokens)
    busiest = 0
    mean = 0
    for lengths in rows:
        scores = np.zeros(row_tokens)
        scores[: sum(lengths)] = np.concatenate([np.arange(1, length + 1) for length in lengths])
        by_device = scores[order].reshape(degree, -1).sum(1)
        busiest += by_device.max()
        mean += by_device.mean()
    return float(busiest / mean)


def test_zigzag_balances_causal_work(record_property):
    """8 devices: one document, and packed documents of 50 to 65,536 tokens, log-uniform."""
    size = {"row_tokens": 65536, "degree": 8}
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(50), np.log(65536), 1000)).astype(
        np.int64
    )
    segments = packing.split_documents(lengths, 65536)
    plan = packing.plan_rows(segments, row_tokens=65536, max_segments=64, seed=0)
    mix = [plan.row(number).length for number in range(len(plan))]
    ratios = {
        name: [imbalance(rows, **size, zigzag=zigzag) for zigzag in (True, False)]
        for name, rows in (("one", [[65536]]), ("mix", mix))
    }
    record_property("zigzag, contiguous", ratios)
    assert ratios["one"] == pytest.approx([1, 15 / 8], rel=1e-4)
    # 1.58 and 2.01: a document in one or two chunks cannot be shared by all devices
    assert ratios["mix"][0] < 0.8 * ratios["mix"][1]
