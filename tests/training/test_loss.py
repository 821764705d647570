"""The tiled loss, compared with the loss of all tokens at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.layers import Parameter
from jaxsp.core.batch import NO_LABEL
from jaxsp.training import loss
from tests import batches, tolerances, unsharded
from tests.training import runs

V = 37
D = 12
B = 2
L = 50
ROW = Parameter(shape=(V, D), hf_name="lm_head.weight")


def inputs(tokens=L):
    """Hidden states, head and labels, four in ten of them masked, and all of the middle."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((B, tokens, D), np.float32)
    head = rng.standard_normal((V, D), np.float32)
    labels = rng.integers(0, V, (B, tokens)).astype(np.int32)
    labels[rng.random(labels.shape) < 0.4] = NO_LABEL
    labels[:, 20:40] = NO_LABEL
    return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(labels)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def tiled(hidden, head, labels, tile, dtype="float32", token_loss=None):
    def total(hidden, head):
        whole = loss.Head(
            gather=unsharded.UnshardedGather(dtype),
            param=ROW,
            shard=head,
            tile=tile,
            token_loss=token_loss,
        )
        return loss.sum_token_losses(hidden, labels, whole)

    value, pull = jax.vjp(total, hidden, head)
    zero = np.zeros((), jax.dtypes.float0)
    return value, pull({"loss_sum": jnp.float32(1), "num_correct": zero})


@jax.jit
def in_one_piece(hidden, head, labels):
    def total(hidden, head):
        log_probabilities = jax.nn.log_softmax(jnp.einsum("BLD,VD->BLV", hidden, head))
        chosen = jax.nn.one_hot(labels, V)  # all zeros at -100
        return -(log_probabilities * chosen).sum()

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, head)


@pytest.mark.parametrize("tile", [1, 7, 20, 50, 100, 1000])
def test_any_tile_gives_the_same_loss_and_gradients(tile):
    hidden, head, labels = inputs()
    actual, gradients = tiled(hidden, head, labels, tile)
    right, right_gradients = in_one_piece(hidden, head, labels)
    assert batches.relative_error(actual["loss_sum"], right) < tolerances.TILES
    for mine, theirs in zip(gradients, right_gradients, strict=True):
        assert batches.relative_error(mine, theirs) < tolerances.TILES
    assert (np.asarray(gradients[0])[np.asarray(labels) == NO_LABEL] == 0).all()


def test_the_heads_gradient_is_summed_over_tiles_in_float32():
    """Summed over 256 tiles in bfloat16, the gradient would be off by 3 %."""
    tokens = 256
    hidden = np.ones((1, tokens, D), np.float32)
    head = np.zeros((V, D), np.float32)
    labels = np.zeros((1, tokens), np.int32)
    _, (_, gradient) = tiled(
        jnp.bfloat16(hidden), jnp.asarray(head), jnp.asarray(labels), 1, "bfloat16"
    )
    assert gradient.dtype == jnp.float32
    right = np.full((V, D), tokens / V)
    right[0] -= tokens
    assert batches.relative_error(gradient, right) < tolerances.BF16 / 2


@pytest.mark.parametrize("tile", [7, 100])
def test_a_custom_loss_has_its_own_value_and_gradients(tile):
    hidden, head, labels = inputs()
    has_label = labels != NO_LABEL

    def total(hidden, head):
        logits = jnp.einsum("BLD,VD->BLV", hidden, head).reshape(-1, V)
        losses = runs.label_smoothing_loss(logits, jnp.where(has_label, labels, 0).reshape(-1))
        return (losses * has_label.reshape(-1).astype(jnp.float32)).sum()

    actual, gradients = tiled(hidden, head, labels, tile, "float32", runs.label_smoothing_loss)
    right, right_gradients = jax.value_and_grad(total, argnums=(0, 1))(hidden, head)
    assert batches.relative_error(actual["loss_sum"], right) < tolerances.TILES
    assert int(actual["num_correct"]) == int(tiled(hidden, head, labels, tile)[0]["num_correct"])
    for mine, theirs in zip(gradients, right_gradients, strict=True):
        assert batches.relative_error(mine, theirs) < tolerances.TILES
