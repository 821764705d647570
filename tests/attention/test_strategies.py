"""Every kind of attention with every number of heads on every number of devices; which kind is chosen, and what it sends."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp import attention
from jaxsp.attention import strategies
from jaxsp.attention.kernels import blockwise_rows
from jaxsp.attention.strategies import LayerWorkload, Strategy
from jaxsp.config.schema import AttentionConfig
from jaxsp.core import layout
from jaxsp.core.errors import UserError
from jaxsp.data.packing import packing
from tests import batches, tolerances
from tests.attention import cudnn_contract
from tests.messages import assert_names

L, K = 96, 8

ROWS = [
    [(0, 10), (10, 14), (24, 70)],
    [(3, 90)],
    [(0, 7), (7, 50), (60, 9), (70, 26)],
    [(0, 96)],
    [],
]
"""Start and length of each piece: over many chunks and inside one, gaps between and behind, one that fills its row, none."""


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_rows, "BLOCK_TOKENS", 8)
        yield


def layer(H, G, **changes):
    fields = {
        "num_rows": 1,
        "tokens_per_device": 1024,
        "head_dim": 128,
        "itemsize": 2,
        "remat": "save_attention",
    }
    return LayerWorkload(num_heads=H, num_kv_heads=G, **fields | changes)


def chosen(seq, H, G, *, window=None, **asked):
    return strategies.choose(AttentionConfig(**asked), layer(H, G), seq=seq, window=window)


def cases():
    """Every kind that can be made of these heads on so many devices, by its name."""
    heads = [(H, G) for H, G in itertools.product((8, 6, 7, 28, 5), (8, 4, 3, 2, 1)) if H % G == 0]
    hybrids = {(2, 4), (4, 2), (2, 2), (3, 2)}
    found = {}
    for seq, (H, G) in itertools.product((2, 3, 4, 6, 8), heads):
        of = [Strategy(seq=seq, ulysses_degree=1), chosen(seq, H, G)]
        of += [
            Strategy(
                seq=seq, ulysses_degree=1, outer_strategy="all_gather", kv_heads_per_gather=lot
            )
            for lot in {1, 2, G}
            if G % lot == 0
        ]
        of += [Strategy(seq=seq, ulysses_degree=seq)] * (H % seq == 0)
        for inner, degree in hybrids:
            if inner * degree == seq and H % inner == 0:
                of += [
                    Strategy(seq=seq, ulysses_degree=inner, outer_strategy=outer)
                    for outer in ("ring", "all_gather")
                ]
        for kind in of:
            lots = f" by {kind.kv_heads_per_gather}" * (kind.outer_strategy == "all_gather")
            found[
                f"{H} and {G} heads: {kind.ulysses_degree} x {kind.outer_degree} {kind.outer_strategy}{lots}"
            ] = (kind, H, G)
    return found


CASES = cases()

QUICK = {
    "7 and 1 heads: 1 x 3 ring",
    "28 and 4 heads: 4 x 2 ring",
    "6 and 2 heads: 3 x 2 all_gather by 1",
    "8 and 4 heads: 1 x 6 all_gather by 2",
    "5 and 1 heads: 1 x 8 all_gather by 1",
}
"""Those in the default tier."""


def inputs(H, G):
    rng = np.random.default_rng(0)
    starts, lengths = np.zeros((2, len(ROWS), 5), np.int32)
    for row, places in enumerate(ROWS):
        for slot, (start, length) in enumerate(places):
            starts[row, slot], lengths[row, slot] = start, length
    return [
        *(rng.standard_normal((len(ROWS), L, heads, K), np.float32) for heads in (H, G, G, H)),
        starts,
        lengths,
    ]


def results(attend, given):
    """The output, dq, dk and dv."""

    @jax.jit
    def run(q, k, v, dout, starts, lengths):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), strict=True))

    return jax.tree.map(np.asarray, run(*given))


@functools.cache
def right(H, G):
    return results(attention.make_attend(kernel="reference", window=None), inputs(H, G))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]
)
def test_every_kind_gives_what_one_device_gives(name, record_property):
    kind, H, G = CASES[name]
    found = results(
        batches.on_shares(attention.make_attend(strategy=kind, kernel="blockwise", window=None)),
        inputs(H, G),
    )
    differences = {one: batches.difference(found[one], right(H, G)[one]) for one in found}
    record_property("largest relative difference", max(differences.values()))
    assert max(differences.values()) < tolerances.KINDS, differences


def test_the_quick_ones_are_among_them():
    assert CASES.keys() >= QUICK


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
def test_auto_is_ulysses_where_it_can_be_else_what_sends_least(seq, H, G, inner):
    kind = chosen(seq, H, G)
    if inner is not None:
        assert kind.ulysses_degree == inner
    others = strategies.list_strategies(
        seq=seq, num_heads=H, num_kv_heads=G, outer_strategy="ring", kv_heads_per_gather=None
    )
    least = min(sum(strategies.sent_bytes(one, layer(H, G)).values()) for one in others)
    assert kind.outer_degree == 1 or sum(strategies.sent_bytes(kind, layer(H, G)).values()) == least
    assert (kind.outer_degree == 1) == (H % seq == 0)


def test_of_hybrids_that_send_as_much_the_one_with_more_neighbours_is_taken():
    kind = chosen(12, 6, 3, strategy="hybrid", outer_strategy="all_gather")
    also = Strategy(seq=12, ulysses_degree=3, outer_strategy="all_gather")
    assert sum(strategies.sent_bytes(also, layer(6, 3)).values()) == sum(
        strategies.sent_bytes(kind, layer(6, 3)).values()
    )
    assert kind.ulysses_degree == 6


def test_neighbours_are_chosen_so_that_heads_can_be_gathered_as_asked():
    assert chosen(8, 28, 4, strategy="hybrid", outer_strategy="all_gather").ulysses_degree == 4
    assert (
        chosen(
            8, 28, 4, strategy="hybrid", outer_strategy="all_gather", kv_heads_per_gather=2
        ).ulysses_degree
        == 2
    )
    assert chosen(8, 28, 4, outer_strategy="all_gather", kv_heads_per_gather=4).ulysses_degree == 1


def test_outer_says_what_auto_and_hybrid_do_between_neighbours():
    assert chosen(8, 28, 4, outer_strategy="all_gather").outer_strategy == "all_gather"
    kind = chosen(
        8,
        28,
        4,
        strategy="hybrid",
        outer_strategy="all_gather",
        ulysses_degree=2,
        kv_heads_per_gather=2,
    )
    assert (
        kind.ulysses_degree,
        kind.outer_degree,
        kind.outer_strategy,
        kind.kv_heads_per_gather,
        kind.name,
    ) == (
        2,
        4,
        "all_gather",
        2,
        "hybrid",
    )
    assert chosen(8, 28, 4, strategy="hybrid", ulysses_degree=2).ulysses_degree == 2
    assert chosen(1, 7, 7, strategy="ring").outer_degree == 1


PER_GATHER = "attention.kv_heads_per_gather"


@pytest.mark.parametrize(
    ("seq", "H", "G", "asked", "start", "parts"),
    [
        (8, 28, 4, {"strategy": "ulysses"},
         "mesh.seq = 8: ", ["28", "mesh.seq=1, 2, 4, 7, 14 or 28", "attention.strategy=auto"]),
        (8, 28, 4, {"strategy": "all_gather", "kv_heads_per_gather": 3},
         f"{PER_GATHER} = 3: ", ["1, 2 or 4"]),
        (8, 28, 4, {"strategy": "ring", "kv_heads_per_gather": 2},
         f"{PER_GATHER} = 2: ", ["ring of 8", f"{PER_GATHER}=null"]),
        (4, 28, 4, {"kv_heads_per_gather": 2},
         f"{PER_GATHER} = 2: ", ["Ulysses of 4", "attention.strategy=all_gather"]),
        (8, 28, 4, {"strategy": "hybrid", "kv_heads_per_gather": 1},
         f"{PER_GATHER} = 1: ", ["Ulysses of 4 x ring of 2", "attention.outer_strategy=all_gather"]),
        (6, 32, 8, {"strategy": "ulysses", "window": 100},
         "mesh.seq = 6: ", ["32", "mesh.seq=1, 2, 4, 8, 16 or 32"]),
        (8, 28, 4, {"strategy": "ring", "outer_strategy": "all_gather"},
         "attention.outer_strategy = all_gather: ", ["attention.outer_strategy=ring", "attention.strategy=hybrid"]),
        (8, 28, 4, {"strategy": "hybrid", "ulysses_degree": 8},
         "attention.ulysses_degree = 8: ", ["mesh.seq = 8", "28", "2 or 4", "null"]),
        (8, 7, 7, {"strategy": "hybrid"},
         "attention.strategy = hybrid: ", ["mesh.seq = 8", "7", "attention.strategy=auto"]),
        (8, 28, 4, {"ulysses_degree": 4},
         "attention.ulysses_degree = 4: ", ["attention.ulysses_degree=null", "attention.strategy=hybrid"]),
        (8, 28, 4, {"window": 100},
         "attention.strategy = auto: ", ["100", "mesh.seq=1, 2, 4, 7, 14 or 28"]),
        (4, 28, 4, {"strategy": "all_gather", "window": 100},
         "attention.strategy = all_gather: ", ["100", "all_gather", "attention.strategy=ulysses"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_can(seq, H, G, asked, start, parts):
    with pytest.raises(UserError) as caught:
        chosen(seq, H, G, **asked)
    assert_names(caught.value, *parts, start=start)
    if "window" in asked:
        assert "attention.strategy=auto" not in str(caught.value), "auto has no windows either"


def test_ulysses_serves_windows():
    assert chosen(4, 28, 4, window=100).outer_degree == 1


@pytest.mark.parametrize("kernel", ["reference", lambda *_: None], ids=["reference", "own"])
def test_a_kernel_without_parts_is_refused_where_parts_are_needed(kernel):
    with pytest.raises(
        UserError,
        match=r"attention\.kernel = .*blockwise or cudnn.*attention\.strategy=ulysses",
    ):
        attention.make_attend(
            strategy=Strategy(seq=4, ulysses_degree=1), kernel=kernel, window=None
        )


def test_nothing_is_computed_for_all_turns_before_the_first_layer():
    """Of what hangs on the pieces alone JAX would make a loop of its own before that over layers: 6 turns of 8 devices."""
    attend = batches.on_shares(
        attention.make_attend(
            strategy=Strategy(seq=8, ulysses_degree=1), kernel="blockwise", window=None
        )
    )
    starts, lengths = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 160, jnp.int32)

    def loss(x):
        layer = lambda x, weight: (x + attend(x * weight, x, x, starts, lengths), None)
        return (jax.lax.scan(layer, x, jnp.ones(3))[0] ** 2).sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((1, 160, 2, K))))
    assert "length=6" in program
    assert not re.findall(r"\[6,2,[0-9,]+\]", program)


def merge_errors(kernel, degree=8, tokens=512):
    """Differences in bfloat16 from the reference in float32: of a ring, and of one device's kernel."""
    rng = np.random.default_rng(0)
    H, G = 4, 2
    given = [
        jnp.asarray(rng.standard_normal((2, tokens, heads, 64)), jnp.bfloat16)
        for heads in (H, G, G, H)
    ]
    starts, lengths = np.int32([[0, 0], [0, 100]]), np.int32([[tokens, 0], [100, tokens - 100]])
    ring = batches.on_shares(
        attention.make_attend(
            strategy=Strategy(seq=degree, ulysses_degree=1), kernel=kernel, window=None
        )
    )
    alone = attention.make_attend(kernel=kernel, window=None)
    exact = attention.make_attend(kernel="reference", window=None)
    right = results(exact, [*(np.asarray(x, np.float32) for x in given), starts, lengths])
    return [
        {
            name: batches.difference(np.asarray(x, np.float32), right[name])
            for name, x in found.items()
        }
        for found in (results(attend, [*given, starts, lengths]) for attend in (ring, alone))
    ]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kernel", "more"), [("blockwise", 1), pytest.param("cudnn", 2**0.5, marks=pytest.mark.slow)]
)
def test_in_bfloat16_merging_adds_nothing_to_what_one_kernel_rounds(kernel, more, record_property):
    """cuDNN gives each part in bfloat16, which is rounding once more: its contract rounds nothing else."""
    if kernel == "cudnn":
        cudnn_contract.on_cpu()
    of_ring, of_one = merge_errors(kernel)
    record_property("ring of 8, one device", (of_ring, of_one))
    for name, error in of_one.items():
        assert of_ring[name] <= 1.02 * more * error, (name, of_ring, of_one)


