"""Custom losses and token weights: loss and gradients are the same on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL
from jaxsp.model import decoder
from jaxsp.training import microbatch, step_gradients, train_state, train_step
from jaxsp.training.specs import StepSpec
from tests import batches, tolerances
from tests.training import runs

MODEL = batches.model(num_layers=1, vocab_size=67, hidden_size=20)
ROWS = batches.make_ragged_rows(num_rows=8, num_tokens=64, vocab_size=67, seed=1)
RANDOM = np.random.default_rng(7)
WEIGHTS = RANDOM.uniform(0, 3, ROWS["labels_BL"].shape) * (
    RANDOM.random(ROWS["labels_BL"].shape) < 0.7
)
"""Weights of all tokens. Three in ten are 0, and so are those of the first two rows."""
WEIGHTS[:2] = 0
WEIGHTED = ROWS | {"weights_BL": WEIGHTS.astype(np.float32)}
MESHES = {(1, 1, 4): 2, (1, 2, 2): 1, (2, 2, 2): 2}
"""replica x data x seq, and rows per microbatch of a group: 4, 4 and 1 microbatches."""


def embeddings(shards, rows, *, config, gather, dtype, **_):
    """Hidden states of a model without layers, which compiles in a second; and no statistics."""
    row = decoder.param_table(config)["embedding"]
    hidden_BlD = decoder.embed_tokens(
        gather, row, shards["embedding"], rows.tokens_BL, dtype=dtype, padding_id=None
    )
    return hidden_BlD, {}


@pytest.fixture(autouse=True)
def _without_layers(small_shards, monkeypatch):
    monkeypatch.setattr(microbatch.decoder, "hidden_states", embeddings)


def cross_entropy(logits_TV, labels_T):
    """The default loss, as plain code."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits_TV), labels_T[:, None], axis=-1)[:, 0]


def make_spec(sizes, *, config=runs.SGD, **changes):
    """A step with loss tiles of 7 tokens."""
    return StepSpec(
        config=config.step,
        model=MODEL,
        mesh=batches.mesh(*sizes),
        attention=batches.attention_choice(seq=sizes[-1]),
        num_steps=1,
        **changes,
    )


def on_one_device(arrays, weights, token_loss):
    """Loss and gradients of all tokens at once, by autodiff."""
    tokens, labels = (jnp.asarray(arrays[name]).reshape(-1) for name in ("tokens_BL", "labels_BL"))
    has_label = labels != NO_LABEL
    factors = jnp.asarray(arrays.get("weights_BL", np.ones_like(WEIGHTS, np.float32))).reshape(-1)

    def mean(weights):
        logits_TV = weights["embedding"][tokens] @ weights["head"].T
        losses_T = token_loss(logits_TV, jnp.where(has_label, labels, 0))
        return (
            jnp.where(has_label, factors * losses_T, 0).sum()
            / jnp.where(has_label, factors, 0).sum()
        )

    return jax.value_and_grad(mean)(weights)


@pytest.mark.parametrize(
    ("sizes", "token_loss", "arrays"),
    [
        ((2, 2, 2), runs.label_smoothing_loss, ROWS),
        ((1, 1, 4), None, WEIGHTED),
        ((1, 2, 2), runs.label_smoothing_loss, WEIGHTED),
    ],
    ids=["loss", "weights", "both"],
)
def test_loss_and_gradients_are_those_of_one_device(sizes, token_loss, arrays):
    weights = runs.draw_weights(MODEL)
    result = make_spec(sizes, loss=token_loss)
    run = runs.Run(
        result,
        MESHES[sizes],
        jax.jit(functools.partial(step_gradients.compute_gradients, result)),
        None,
    )
    gradients, actual = run.gradients(run.state(weights).master, run.rows(arrays))
    loss, right = on_one_device(arrays, weights, token_loss or cross_entropy)
    assert batches.relative_error(actual["loss"], loss) < tolerances.MESH
    gradients = run.unpad(gradients)
    for name in ("embedding", "head"):
        assert batches.relative_error(gradients[name], right[name]) < tolerances.MESH, name
    has_label = ROWS["labels_BL"] != NO_LABEL
    assert int(actual["num_loss_tokens"]) == has_label.sum()  # whatever their weight
    total = WEIGHTS[has_label].sum() if "weights_BL" in arrays else has_label.sum()
    assert float(actual["loss_weight"]) == pytest.approx(total)


def test_a_step_whose_weights_are_all_0_changes_nothing():
    """The loss of a token may be infinite. The step takes weights because its spec has them."""
    decays = batches.make_config(name="adamw", weight_decay=0.1)
    infinite = lambda logits_TV, labels_T: jnp.log(logits_TV[:, 0] * 0)
    result = make_spec((1, 1, 2), config=decays, loss=infinite, has_weights=True)
    run = runs.Run(result, 8, None, train_step.build_step(result))
    state = run.state(runs.draw_weights(MODEL))
    before = jax.tree.map(np.asarray, state.master)
    state, metrics = run.step(
        state, run.rows(ROWS | {"weights_BL": np.zeros_like(WEIGHTS, np.float32)})
    )
    assert batches.is_bitwise_equal(state.master, before)
    assert [float(metrics[name]) for name in ("loss", "loss_weight", "is_finite")] == [0, 0, 1]
    _, plain = train_state.abstract_inputs(make_spec((1, 1, 2)))
    _, weighted = train_state.abstract_inputs(result)
    assert len(jax.tree.leaves(plain)) == 5
    assert weighted.weights_BL.sharding == weighted.labels_BL.sharding
