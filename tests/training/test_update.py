"""The update of a step: clipping, the optimizer, the guard against NaN, memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import combine
from jaxsp.core.batch import NO_LABEL
from jaxsp.model import decoder
from jaxsp.optimizers import optimizer
from jaxsp.training import train_step
from jaxsp.training.train_state import TrainState
from tests import batches, messages, tolerances
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


@pytest.mark.slow  # test_optimizers.py tests the others
def test_adamw_is_that_of_optax_on_whole_weights(adamw, weights):
    """Clipping, schedule and decay included. Optax gets each stacked weight as one array."""
    state = adamw.state(weights)
    rows = adamw.rows(runs.ROWS)
    with_gradients = runs.compile_in_thread(
        (1, 2, 4), config=ADAMW, functions=("gradients",)
    ).result()
    decays = {name: is_matrix(name) for name in batches.name_leaves(weights)}
    rates = optax.join_schedules(
        [optax.linear_schedule(0.5e-2, 1e-2, 1), optax.cosine_decay_schedule(1e-2, 3)], [2]
    )
    theirs = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(rates, b1=0.9, b2=0.99, eps=1e-5, weight_decay=0.1, mask=decays),
    )
    right = {name: jnp.asarray(array) for name, array in batches.name_leaves(weights).items()}
    with jax.numpy_dtype_promotion("standard"):
        opt = theirs.init(right)
        update = jax.jit(theirs.update)
        for _ in range(3):
            gradients = adamw.unpad(with_gradients.gradients(state.master, rows)[0])
            moves, opt = update(
                {name: jnp.asarray(array) for name, array in gradients.items()}, opt, right
            )
            right = optax.apply_updates(right, moves)
            state, metrics = adamw.step(state, rows)
    assert metrics["grad_norm"] > 0.5, "nothing was clipped"
    actual = adamw.unpad(state.master)
    before = batches.name_leaves(weights)
    differences = {
        name: batches.relative_error(actual[name] - before[name], right[name] - before[name])
        for name in right
    }
    assert max(differences.values()) < tolerances.OPTIMIZER, differences


@pytest.mark.slow
def test_only_matrices_decay():
    for row in jax.tree.leaves(decoder.param_table(runs.MODEL)):
        move = optimizer.build_transform(ADAMW.optimizer, row)
        weight = jnp.ones(row.shape)
        with jax.numpy_dtype_promotion("standard"):
            moves, _ = move.update(jnp.zeros(row.shape), move.init(weight), weight)
        name = row.hf_name.removesuffix(".weight")
        assert np.unique(moves) == np.float32(0.1 if is_matrix(name) else 0), row.hf_name


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


@pytest.fixture(scope="module")
def without_collectives():
    return jax.jit(lambda x: x + 1).lower(1.0).compile()


@pytest.mark.parametrize(
    ("strategy", "window"),
    [
        (combine(1), None),
        (combine(4), 1),
        (combine(1, Ring(degree=4)), 2),
        (combine(1, Ring(degree=4)), None),
    ],
)
def test_a_step_whose_attention_must_communicate_but_does_not_is_refused(
    without_collectives, strategy, window
):
    with pytest.raises(RuntimeError, match=messages.containing("mesh.seq = 4", "mesh.seq=1")):
        train_step.check_collectives(make_windowed(strategy, window), without_collectives)


def test_tokens_that_see_only_themselves_need_no_communication(without_collectives):
    for strategy in (
        combine(1, Ring(degree=4)),
        combine(1, AllGather(degree=4)),
        combine(1, AllGather(degree=4, chunks_per_device=4)),
    ):
        spec = make_windowed(strategy, 1)
        assert train_step.check_collectives(spec, without_collectives) is without_collectives


def make_windowed(strategy, window):
    """Program on four devices of a model whose layers have a window."""
    layers = [dataclasses.replace(layer, window=window) for layer in runs.MODEL.layers]
    model = dataclasses.replace(runs.MODEL, layers=tuple(layers))
    choice = batches.attention_choice(strategy=strategy, layer_scores=model.layer_scores)
    return dataclasses.replace(runs.make_spec({}, model=model), attention=choice)
