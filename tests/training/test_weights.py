"""Placement of weights on devices, and random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.layers import Parameter
from jaxsp.model import decoder
from jaxsp.sharding import sharding
from jaxsp.sharding.sharding import Gather, Placement, Shard
from jaxsp.training import train_state
from tests import batches
from tests.training import runs


@pytest.fixture(scope="module", autouse=True)
def sharded(small_shards):
    """Small weights are sharded."""


@pytest.mark.parametrize(
    ("shape", "dim", "stored"),
    [
        ((64, 128), 0, (64, 128)),
        ((64, 60), 0, (64, 60)),
        ((60, 64), 1, (60, 64)),
        ((257, 300), 1, (257, 304)),
        ((257, 130), 0, (264, 130)),
        ((101,), 0, (104,)),
        ((99,), None, (99,)),
        ((9, 11), None, (9, 11)),
    ],
)
def test_a_weight_is_cut_along_the_first_dim_that_divides_else_filled_up(shape, dim, stored):
    row = Parameter(shape=shape, hf_name="a")
    assert sharding.choose_placement(row, 8) == Placement(dim=dim, stored_shape=stored)
    assert sharding.choose_placement(row, 1) == Placement(dim=None, stored_shape=shape)


@pytest.mark.parametrize(
    ("sizes", "has_process_per_replica"),
    [((1, 1, 1), False), ((1, 2, 4), False), ((2, 1, 4), False), ((2, 2, 2), True)],
)
def test_loaded_weights_are_those_that_are_put_and_each_part_is_read_once(
    sizes, has_process_per_replica, monkeypatch
):
    mesh = batches.mesh(*sizes)
    if has_process_per_replica:
        monkeypatch.setattr(sharding, "find_readers", lambda mesh: {*mesh.devices[0].flat})
    table = decoder.param_table(runs.MODEL)
    whole = runs.draw_weights(runs.MODEL)
    of_row = dict(
        zip([row.hf_name for row in jax.tree.leaves(table)], jax.tree.leaves(whole), strict=True)
    )
    reads = jax.tree.map(lambda row: np.zeros(row.stacked_shape, int), table)
    counts = dict(zip(of_row, jax.tree.leaves(reads), strict=True))

    def read(row, layer, index):
        place = index if layer is None else (layer, *index)
        counts[row.hf_name][place] += 1
        return np.asarray(of_row[row.hf_name][place], np.float32)

    loaded = train_state.load_weights(table, mesh, read)
    right = runs.put_weights(table, whole, mesh)
    for row, actual, put in zip(*map(jax.tree.leaves, (table, loaded, right)), strict=True):
        assert (actual.shape, actual.dtype, actual.sharding) == (
            put.shape,
            put.dtype,
            put.sharding,
        ), row.hf_name
        assert batches.is_bitwise_equal(runs.remove_padding(row, actual), of_row[row.hf_name])
        for shard, expected in zip(actual.addressable_shards, put.addressable_shards, strict=True):
            assert (shard.device, shard.index) == (expected.device, expected.index)
            assert batches.is_bitwise_equal(shard.data, expected.data), row.hf_name
        assert (counts[row.hf_name] == 1).all(), row.hf_name


def test_random_steps_have_a_softplus_with_a_uniform_logarithm():
    params = {
        "a": Parameter(shape=(4000,), hf_name="a", mean=1.0, softplus_range=(1e-3, 0.1)),
        "b": Parameter(shape=(3,), hf_name="b", mean=1.0, softplus_range=(1e-2, 1e-2)),
    }
    drawn = train_state.random_weights(params, seed=5, mesh=batches.mesh(1, 1, 1))
    steps = np.log1p(np.exp(np.asarray(drawn["a"], np.float64)))
    exponents = np.log10(steps)
    assert (exponents.min(), exponents.max()) == pytest.approx((-3, -1), abs=0.01)
    assert (exponents.mean(), exponents.std()) == pytest.approx((-2, 2 / 12**0.5), abs=0.05)
    assert np.log1p(np.exp(drawn["b"])) == pytest.approx(1e-2, rel=1e-4)


def test_random_weights_are_the_same_on_every_mesh_and_as_the_table_says():
    table = decoder.param_table(runs.MODEL)
    first, other = (
        jax.tree.map(
            runs.remove_padding,
            table,
            train_state.random_weights(table, seed=5, mesh=batches.mesh(*sizes)),
        )
        for sizes in ((1, 1, 1), (1, 2, 4))
    )
    assert batches.is_bitwise_equal(other, first)
    again = train_state.random_weights(table, seed=6, mesh=batches.mesh(1, 1, 1))
    assert np.mean(np.asarray(again["head"]) == first["head"]) < 0.01
    for row, array in zip(jax.tree.leaves(table), jax.tree.leaves(first), strict=True):
        of_norm = "norm" in row.hf_name
        assert (row.mean, row.std) == (
            1.0 if of_norm else 0.0,
            0.0 if of_norm or "bias" in row.hf_name else 0.08,
        )
        assert array.mean(dtype=np.float64) == pytest.approx(
            row.mean, abs=5 * row.std / array.size**0.5
        )
        assert array.std(dtype=np.float64) == pytest.approx(
            row.std, abs=5 * row.std / (2 * array.size) ** 0.5
        )
    matrices = [leaf for leaf in jax.tree.leaves(first) if leaf.std() > 0]
    # no weight repeats another, no layer the one before
    starts = np.concatenate(
        [leaf.reshape(-1, leaf[0].size)[:, :4] for leaf in matrices if leaf.ndim == 3]
    )
    assert len(np.unique(starts, axis=0)) == len(starts) == 2 * 7


def test_all_gather_raises_when_it_is_differentiated_and_gather_has_a_gradient():
    """Holders are differentiated: otherwise the gradient of a gathered weight would be zero."""
    row = Parameter(shape=(2, 3), hf_name="a")
    gather = Gather(
        num_shards=1, compute_dtype=jnp.dtype("float32"), reduce_dtype=jnp.dtype("float32")
    )
    value = jnp.arange(6.0).reshape(2, 3)

    def loss(holder, join):
        return (join(row, Shard(value=value, grad_holder=holder)) ** 2).sum()

    holder = jnp.zeros((2, 3))
    assert float(jax.jit(loss, static_argnums=1)(holder, gather.all_gather)) == 55
    assert (jax.grad(loss)(holder, gather) == 2 * value).all()
    for differentiate in (jax.grad(loss), jax.grad(jax.checkpoint(loss, static_argnums=1))):
        with pytest.raises(TypeError, match=r"gather\(param, shard\)"):
            differentiate(holder, gather.all_gather)
