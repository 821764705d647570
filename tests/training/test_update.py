"""The update of a step: clipping, the optimizer, the guard against NaN, memory."""

import jax
import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL
from jaxsp.training.train_state import TrainState
from tests import batches, tolerances
from tests.training import runs

ADAMW = batches.make_config(
    name="adamw",
    learning_rate=1e-2,
    schedule="cosine",
    warmup_steps=2,
    weight_decay=0.1,
    beta2=0.99,
    max_grad_norm=0.5,
    eps=1e-5,
)
"""With 1e-8, a gradient of 3e-8 that is only rounding would move its weight as far as others."""

CLIPPED = batches.make_config(max_grad_norm=0.25)


pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture(scope="module")
def adamw(small_shards):
    return runs.compile_in_thread((1, 2, 4), config=ADAMW, functions=("step",)).result()


@pytest.fixture(scope="module")
def weights():
    return runs.draw_weights(runs.MODEL)


def is_matrix(name):
    return not name.endswith("bias") and "norm" not in name


@pytest.mark.e2e
def test_an_update_is_as_long_as_the_limit(weights):
    run = runs.compile_in_thread((2, 2, 2), config=CLIPPED, functions=("step",)).result()
    state, metrics = run.step(run.state(weights), run.rows(runs.ROWS))
    before = batches.name_leaves(weights)
    moved = {name: after - before[name] for name, after in run.unpad(state.master).items()}
    assert batches.norm(moved) == pytest.approx(0.25, rel=1e-4)
    _, gradients = runs.compile_reference()(weights, runs.ROWS)
    norm = batches.norm(gradients)
    assert batches.relative_error(metrics["grad_norm"], norm) < tolerances.MESH, (
        "the norm before clipping"
    )
    assert norm > 0.5


@pytest.mark.e2e
@pytest.mark.parametrize(
    "value", [np.nan, np.inf, 1e38, 1e20], ids=["nan", "inf", "infinite loss", "infinite norm"]
)
def test_a_step_that_is_not_finite_changes_nothing(value, adamw, weights):
    state, _ = adamw.step(adamw.state(weights), adamw.rows(runs.ROWS))
    head = np.array(state.master["head"])
    head[5] = value
    head = jax.device_put(head, state.master["head"].sharding)
    state = TrainState(
        master=state.master | {"head": head}, opt_state=state.opt_state, step=state.step
    )
    before = jax.tree.map(np.asarray, state)
    after, metrics = adamw.step(state, adamw.rows(runs.ROWS))
    assert not metrics["is_finite"]
    assert batches.is_bitwise_equal(
        (after.master, after.opt_state), (before.master, before.opt_state)
    )
    assert int(after.step) == 2


@pytest.mark.e2e
def test_a_step_without_labels_changes_nothing(adamw, weights):
    """Neither decay nor the averages of earlier gradients move the weights."""
    state, _ = adamw.step(adamw.state(weights), adamw.rows(runs.ROWS))
    before = jax.tree.map(np.asarray, state)
    unlabelled = runs.ROWS | {"labels_BL": np.full_like(runs.ROWS["labels_BL"], NO_LABEL)}
    after, metrics = adamw.step(state, adamw.rows(unlabelled))
    assert batches.is_bitwise_equal(
        (after.master, after.opt_state), (before.master, before.opt_state)
    )
    assert metrics["is_finite"]
    assert [
        float(x) for x in (metrics["loss"], metrics["token_accuracy"], metrics["grad_norm"])
    ] == [
        0,
        0,
        0,
    ]
    assert int(metrics["num_loss_tokens"]) == 0
    assert int(metrics["num_tokens"]) == runs.ROWS["lengths_BM"].sum()