def busy(rows, *, row_tokens, degree, zigzag):
    """The scores of the device with most to do, summed over rows, over those of devices with as much to do as each other."""
    order, slowest, even = layout.token_order(row_tokens, degree if zigzag else 1), 0, 0
    for lengths in rows:
        scores = np.zeros(row_tokens)
        scores[: sum(lengths)] = np.concatenate([np.arange(1, length + 1) for length in lengths])
        of_devices = scores[order].reshape(degree, -1).sum(1)
        slowest, even = slowest + of_devices.max(), even + of_devices.mean()
    return float(slowest / even)


def test_in_zigzag_causal_work_is_even(record_property):
    """At 8 devices, for one document, and for rows packed of documents of 50 to 65,536 tokens, as many of each magnitude."""
    size = {"row_tokens": 65536, "degree": 8}
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(50), np.log(65536), 1000)).astype(
        np.int64
    )
    plan = packing.plan_rows(lengths, row_tokens=65536, max_segments=64, seed=0)
    mix = [plan.row(number).length for number in range(len(plan))]
    found = {
        what: [busy(rows, **size, zigzag=zigzag) for zigzag in (True, False)]
        for what, rows in (("one", [[65536]]), ("mix", mix))
    }
    record_property("in zigzag, contiguous", found)
    assert found["one"] == pytest.approx([1, 15 / 8], rel=1e-4)
    assert (
        found["mix"][0] < 0.8 * found["mix"][1]
    )  # 1.58 and 2.01: a document in one or two chunks cannot be shared by all
