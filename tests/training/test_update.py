"""The update of a step: clipping, the optimizer, the guard against NaN, memory."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import combine
from jaxsp.core.batch import NO_LABEL
from jaxsp.training import train_step
from jaxsp.training.train_state import TrainState
from tests import batches, messages, tolerances
from tests.training import runs

ADAMW = batches.make_config(name="adamw", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)

pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture(scope="module")
def adamw(small_shards):
    return runs.compile_in_thread((1, 2, 4), config=ADAMW, functions=("step",)).result()


@pytest.fixture(scope="module")
def weights():
    return runs.draw_weights(runs.MODEL)


@pytest.mark.e2e
def test_an_update_is_as_long_as_the_limit(weights):
    run = runs.compile_in_thread(
        (2, 2, 2), config=batches.make_config(max_grad_norm=0.25), functions=("step",)
    ).result()
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
    for name in ("loss", "token_accuracy", "grad_norm", "num_loss_tokens"):
        assert float(metrics[name]) == 0
    assert int(metrics["num_tokens"]) == runs.ROWS["lengths_BM"].sum()


@pytest.mark.e2e
def test_the_state_is_updated_in_place(adamw):
    """Every byte of the state is an output's too, so that no second copy of it exists."""
    state = adamw.state(runs.draw_weights(runs.MODEL))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    taken = adamw.step.memory_analysis()
    assert taken.alias_size_in_bytes >= held
    assert taken.output_size_in_bytes - taken.alias_size_in_bytes < 1024, "the metrics"
    adamw.step(state, adamw.rows(runs.ROWS))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("strategy", "window", "sends"),
    [
        (combine(1), None, True),
        (combine(4), 1, True),
        (combine(1, Ring(degree=4)), 2, True),
        (combine(1, Ring(degree=4)), None, True),
        # tokens that see only themselves
        (combine(1, Ring(degree=4)), 1, False),
        (combine(1, AllGather(degree=4, chunks_per_device=4)), 1, False),
    ],
)
def test_a_step_whose_attention_must_communicate_but_does_not_is_refused(strategy, window, sends):
    without_collectives = jax.jit(lambda x: x + 1).lower(1.0).compile()
    layers = [dataclasses.replace(layer, window=window) for layer in runs.MODEL.layers]
    model = dataclasses.replace(runs.MODEL, layers=tuple(layers))
    choice = batches.attention_choice(strategy=strategy, layer_scores=model.layer_scores)
    spec = dataclasses.replace(runs.make_spec({}, model=model), attention=choice)
    if not sends:
        assert train_step.check_collectives(spec, without_collectives) is without_collectives
        return
    with pytest.raises(RuntimeError, match=messages.containing("mesh.seq = 4", "mesh.seq=1")):
        train_step.check_collectives(spec, without_collectives)
