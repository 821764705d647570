"""Hops of a ring that no segment needs are left out, on all devices alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.attention import ring
from jaxsp.attention.attend import make_attend
from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import combine
from jaxsp.core import axes
from jaxsp.core.layout import Layout
from jaxsp.data import loader
from tests import batches, tolerances
from tests.attention import oracle

L = 96


pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize(
    "layout",
    [Layout(degree=8, chunks_per_device=4), Layout(degree=3, chunks_per_device=8)],
    ids=["8 devices", "3 devices"],
)
def test_a_hop_is_needed_if_a_device_has_work_on_its_keys(layout):
    arrays = batches.make_ragged_rows(num_rows=60, num_tokens=L, vocab_size=11, seed=5)
    starts_BM = arrays["starts_BM"]
    lengths_BM = np.minimum(arrays["lengths_BM"], np.arange(60)[:, None] // 4)
    works = loader.count_row_work(
        starts_BM.ravel(),
        lengths_BM.ravel(),
        np.arange(61) * starts_BM.shape[1],
        row_tokens=L,
        layout=layout,
    )
    found = set()
    for starts, lengths, work in zip(starts_BM, lengths_BM, works, strict=True):
        slots = jnp.asarray(starts)[None], jnp.asarray(lengths)[None]
        expected = work.any(1)
        expected[0] = False
        np.testing.assert_array_equal(ring.needs_hop(layout, *slots, row_tokens=L), expected)
        found.add(int(expected.sum()))
    assert {0, 1, 2, layout.degree - 1} <= found


LOCAL = [(0, 5), (6, 6), (13, 4), (90, 6)]
"""Each in one of 16 chunks."""

slow = pytest.mark.slow

EXTENTS = [
    pytest.param((2, 4), 4, [LOCAL, [(0, 6)]], ring.NO_HOPS, marks=slow),
    pytest.param((2, 4), 4, [LOCAL, [(3, 6)]], ring.NEAR_HOPS, marks=pytest.mark.e2e),
    pytest.param((2, 4), 4, [[(0, 8), (30, 10)], LOCAL], ring.NEAR_HOPS, marks=slow),
    pytest.param((2, 4), 4, [[(0, 96)], []], ring.ALL_HOPS, marks=slow),
    ((1, 8), 2, [[(0, 18)]], ring.NEAR_HOPS),  # two of seven
    pytest.param((4, 2), 8, [[(0, 10)], [], LOCAL, []], ring.ALL_HOPS, marks=slow),
    pytest.param((4, 2), 8, [LOCAL, [], LOCAL, []], ring.NO_HOPS, marks=slow),
]
"""Devices along data and seq, chunks per device, a row of each group, and the hops of all."""


@pytest.mark.parametrize(("sizes", "chunks", "places", "extent"), EXTENTS)
def test_groups_that_need_different_hops_equal_one_device(
    sizes, chunks, places, extent, monkeypatch
):
    """Transfers are NaN if none is needed."""
    data, seq = sizes
    strategy = combine(1, Ring(degree=seq, chunks_per_device=chunks))
    attend = make_attend(strategy=strategy, kernel="blockwise")
    if extent == ring.NO_HOPS:
        monkeypatch.setattr(
            Ring, "shift", lambda self, arrays, distance=1: [x * jnp.nan for x in arrays]
        )
    rows = PartitionSpec(axes.GROUPS)
    shard = PartitionSpec(axes.GROUPS, axes.SEQ)

    def compute(q, k, v, starts, lengths):
        tables = attend.make_segment_tables(starts, lengths, tokens_per_device=q.shape[1])
        extents = jnp.full((1, q.shape[1]), tables.extent)
        return attend(q, k, v, starts, lengths, tables), extents

    on_mesh = jax.shard_map(
        compute,
        mesh=batches.mesh(1, data, seq),
        in_specs=(shard, shard, shard, rows, rows),
        out_specs=(shard, shard),
        check_vma=False,
    )

    def attend_rows(q, k, v, *slots):
        order = attend.layout.token_order(L)
        out, extents = on_mesh(*(x[:, order] for x in (q, k, v)), *slots)
        return out[:, attend.layout.place_of_token(L)], extents

    inputs = [*oracle.draw(data, L, 4, 2, 8), *oracle.make_slots(places, 5)]
    actual = oracle.differentiate(lambda *x: attend_rows(*x)[0])(*inputs)
    expected = oracle.differentiate(oracle.make_attend())(*inputs)
    for key in expected:
        assert batches.relative_error(actual[key], expected[key]) < tolerances.STRATEGIES, key
    q, k, v, _, *slots = inputs
    assert np.unique(jax.jit(attend_rows)(q, k, v, *slots)[1]).tolist() == [extent]
