"""Token losses from hidden states, in tiles: logits exist for one tile of tokens at a time."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.blocks.layers import Gather, Parameter
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.core.units import GIB
from jaxsp.model import tiling
from jaxsp.objectives.objective import TileTokens
from jaxsp.training import metric_table
from jaxsp.training.metric_table import Sums

TokenLoss = Callable[[Array, Array], Array]
"""Function that computes the loss of each token: `logits_TV, labels_T -> losses_T`, in JAX.

T are the tokens of a tile, V is the vocabulary. Logits are float32, and losses must be float32.
Labels are int32 from 0 to V - 1. A token without a label gets label 0, and its loss and gradient
are dropped. A tile may have any number of tokens, so a token's loss must depend only on its own
logits and label.

Example: cross entropy with label smoothing.

    def smoothed(logits_TV, labels_T):
        log_probs_TV = jax.nn.log_softmax(logits_TV)
        label_T = jnp.take_along_axis(log_probs_TV, labels_T[:, None], axis=-1)[:, 0]
        return -0.9 * label_T - 0.1 * log_probs_TV.mean(-1)
"""


TileLoss = Callable[[TileTokens], tuple[Array, dict[str, Array]]]
"""Function that computes the losses of a tile: see `TokenObjective.losses`."""

TEACHER_HIDDEN = "teacher_hidden"
"""Name of the teacher's hidden states among the numbers of tokens."""


def make_tile_loss(token_loss: TokenLoss) -> TileLoss:
    """Adapts a user's function of logits and labels to tiles. The result raises UserError if that
    does not return one float32 loss per token."""

    def compute(tokens: TileTokens) -> tuple[Array, dict[str, Array]]:
        losses_X = token_loss(tokens.logits_XV, tokens.labels_X)
        if (losses_X.shape, losses_X.dtype) != (tokens.labels_X.shape, jnp.float32):
            raise UserError(
                f"loss: returned {losses_X.dtype}{list(losses_X.shape)} for logits "
                f"float32{list(tokens.logits_XV.shape)}. Return one loss per token, "
                f"float32{list(tokens.labels_X.shape)}, without summing."
            )
        return losses_X, {}

    return compute


def score_loss(tokens: TileTokens) -> tuple[Array, dict[str, Array]]:
    """Loss of a token whose log-probability is taken to be its score, for reward models."""
    return -tokens.logits_XV[:, 0], {}


