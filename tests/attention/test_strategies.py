"""Every strategy with many numbers of heads and devices; the chosen strategy, and its traffic."""

import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.selection import choose_strategy
from jaxsp.attention.strategies.all_gather import AllGather
from jaxsp.attention.strategies.attention_config import AttentionConfig
from jaxsp.attention.strategies.ring import Ring
from jaxsp.attention.strategies.strategy import combine
from jaxsp.attention.strategies.workload import GroupRows, LayerWorkload
from jaxsp.core.layout import Layout
from jaxsp.data import packing
from tests import batches, tolerances
from tests.attention import cudnn_contract, oracle

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


def layer(H, G, **changes):
    fields = {
        "num_rows": 1,
        "tokens_per_device": 1024,
        "head_dim": 128,
        "dtype": "bfloat16",
        "row_tokens": 1024,
        "max_segments": 1,
    }
    return LayerWorkload(num_heads=H, num_kv_heads=G, **fields | changes)


def send_bytes(strategy, H, G):
    return sum(strategy.sent_bytes(layer(H, G)).values())


def chosen(seq, H, G, *, window=None, **attention_fields):
    model = types.SimpleNamespace(
        num_heads=H, num_kv_heads=G, head_dim=128, layer_scores=[ScoreConfig(window=window)]
    )
    rows = GroupRows(num_rows=1, row_tokens=1000 * seq, max_segments=64, seq=seq, dtype="bfloat16")
    return choose_strategy(AttentionConfig(**attention_fields), rows, model)


def cases():
    """Every strategy for these heads and numbers of devices, by description."""
    heads = [(H, G) for H, G in itertools.product((8, 6, 7, 28, 5), (8, 4, 3, 2, 1)) if H % G == 0]
    products = {(2, 4), (4, 2), (2, 2), (3, 2)}
    by_name = {}
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
                outers = [
                    exchange(degree=degree, chunks_per_device=chunks)
                    for exchange in (Ring, AllGather)
                    for chunks in (2, 8)
                    if chunks == 2 or (H, G) == (6, 2)
                ]
                strategies += [combine(inner, outer) for outer in outers]
        for strategy in strategies:
            by_name[f"{H} and {G} heads: {strategy.description}"] = (strategy, H, G)
    return by_name


CASES = cases()

QUICK = {"7 and 1 heads: ring of 3", "6 and 2 heads: Ulysses of 3 x all_gather of 2 by 1"}
"""Those in the default tier, besides those of `test_kinds.py`."""

E2E = {
    "6 and 2 heads: all_gather of 3 by 1 (4 chunks each)",
}


def mark(name):
    """Marks of a case: others are slow."""
    return [] if name in QUICK else [pytest.mark.e2e if name in E2E else pytest.mark.slow]


def inputs(H, G):
    rng = np.random.default_rng(0)
    starts, lengths = np.zeros((2, len(ROWS), 5), np.int32)
    for row, places in enumerate(ROWS):
        for slot, (start, length) in enumerate(places):
            starts[row, slot] = start
            lengths[row, slot] = length
    return [
        *(rng.standard_normal((len(ROWS), L, heads, K), np.float32) for heads in (H, G, G, H)),
        starts,
        lengths,
    ]


def results(attend, inputs):
    """The output, dq, dk and dv."""

    @jax.jit
    def run(q, k, v, dout, starts, lengths):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), strict=True))

    return jax.tree.map(np.asarray, run(*inputs))


