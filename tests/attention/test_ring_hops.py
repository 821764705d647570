"""Hops of a ring that no segment needs are left out, on all devices alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.attention.attend import Attend, make_attend
from jaxsp.attention.chunks import ring_hops
from jaxsp.attention.strategies.ring import Ring
from jaxsp.attention.strategies.strategy import combine
from jaxsp.core import axes
from jaxsp.core.layout import Layout
from jaxsp.data import loader
from tests import batches, tolerances
from tests.attention import oracle, test_strategies

L = 96


pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize(
    "layout",
    [Layout(degree=8, chunks_per_device=4), Layout(degree=3, chunks_per_device=8)],
    ids=["8 devices", "3 devices"],
)
def test_a_hop_is_needed_if_a_device_has_work_on_its_keys(layout):
    arrays = batches.make_ragged_rows(num_rows=60, num_tokens=L, vocab_size=11, seed=5)
    arrays["lengths_BM"] = np.minimum(arrays["lengths_BM"], np.arange(60)[:, None] // 4)
    starts_BM = arrays["starts_BM"]
    lengths_BM = arrays["lengths_BM"]
    works = loader.count_row_work(
        starts_BM.ravel(),
        lengths_BM.ravel(),
        np.arange(61) * starts_BM.shape[1],
        row_tokens=L,
        layout=layout,
    )
    found = set()
    for starts, lengths, work in zip(starts_BM, lengths_BM, works, strict=True):
        needed = ring_hops.needs_hop(
            layout, jnp.asarray(starts)[None], jnp.asarray(lengths)[None], row_tokens=L
        )
        expected = work.any(1)
        expected[0] = False
        np.testing.assert_array_equal(needed, expected)
        found.add(int(expected.sum()))
    assert {0, 1, 2, layout.degree - 1} <= found


LOCAL = [(0, 5), (6, 6), (13, 4), (90, 6)]
"""Each in one of 16 chunks."""

EXTENTS = {
    "none": ((2, 4), 4, [LOCAL, [(0, 6)]], ring_hops.NO_HOPS),
    "one, in one group": ((2, 4), 4, [LOCAL, [(3, 6)]], ring_hops.NEAR_HOPS),
    "both neighbors": ((2, 4), 4, [[(0, 8), (30, 10)], LOCAL], ring_hops.NEAR_HOPS),
    "all, in one group": ((2, 4), 4, [[(0, 96)], []], ring_hops.ALL_HOPS),
    "two of seven": ((1, 8), 2, [[(0, 18)]], ring_hops.NEAR_HOPS),
    "one of one": ((4, 2), 8, [[(0, 10)], [], LOCAL, []], ring_hops.ALL_HOPS),
    "none of one": ((4, 2), 8, [LOCAL, [], LOCAL, []], ring_hops.NO_HOPS),
}
"""Devices along data and seq, chunks per device, a row of each group, and the hops of all."""

QUICK = {"two of seven"}
"""Those in the default tier."""

E2E = {"one, in one group"}


def mark(name):
    """Marks of a case: others are slow."""
    return [] if name in QUICK else [pytest.mark.e2e if name in E2E else pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in EXTENTS])
def test_groups_that_need_different_hops_equal_one_device(name, monkeypatch):
    """Transfers are NaN if none is needed."""
    (data, seq), chunks, places, extent = EXTENTS[name]
    strategy = combine(1, Ring(degree=seq, chunks_per_device=chunks))
    attend = make_attend(strategy=strategy, kernel="blockwise")
    if extent == ring_hops.NO_HOPS:
        monkeypatch.setattr(
            Ring, "shift", lambda self, arrays, distance=1: [x * jnp.nan for x in arrays]
        )
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((data, L, heads, 8), np.float32) for heads in (4, 2, 2, 4)]
    starts, lengths = np.zeros((2, data, 5), np.int32)
    for row, segments in enumerate(places):
        for slot, (start, length) in enumerate(segments):
            starts[row, slot] = start
            lengths[row, slot] = length
    attend_rows = AttendGroups(attend, data)
    actual = test_strategies.results(attend_rows, [*inputs, starts, lengths])
    right = make_attend(kernel=oracle.attention)
    expected = test_strategies.results(right, [*inputs, starts, lengths])
    for key in expected:
        assert batches.relative_error(actual[key], expected[key]) < tolerances.STRATEGIES, key
    tables = jax.jit(attend_rows.find_hops)(starts, lengths)
    assert np.unique(tables.extent).tolist() == [extent]


@dataclasses.dataclass
class AttendGroups:
    """Attention on whole rows, of which each group has its own."""

    attend: Attend
    data: int

    def on_mesh(self, function, in_specs, out_specs):
        return jax.shard_map(
            function,
            mesh=batches.mesh(1, self.data, self.attend.strategy.seq),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def find_hops(self, starts, lengths):
        def find(starts, lengths):
            tables = self.attend.make_segment_tables(
                starts, lengths, tokens_per_device=L // self.attend.strategy.seq
            )
            return jax.tree.map(lambda x: x.reshape(1, -1), tables)

        rows = PartitionSpec(axes.GROUPS)
        return self.on_mesh(find, (rows, rows), PartitionSpec(axes.ALL))(starts, lengths)

    def __call__(self, q, k, v, starts, lengths):
        def compute(*inputs):
            tables = self.attend.make_segment_tables(
                *inputs[3:], tokens_per_device=inputs[0].shape[1]
            )
            return self.attend(*inputs, tables)

        order = self.attend.layout.token_order(L)
        shard = PartitionSpec(axes.GROUPS, axes.SEQ)
        rows = PartitionSpec(axes.GROUPS)
        on_mesh = self.on_mesh(compute, (shard, shard, shard, rows, rows), shard)
        out = on_mesh(*(x[:, order] for x in (q, k, v)), starts, lengths)
        return out[:, self.attend.layout.place_of_token(L)]
