"""The tiled loss, compared with the loss of all tokens at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.layers import Parameter
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.training import loss
from tests import batches, messages, tolerances, unsharded

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
            tile_loss=None if token_loss is None else loss.make_tile_loss(token_loss),
        )
        return loss.sum_token_losses(loss.Tile(hidden, labels), whole)

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


@pytest.mark.parametrize("tile", [7, 20, 1000])
def test_any_tile_gives_the_same_loss_and_gradients(tile):
    hidden, head, labels = inputs()
    actual, gradients = tiled(hidden, head, labels, tile)
    right, right_gradients = in_one_piece(hidden, head, labels)
    assert batches.relative_error(actual["loss_sum"], right) < tolerances.TILES
    for mine, theirs in zip(gradients, right_gradients, strict=True):
        assert batches.relative_error(mine, theirs) < tolerances.TILES
    assert (np.asarray(gradients[0])[np.asarray(labels) == NO_LABEL] == 0).all()


def test_correct_labels_are_counted():
    """Logits are 1 at the token itself and 0 elsewhere; 5 labels are that token, one is masked."""
    tokens = np.arange(7)
    hidden = jnp.float32(np.eye(V, D)[tokens][None])
    head = jnp.float32(np.eye(V, D))
    labels = np.int32([[0, 1, 2, 3, 4, NO_LABEL, 0]])
    for tile in (2, 7):
        assert int(tiled(hidden, head, jnp.asarray(labels), tile)[0]["num_correct"]) == 5


def test_one_pass_over_logits_finds_what_argmax_and_logsumexp_do():
    logits = np.random.default_rng(1).normal(0, 20, (8, 1000)).astype(np.float32)
    logits[1, [3, 700]] = 200.0  # the first of equal ones counts
    logits[2, 5:] = -np.inf
    logits[3] = -3e38
    logits[4, 900] = 3e38
    best, lse = jax.jit(loss.reduce_logits_once)(logits)
    np.testing.assert_array_equal(best, logits.argmax(1))
    np.testing.assert_allclose(lse, jax.nn.logsumexp(logits, axis=1), rtol=3e-7)


def test_nothing_is_learned_from_what_has_no_label():
    hidden, head, labels = inputs()
    actual, gradients = tiled(jnp.full_like(hidden, 1e38), head, jnp.full_like(labels, NO_LABEL), 7)
    assert (float(actual["loss_sum"]), int(actual["num_correct"])) == (0, 0)
    assert all((np.asarray(gradient) == 0).all() for gradient in gradients)


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


def test_a_token_without_a_label_adds_nothing_even_if_its_custom_loss_is_infinite():
    """`test_own_loss.py` has custom losses on meshes."""
    hidden, head, labels = inputs()
    unlabelled = jnp.full_like(labels, NO_LABEL)
    infinite = lambda logits_TV, labels_T: jnp.log(logits_TV[:, 0] * 0)
    actual, gradients = tiled(hidden, head, unlabelled, 7, "float32", infinite)
    assert float(actual["loss_sum"]) == 0
    assert all((np.asarray(gradient) == 0).all() for gradient in gradients)


@pytest.mark.parametrize(
    "token_loss",
    [
        lambda logits_TV, labels_T: logits_TV.sum(),
        lambda logits_TV, labels_T: logits_TV,
        lambda logits_TV, labels_T: logits_TV[:, 0].astype(jnp.bfloat16),
    ],
    ids=["a sum", "logits", "bfloat16"],
)
def test_a_custom_loss_must_return_one_float32_per_token(token_loss):
    with pytest.raises(UserError, match=messages.containing("float32[7]")):
        tiled(*inputs(), 7, "float32", token_loss)
