"""Token losses from hidden states in tiles: logits never exist for more than a tile of tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.model import tiling
from jaxsp.model.layers import Gather, Parameter

TokenLoss = Callable[[Array, Array], Array]
"""A loss per token: `logits_TV, labels_T -> losses_T`, in JAX. T tokens of a tile, V vocabulary.

Logits are float32 and losses must be. Labels are int32 from 0 to V - 1: a token without a label is
passed with label 0, and its loss and gradient are dropped. Tiles have any number of tokens, so a
token's loss must depend on its own logits and label only.

Example, cross entropy with label smoothing:
    def smoothed(logits_TV, labels_T):
        log_probs_TV = jax.nn.log_softmax(logits_TV)
        label_T = jnp.take_along_axis(log_probs_TV, labels_T[:, None], axis=-1)[:, 0]
        return -0.9 * label_T - 0.1 * log_probs_TV.mean(-1)
"""

MAX_LOGIT_BYTES = (2**30, 2**28)
"""Maximum bytes of a tile's float32 logits, tried in this order if the logits of all tokens do not
fit."""


class LossSums(NamedTuple):
    """Sums over this device's tokens."""

    loss: Float32[Array, ""]
    num_correct: Int32[Array, ""]
    """Labels that were the likeliest token."""


def tile_tokens(*, num_tokens: int, vocab_size: int, max_bytes: int = MAX_LOGIT_BYTES[-1]) -> int:
    """Tokens of a tile whose logits take at most `max_bytes`."""
    return min(
        num_tokens,
        tiling.choose_dividing_tile(
            num_tokens, tiling.floor_power_of_two(max_bytes // (4 * vocab_size))
        ),
    )


def sum_token_losses(
    hidden_BlD: Float[Array, "B l D"],
    labels_Bl: Int32[Array, "B l"],
    weights_Bl: Float32[Array, "B l"] | None = None,
    *,
    gather: Gather,
    head: Parameter,
    shard: Any,
    tile: int,
    token_loss: TokenLoss | None = None,
) -> LossSums:
    """Sum of the token losses of this device's tokens; tokens labelled -100 add nothing, forward or backward.

    Args:
        weights_Bl: factor of each token's loss; None: 1. Tokens of weight 0 add nothing either.
        token_loss: None for cross entropy.
    Precision: logits and all sums are float32; the head's gradient is summed over tiles in float32 and leaves only
        then. (Summed over 256 tiles in bfloat16 it is off by 3 %.)
    Memory: a tile's logits are made again in the backward pass; what is kept is a number for each token.
    """
    tokens = hidden_BlD.shape[0] * hidden_BlD.shape[1]
    num_tiles = -(-tokens // tile)
    labels_TX = jnp.pad(
        labels_Bl.reshape(-1), (0, num_tiles * tile - tokens), constant_values=NO_LABEL
    )
    labels_TX = labels_TX.reshape(num_tiles, tile)
    weights_TX = None
    if weights_Bl is not None:
        weights_TX = jnp.pad(weights_Bl.reshape(-1), (0, num_tiles * tile - tokens))
        weights_TX = weights_TX.reshape(num_tiles, tile)

    def cut(hidden_BlD: Array) -> Array:
        flat = hidden_BlD.reshape(tokens, -1)
        return jnp.pad(flat, ((0, num_tiles * tile - tokens), (0, 0))).reshape(num_tiles, tile, -1)

    def forward(hidden_BlD: Array, shard: Any) -> tuple[LossSums, Array | None]:
        head_VD = gather.all_gather(head, shard)

        def one(
            sums: LossSums, tile: tuple[Array, Array, Array | None]
        ) -> tuple[LossSums, Array | None]:
            hidden_XD, labels_X, weights_X = tile
            logits_XV, has_label_X = _logits(hidden_XD, head_VD), labels_X != NO_LABEL
            known_labels_X = jnp.where(has_label_X, labels_X, 0)
            if token_loss is None:
                lse_X = jax.nn.logsumexp(logits_XV, axis=-1)
                losses_X = (
                    lse_X - jnp.take_along_axis(logits_XV, known_labels_X[:, None], axis=-1)[:, 0]
                )
            else:
                lse_X = None
                losses_X = _call_token_loss(token_loss, logits_XV, known_labels_X)
            loss = _apply_weights(losses_X, has_label_X, weights_X).sum()
            correct = (has_label_X & (logits_XV.argmax(-1).astype(jnp.int32) == labels_X)).sum(
                dtype=jnp.int32
            )
            return LossSums(sums.loss + loss, sums.num_correct + correct), lse_X

        return jax.lax.scan(
            one, LossSums(jnp.float32(0), jnp.int32(0)), (cut(hidden_BlD), labels_TX, weights_TX)
        )

    @jax.custom_vjp
    def total(hidden_BlD: Array, shard: Any) -> LossSums:
        return forward(hidden_BlD, shard)[0]

    def total_fwd(
        hidden_BlD: Array, shard: Any
    ) -> tuple[LossSums, tuple[Array, Any, Array | None]]:
        sums, lse_TX = forward(hidden_BlD, shard)
        return sums, (hidden_BlD, shard, lse_TX)

    def total_bwd(residuals: tuple[Array, Any, Array | None], dsums: LossSums) -> tuple[Array, Any]:
        hidden_BlD, shard, lse_TX = residuals
        head_VD = gather.all_gather(head, shard)

        def one(
            dhead_VD: Array, tile: tuple[Array, Array, Array | None, Array | None]
        ) -> tuple[Array, Array]:
            hidden_XD, labels_X, weights_X, lse_X = tile
            logits_XV = _logits(hidden_XD, head_VD)
            if token_loss is None:
                assert lse_X is not None
                dlogits_XV = jnp.exp(logits_XV - lse_X[:, None]) - jax.nn.one_hot(
                    labels_X, head.shape[0], dtype=jnp.float32
                )
            else:
                known_labels_X = jnp.where(labels_X != NO_LABEL, labels_X, 0)
                losses_X, pull = jax.vjp(
                    lambda logits_XV: _call_token_loss(token_loss, logits_XV, known_labels_X),
                    logits_XV,
                )
                (dlogits_XV,) = pull(jnp.ones_like(losses_X))
            has_label_X1 = (labels_X != NO_LABEL)[:, None]
            weights_X1 = None if weights_X is None else weights_X[:, None]
            dlogits_XV = _apply_weights(dlogits_XV * dsums.loss, has_label_X1, weights_X1)
            dlogits_XV = dlogits_XV.astype(head_VD.dtype)
            dhidden_XD = jnp.einsum(
                "XV,VD->XD", dlogits_XV, head_VD, preferred_element_type=jnp.float32
            )
            dhead_VD += jnp.einsum(
                "XV,XD->VD", dlogits_XV, hidden_XD, preferred_element_type=jnp.float32
            )
            return dhead_VD, dhidden_XD.astype(hidden_XD.dtype)

        tiles = (cut(hidden_BlD), labels_TX, weights_TX, lse_TX)
        dhead_VD, dhidden_TXD = jax.lax.scan(one, jnp.zeros(head.shape, jnp.float32), tiles)
        dhidden_BlD = dhidden_TXD.reshape(num_tiles * tile, -1)[:tokens].reshape(hidden_BlD.shape)
        # else XLA may keep the whole gradient, 2 GiB of a vocabulary of 128,256, until the layers are done
        return jax.lax.optimization_barrier((dhidden_BlD, gather.reduce_scatter(head, dhead_VD)))

    total.defvjp(total_fwd, total_bwd)
    return total(hidden_BlD, shard)


def _logits(hidden_XD: Array, head_VD: Array) -> Float32[Array, "X V"]:
    return jnp.einsum("XD,VD->XV", hidden_XD, head_VD, preferred_element_type=jnp.float32)


def _apply_weights(values: Array, has_label: Array, weights: Array | None) -> Array:
    """Values times weights; 0, by value, where there is no label or the weight is 0."""
    if weights is None:
        return jnp.where(has_label, values, 0.0)
    return jnp.where(has_label & (weights != 0), values * weights, 0.0)


def _call_token_loss(token_loss: TokenLoss, logits_XV: Array, labels_X: Array) -> Array:
    """Calls `token_loss`. Raises: UserError if it does not return one float32 loss per token."""
    losses_X = token_loss(logits_XV, labels_X)
    if (losses_X.shape, losses_X.dtype) != (labels_X.shape, logits_XV.dtype):
        raise UserError(
            f"Program.loss: returned {losses_X.dtype}{list(losses_X.shape)} for logits "
            f"float32{list(logits_XV.shape)}. Return one loss per token, float32{list(labels_X.shape)}, without summing."
        )
    return losses_X
