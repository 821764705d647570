"""Loss, gradients, weights and counts on every mesh equal those of a reference.

The reference (`runs.compile_reference`) has no mesh, microbatches or tiles, and uses the slow
attention oracle.
"""

import functools

import jax
import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL
from jaxsp.model import decoder
from jaxsp.sharding import sharding
from tests import batches, tolerances
from tests.training import runs

MESHES = {(1, 1, 1): 1, (1, 8, 1): 1, (1, 4, 2): 2, (1, 2, 4): 1, (1, 1, 8): 4, (2, 2, 2): 4}
"""Rows per microbatch by mesh, replica x data x seq: 16 rows are 16, 2, 2, 8, 4 and 1
microbatches."""

MARKS = {(2, 2, 2): ()}
"""Tiers of meshes; the others are slow. `test_own_loss.py` tests three meshes in the default tier,
with only an embedding as the model."""

TIED_MESHES = [
    pytest.param((1, 2, 4), marks=pytest.mark.slow),
    pytest.param((2, 2, 2), marks=pytest.mark.e2e),
]

each_mesh = pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=MARKS.get(sizes, pytest.mark.slow)) for sizes in MESHES],
    ids=lambda sizes: "x".join(map(str, sizes)),
)


TIED = batches.model(tie_embeddings=True)


@pytest.fixture(scope="module", autouse=True)
def run_on(small_shards):
    """Returns a function that compiles a run on a mesh, once per test module."""

    @functools.cache
    def run(sizes, function, tied_head=False):
        model = TIED if tied_head else runs.MODEL
        rows_per_microbatch = 1 if tied_head else MESHES[sizes]
        return runs.compile_in_thread(
            sizes, rows_per_microbatch=rows_per_microbatch, model=model, functions=(function,)
        ).result()

    return run


@pytest.fixture(scope="module")
def weights():
    return runs.draw_weights(runs.MODEL)


@each_mesh
def test_loss_gradients_and_counts_are_those_of_a_plain_program(
    run_on, sizes, weights, record_property
):
    runs.check_gradients(run_on(sizes, "gradients"), weights, runs.ROWS, record_property)


@pytest.mark.e2e
@each_mesh
def test_weights_after_three_steps_are_those_of_a_plain_program(
    run_on, sizes, weights, record_property
):
    """SGD with learning rate 1: each step subtracts the gradient."""
    run = run_on(sizes, "step")
    expected = weights
    state = run.state(weights)
    for step in range(3):
        (loss, _), gradients = runs.compile_reference()(expected, runs.ROWS)
        norm = batches.norm(gradients)
        expected = jax.tree.map(lambda w, g: w - g, expected, gradients)
        state, metrics = run.step(state, run.rows(runs.ROWS))
        assert batches.relative_error(metrics["loss"], loss) < tolerances.MESH
        assert batches.relative_error(metrics["grad_norm"], norm) < tolerances.MESH
        assert metrics["is_finite"]
        assert int(state.step) == step + 1
    actual = run.unpad(state.master)
    expected = batches.name_leaves(expected)
    differences = {name: batches.relative_error(actual[name], expected[name]) for name in expected}
    record_property("largest relative difference of a weight", max(differences.values()))
    assert max(differences.values()) < tolerances.MESH, differences
    moved = {
        name: np.linalg.norm(expected[name] - before)
        for name, before in batches.name_leaves(weights).items()
    }
    assert min(moved.values()) > 1e-3, moved


@pytest.mark.e2e
@each_mesh
def test_padding_of_shards_stays_zero(run_on, sizes, weights):
    """Weights and gradients are zero there, so padding adds nothing to the gradient norm."""
    run = run_on(sizes, "step")
    state = run.state(weights)
    for _ in range(3):
        state, _ = run.step(state, run.rows(runs.ROWS))
    gradients = run_on(sizes, "gradients").gradients(state.master, run.rows(runs.ROWS))[0]
    num_padded = []
    for tree in (state.master, gradients):
        for param, stored in zip(
            jax.tree.leaves(run.spec.table), jax.tree.leaves(tree), strict=True
        ):
            unpadded = runs.remove_padding(param, stored)
            stored = np.asarray(stored)
            assert np.count_nonzero(stored) == np.count_nonzero(unpadded), param.hf_name
            num_padded.append(stored.size - unpadded.size)
    assert any(num_padded) == (np.prod(sizes[1:]) > 1)


def test_the_model_has_weights_of_every_placement():
    """Whole, or sharded along dimension 0 or 1, with or without padding."""
    table = decoder.param_table(runs.MODEL)
    placements = [sharding.choose_placement(param, 8) for param in jax.tree.leaves(table)]
    kinds = {
        (placement.dim, placement.stored_shape != param.shape)
        for placement, param in zip(placements, jax.tree.leaves(table), strict=True)
    }
    assert kinds == {(None, False), (0, False), (1, False), (0, True), (1, True)}


def without_labels(where):
    arrays = {name: array.copy() for name, array in runs.ROWS.items()}
    arrays["labels_BL"][where] = NO_LABEL
    return arrays


# With seq=4 a shard is 16 tokens, a microbatch 2 rows, and a tile 7 tokens
@pytest.mark.parametrize(
    "where",
    [np.s_[:, 32:48], np.s_[0:2], np.s_[1::2], np.s_[:, 16:23], np.s_[0, 1:]],
    ids=["one shard", "a microbatch", "every row of one group", "a tile", "uneven rows"],
)
def test_a_part_without_labels_changes_nothing(run_on, where, weights, record_property):
    runs.check_gradients(
        run_on((1, 2, 4), "gradients"), weights, without_labels(where), record_property
    )


def test_a_row_without_segments_changes_nothing(run_on, weights, record_property):
    arrays = {name: array.copy() for name, array in runs.ROWS.items()}
    for name, array in arrays.items():
        array[5] = NO_LABEL if name == "labels_BL" else 0
    runs.check_gradients(run_on((1, 2, 4), "gradients"), weights, arrays, record_property)


@pytest.mark.parametrize("sizes", TIED_MESHES)
def test_a_tied_head_gets_both_gradients_on_every_mesh(run_on, sizes, record_property):
    run = run_on(sizes, "gradients", tied_head=True)
    assert "head" not in run.spec.table
    runs.check_gradients(run, runs.draw_weights(TIED), runs.ROWS, record_property)