@functools.cache
def expected(H, G):
    return results(make_attend(kernel=oracle.attention), inputs(H, G))


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in CASES])
def test_every_strategy_equals_one_device(name, record_property):
    strategy, H, G = CASES[name]
    attend = make_attend(strategy=strategy, kernel="blockwise")
    actual = results(batches.attend_on_shards(attend), inputs(H, G))
    differences = {
        key: batches.relative_error(value, expected(H, G)[key]) for key, value in actual.items()
    }
    record_property("largest relative difference", max(differences.values()))
    assert max(differences.values()) < tolerances.STRATEGIES, differences


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
    strategy = chosen(seq, H, G)
    if inner is not None:
        assert strategy.heads.degree == inner
    if H % seq == 0:
        assert strategy == combine(seq)
        return
    degrees = [n for n in range(2, seq) if seq % n == 0 and H % n == 0]
    others = [combine(1, Ring(degree=seq)), *(combine(n, Ring(degree=seq // n)) for n in degrees)]
    assert strategy in others
    assert send_bytes(strategy, H, G) == min(send_bytes(other, H, G) for other in others)


def test_the_degree_fits_the_heads_per_gather():
    gather = {"strategy": "all_gather"}
    assert chosen(8, 28, 4, **gather).heads.degree == 4
    two = chosen(8, 28, 4, kv_heads_per_gather=2, **gather)
    assert two == combine(2, AllGather(degree=4, kv_heads_per_gather=2))
    four = chosen(8, 28, 4, kv_heads_per_gather=4, **gather)
    assert four == combine(1, AllGather(degree=8, kv_heads_per_gather=4))


def test_a_requested_degree_is_that_of_ulysses_in_every_strategy():
    gather = chosen(8, 28, 4, strategy="all_gather", ulysses_degree=2, kv_heads_per_gather=2)
    assert gather == combine(2, AllGather(degree=4, kv_heads_per_gather=2))
    assert (gather.seq, gather.layout.degree, gather.label) == (8, 4, "ulysses 2 x all_gather")
    for strategy in ("ring", "auto"):
        options = {"strategy": strategy}
        assert chosen(8, 28, 4, ulysses_degree=1, **options) == combine(1, Ring(degree=8))
        assert chosen(8, 28, 4, ulysses_degree=2, **options) == combine(2, Ring(degree=4))
        assert chosen(4, 28, 4, ulysses_degree=4, **options) == combine(4)
    assert chosen(4, 28, 4, strategy="ulysses", ulysses_degree=4) == combine(4)
    assert chosen(1, 7, 7, strategy="ring", ulysses_degree=2) == combine(1)


def test_windows_do_not_limit_the_strategies():
    assert chosen(4, 28, 4, window=100) == combine(4)
    assert chosen(8, 28, 4, ulysses_degree=1, window=100) == combine(1, Ring(degree=8))
    # 1,023 of 32,768 tokens: halos are less than what Ulysses sends; each neighbor sends those of a
    # quarter of the heads between nodes
    best = chosen(32, 28, 4, window=1024)
    assert best.description == "Ulysses of 4 x ring of 8"


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


def merge_errors(kernel, degree=8, tokens=512):
    """Errors in bfloat16 of a ring and of one device, against the oracle in float32."""
    rng = np.random.default_rng(0)
    H = 4
    G = 2
    inputs = [
        jnp.asarray(rng.standard_normal((2, tokens, heads, 64)), jnp.bfloat16)
        for heads in (H, G, G, H)
    ]
    starts = np.int32([[0, 0], [0, 100]])
    lengths = np.int32([[tokens, 0], [100, tokens - 100]])
    ring = batches.attend_on_shards(
        make_attend(strategy=combine(1, Ring(degree=degree)), kernel=kernel)
    )
    single = make_attend(kernel=kernel)
    exact = make_attend(kernel=oracle.attention)
    right = results(exact, [*(np.asarray(x, np.float32) for x in inputs), starts, lengths])
    errors = []
    for attend in (ring, single):
        actual = results(attend, [*inputs, starts, lengths])
        errors.append(
            {
                name: batches.relative_error(np.asarray(x, np.float32), right[name])
                for name, x in actual.items()
            }
        )
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "more"), [("blockwise", 1), pytest.param("cudnn", 2**0.5, marks=pytest.mark.slow)]
)
def test_merging_in_bfloat16_adds_no_error_to_that_of_one_device(kernel, more, record_property):
    """cuDNN returns each part in bfloat16: one more rounding, the only one in its contract."""
    if kernel == "cudnn":
        cudnn_contract.on_cpu()
    ring_errors, single_errors = merge_errors(kernel)
    record_property("ring of 8, one device", (ring_errors, single_errors))
    for name, error in single_errors.items():
        assert ring_errors[name] <= 1.02 * more * error, (name, ring_errors, single_errors)


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