MAX_LOGIT_BYTES = (4 * GIB, GIB, GIB // 4)
"""Maximum bytes of a tile's float32 logits, tried in this order after all tokens at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """Head of a model on a device, and the loss of its logits."""

    gather: Gather
    param: Parameter
    shard: Any
    tile: int
    """Number of tokens whose logits exist at a time."""
    tile_loss: TileLoss | None = None
    """None: cross entropy."""
    transform_logits: Callable[[Array], Array] = lambda logits: logits
    """Elementwise function from products of hidden states and head to logits, float32: see
    `decoder.transform_logits`."""
    teacher: "Head | None" = None
    """Head of the teacher, whose logits `tile_loss` also gets."""
    vocab_size: int | None = None
    """Number of ids that `tile_loss` compares with a teacher; None: all."""

    def gather_weights(self, shard: Any) -> tuple[Array, Array | None]:
        """The whole head, from its shard, and that of the teacher."""
        teacher_VD = None
        if self.teacher is not None:
            teacher_VD, _ = self.teacher.gather_weights(self.teacher.shard)
        return self.gather.all_gather(self.param, shard), teacher_VD

    def compute_logits(self, head_VD: Array, tile: "Tile") -> tuple[Array, Callable]:
        """Logits, and the function that makes their gradient that of the products of hidden states
        and head."""
        products_XV = jnp.einsum(
            "XD,VD->XV", tile.hidden_XD, head_VD, preferred_element_type=jnp.float32
        )
        return jax.vjp(self.transform_logits, products_XV)

    def make_tokens(
        self, heads: tuple[Array, Array | None], tile: "Tile", logits_XV: Array
    ) -> TileTokens:
        """Tokens of a tile as `tile_loss` gets them."""
        numbers = dict(tile.numbers or {})
        teacher_logits_XV = None
        if self.teacher is not None:
            assert heads[1] is not None, "gathered together"
            of_teacher = tile._replace(hidden_XD=numbers.pop(TEACHER_HIDDEN))
            teacher_logits_XV, _ = self.teacher.compute_logits(heads[1], of_teacher)
        return TileTokens(
            logits_XV=logits_XV,
            labels_X=jnp.maximum(tile.labels_X, 0),
            vocab_size=self.vocab_size,
            teacher_logits_XV=teacher_logits_XV,
            numbers=numbers,
        )

    def compute_tile(self, heads: tuple[Array, Array | None], tile: "Tile") -> "_TileLosses":
        """Losses of the tokens of a tile, and their gradients."""
        logits_XV, pull_logits = self.compute_logits(heads[0], tile)
        has_label_X = tile.labels_X != NO_LABEL
        measured: dict[str, Array] = {}
        tile_loss = self.tile_loss
        if tile_loss is None:
            known_labels_X = jnp.where(has_label_X, tile.labels_X, 0)
            best_X, losses_X, dlogits_XV = _cross_entropy(logits_XV, known_labels_X)
        else:
            tokens = self.make_tokens(heads, tile, logits_XV)
            compute = lambda x_XV: tile_loss(dataclasses.replace(tokens, logits_XV=x_XV))
            losses_X, pull, measured = jax.vjp(compute, logits_XV, has_aux=True)
            (dlogits_XV,) = pull(jnp.ones_like(losses_X))
            best_X = logits_XV.argmax(-1).astype(jnp.int32)
        keep = lambda values_X: _apply_weights(values_X, has_label_X, None)
        return _TileLosses(
            losses_X=keep(losses_X),
            is_correct_X=has_label_X & (best_X == tile.labels_X),
            measured=jax.tree.map(keep, measured),
            dlogits_XV=dlogits_XV,
            pull_logits=pull_logits,
        )


class Tile(NamedTuple):
    """Inputs of the losses of a tile's tokens; with [B, l] in place of X, of all tokens."""

    hidden_XD: Float[Array, "*X D"]
    labels_X: Int32[Array, "*X"]
    weights_X: Float32[Array, "*X"] | None = None
    """Factor of each token's loss; None: 1. Tokens of weight 0 add nothing."""
    numbers: dict[str, Array] | None = None
    """Other numbers of each token, by name; those of TEACHER_HIDDEN have one more dim."""

    def split(self, num_tokens: int) -> "Tile":
        """Tiles of `num_tokens`, one after another, from all tokens."""
        split = functools.partial(tiling.split_tiles, tile_shape=(num_tokens,))
        return jax.tree.map(split, self)._replace(labels_X=split(self.labels_X, pad_value=NO_LABEL))


class _TileLosses(NamedTuple):
    """Losses of the tokens of a tile, 0 without a label."""

    losses_X: Float32[Array, "X"]
    is_correct_X: Bool[Array, "X"]
    measured: dict[str, Array]
    """Other numbers of each token, by name: see `TokenObjective.losses`."""
    dlogits_XV: Float32[Array, "X V"]
    """Gradient of each loss; undefined for tokens without a label."""
    pull_logits: Callable[[Array], tuple[Array]]
    """Gradient of the products of hidden states and head from that of the logits."""


def sum_token_losses(tokens: Tile, head: Head) -> Sums:
    """Sums over this device's tokens. Only `loss_sum`, that of the token losses, has a gradient.

    Tokens labeled -100 add nothing, neither to the loss nor to gradients.

    Args: tokens: all tokens.
    Precision: logits and all sums are float32, also the head's gradient over tiles (summed over 256
        tiles in bfloat16, it is off by 3 %).
    Memory: gradients are made while a tile's logits exist, so that logits are computed once. Until
        the backward pass, one array like the hidden states and the shard of the head's gradient
        are kept.
    """
    gather = head.gather
    lead = tokens.labels_X.shape

    def compute_tile(
        heads: tuple[Array, Array | None], tile: Tile
    ) -> tuple[Sums, Float32[Array, "X V"]]:
        """Sums of a tile, and the gradient of `loss_sum` with respect to the products of hidden
        states and head."""
        losses = head.compute_tile(heads, tile)
        weights_X1 = None if tile.weights_X is None else tile.weights_X[:, None]
        has_label_X1 = (tile.labels_X != NO_LABEL)[:, None]
        dlogits_XV = _apply_weights(losses.dlogits_XV, has_label_X1, weights_X1)
        return _sum_tile(losses, tile), losses.pull_logits(dlogits_XV)[0]

    @jax.custom_vjp
    def sum_losses(hidden_BlD: Array, shard: Any) -> Sums:
        return forward(hidden_BlD, shard)[0]

    def forward(hidden_BlD: Array, shard: Any) -> tuple[Sums, tuple[Array, Any]]:
        heads = head.gather_weights(shard)
        head_VD = heads[0]
        tiles = tokens._replace(hidden_XD=hidden_BlD).split(head.tile)

        def add_tile(
            carry: tuple[Sums, Array | None], tile: Tile
        ) -> tuple[tuple[Sums, Array | None], Array]:
            """Adds a tile to the sums and to the head's gradient, which is None if the head is
            frozen; also returns the gradient of the tile's hidden states."""
            sums, dhead_VD = carry
            tile_sums, dproducts_XV = compute_tile(heads, tile)
            dproducts_XV = dproducts_XV.astype(head_VD.dtype)
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            dhidden_XD = product("XV,VD->XD", dproducts_XV, head_VD)
            if dhead_VD is not None:
                dhead_VD = dhead_VD + product("XV,XD->VD", dproducts_XV, tile.hidden_XD)
            sums = metric_table.add(sums, tile_sums)
            return (sums, dhead_VD), dhidden_XD.astype(tile.hidden_XD.dtype)

        zeros = metric_table.make_zeros(lambda tile: compute_tile(heads, tile)[0], tiles)
        zeros_VD = jnp.zeros(head.param.shape, jnp.float32) if gather.has_gradient(shard) else None
        (sums, dhead_VD), dhidden_TXD = jax.lax.scan(add_tile, (zeros, zeros_VD), tiles)
        dhidden_BlD = tiling.join_tiles(dhidden_TXD, tile_ndim=1, lead=lead)
        # Without the barrier, XLA may keep the whole gradient of the head (2 GiB for a vocabulary
        # of 128,256) until the layers are done.
        dshard = None if dhead_VD is None else gather.reduce_scatter(head.param, dhead_VD)
        return sums, jax.lax.optimization_barrier((dhidden_BlD, dshard))

    def backward(gradients: tuple[Array, Any], dsums: Sums) -> tuple[Array, Any]:
        multiply = lambda x: (x.astype(jnp.float32) * dsums["loss_sum"]).astype(x.dtype)
        return jax.tree.map(multiply, gradients)

    sum_losses.defvjp(forward, backward)
    return sum_losses(tokens.hidden_XD, head.shard)


def compute_token_losses(
    tokens: Tile, head: Head
) -> tuple[Float32[Array, "B l"], Bool[Array, "B l"], Sums]:
    """Loss of each of this device's tokens, 0 without a label; True where the label is the
    likeliest token; and the sums of `sum_token_losses`. Without gradients.

    The losses are cross entropies if an objective has its own, whose sum is among the sums.
    """
    tokens = jax.lax.stop_gradient(tokens)
    heads = head.gather_weights(jax.lax.stop_gradient(head.shard))

    def compute(tile: Tile) -> tuple[Sums, tuple[Array, Array]]:
        losses = head.compute_tile(heads, tile)
        losses_X = losses.measured.get("cross_entropy", losses.losses_X)
        return _sum_tile(losses, tile), (losses_X, losses.is_correct_X)

    join = functools.partial(tiling.join_tiles, tile_ndim=1, lead=tokens.labels_X.shape)
    sums, (losses_TX, is_correct_TX) = metric_table.scan_sums(compute, tokens.split(head.tile))
    return join(losses_TX), join(is_correct_TX), sums


def compute_numbers(
    tokens: Tile, head: Head, compute: Callable[[TileTokens], dict[str, Array]]
) -> dict[str, Array]:
    """Numbers of each of this device's tokens, without gradients; undefined without a label.

    Args: compute: numbers of the tokens of a tile; may have dims after that of the tokens.
    """
    tokens = jax.lax.stop_gradient(tokens)
    heads = head.gather_weights(jax.lax.stop_gradient(head.shard))

    def compute_tile(tile: Tile) -> dict[str, Array]:
        return compute(head.make_tokens(heads, tile, head.compute_logits(heads[0], tile)[0]))

    numbers_TX = jax.lax.map(compute_tile, tokens.split(head.tile))
    join = functools.partial(tiling.join_tiles, tile_ndim=1, lead=tokens.labels_X.shape)
    return jax.tree.map(join, numbers_TX)


def _sum_tile(losses: _TileLosses, tile: Tile) -> Sums:
    """Sums over the tokens of a tile, of steps and evaluations."""
    has_label_X = tile.labels_X != NO_LABEL
    return {
        "loss_sum": _apply_weights(losses.losses_X, has_label_X, tile.weights_X).sum(),
        "num_correct": losses.is_correct_X.sum(dtype=jnp.int32),
    } | {f"{name}_sum": values_X.sum() for name, values_X in losses.measured.items()}


def _cross_entropy(
    logits_XV: Float32[Array, "X V"], labels_X: Int32[Array, "X"]
) -> tuple[Int32[Array, "X"], Float32[Array, "X"], Float32[Array, "X V"]]:
    """Likeliest tokens, losses, and the gradient of each loss with respect to its logits."""
    best_X, lse_X = jax.lax.platform_dependent(
        logits_XV,
        cuda=reduce_logits_once,
        default=lambda x: (x.argmax(-1).astype(jnp.int32), jax.nn.logsumexp(x, axis=-1)),
    )
    label_logits_X1 = jnp.take_along_axis(logits_XV, labels_X[:, None], axis=-1)
    one_hot_XV = jax.nn.one_hot(labels_X, logits_XV.shape[1], dtype=jnp.float32)
    losses_X = lse_X - label_logits_X1[:, 0]
    return best_X, losses_X, jnp.exp(logits_XV - lse_X[:, None]) - one_hot_XV


def reduce_logits_once(
    logits_XV: Float32[Array, "X V"],
) -> tuple[Int32[Array, "X"], Float32[Array, "X"]]:
    """Argmax (the first of equal ones) and log-sum-exp, in one pass instead of three.

    For GPUs, which wait for memory (Qwen3-0.6B: 1.6 % of a step). CPUs would take twice as long,
    and add all exponentials of a row one after another.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
    """

    def combine(left: Sequence[Array], right: Sequence[Array]) -> tuple[Array, ...]:
        max_left, index_left, sum_left = left
        max_right, index_right, sum_right = right
        largest = jnp.maximum(max_left, max_right)
        is_first = (max_left == max_right) & (index_left < index_right)
        index = jnp.where((max_left > max_right) | is_first, index_left, index_right)
        total = sum_left * jnp.exp(max_left - largest) + sum_right * jnp.exp(max_right - largest)
        return largest, index, total

    indices_XV = jax.lax.broadcasted_iota(jnp.int32, logits_XV.shape, 1)
    lowest = jnp.finfo(jnp.float32).min  # -inf - -inf would be NaN
    largest_X, best_X, sum_X = jax.lax.reduce(
        (logits_XV, indices_XV, jnp.ones_like(logits_XV)),
        (jnp.float32(lowest), jnp.int32(jnp.iinfo(jnp.int32).max), jnp.float32(0)),
        combine,
        (1,),
    )
    return best_X, largest_X + jnp.log(sum_X)


def _apply_weights(values: Array, has_label: Array, weights: Array | None) -> Array:
    """Values times weights, and 0 where there is no label or the weight is 0.

    The zeros are selected, not multiplied, so that infinite values do not become NaN.
    """
    if weights is None:
        return jnp.where(has_label, values, 0.0)
    return jnp.where(has_label & (weights != 0), values * weights, 0.0)
