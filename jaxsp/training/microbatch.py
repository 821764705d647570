"""Sums over a device's part of a microbatch, and the weights that objectives give to its tokens."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jaxsp.blocks import layers, linear
from jaxsp.blocks.linear import Keys
from jaxsp.core import axes
from jaxsp.core.batch import NO_LABEL, Batch, step_row_index
from jaxsp.experts import routing
from jaxsp.model import decoder
from jaxsp.objectives.token_objective import LENGTH, TileTokens, TokenObjective
from jaxsp.sharding.sharding import Shard
from jaxsp.system import device_mesh
from jaxsp.training import loss, metric_table, pair_losses, segments
from jaxsp.training.loss import Head, Tile, TileLoss
from jaxsp.training.metric_table import Sums
from jaxsp.training.specs import StepSpec

WEIGHTED_SUM = "weighted_loss_sum"
"""Sum of token losses with the weights of an objective, whose own loss is `loss_sum`."""

TEACHER_SCOPE = "teacher"
"""Scope name, in the compiled program, of the layers of an objective's teacher."""

Weigh = Callable[[Batch, Callable[[], Array]], tuple[Array, Sums]]
"""Function of a microbatch, and of a function that computes its token losses. It returns a weight
for the loss of each token, and sums over pairs."""


def prepare_pairs(
    spec: StepSpec, values: layers.Weights, holders: layers.Weights, batch: Batch, step: Array
) -> tuple[Weigh | None, Sums]:
    """Function that computes the weights of tokens, None without pairs; and sums over pairs.

    The sums are empty if each microbatch has its own.
    """
    if not spec.objective.has_pairs:
        return None, {}
    pairs = pair_losses.find_step_pairs(spec, batch)
    batch = batch.without_pairs()
    if not spec.scores_pairs_first:

        def weigh(batch: Batch, compute_losses: Callable[[], Array]) -> tuple[Array, Sums]:
            partial_P2 = pair_losses.sum_log_probabilities(
                spec, compute_losses(), batch, pairs.inputs
            )
            logps_P2 = jax.lax.psum(partial_P2, axes.ALL)
            is_present_P = pair_losses.find_present(pairs, batch)
            sums, weights_P2 = pair_losses.differentiate(spec, pairs, logps_P2, is_present_P)
            return pair_losses.spread(spec, weights_P2, batch), sums

        return weigh, {}

    def score(inputs: tuple[Batch, Array]) -> tuple[Sums, None]:
        rows, microbatch = inputs
        keys = make_token_keys(spec, rows, step, microbatch)
        losses_Bl, _, _ = compute_token_losses(spec, values, holders, rows, keys)
        return {
            "logps_P2": pair_losses.sum_log_probabilities(spec, losses_Bl, rows, pairs.inputs)
        }, None

    indices = jnp.arange(batch.tokens_BL.shape[0], dtype=jnp.int32)
    scores, _ = metric_table.scan_sums(score, (batch, indices))
    logps_P2 = jax.lax.psum(scores["logps_P2"], axes.ALL)
    pair_sums, weights_P2 = pair_losses.differentiate(
        spec, pairs, logps_P2, pairs.counts_P2[:, 0] > 0
    )
    return lambda batch, _: (pair_losses.spread(spec, weights_P2, batch), {}), pair_sums


def sum_microbatch(
    spec: StepSpec,
    values: layers.Weights,
    holders: layers.Weights,
    batch: Batch,
    token_keys: Keys | None = None,
    weigh: Weigh | None = None,
) -> Sums:
    """Sums over this device's part of a microbatch.

    Args:
        token_keys: see `decoder.hidden_states`.
        weigh: computes the weights of tokens for an objective; None: those of the batch.
    """
    tokens, head, statistics = _run_model(spec, values, holders, batch, token_keys)
    if weigh is None:
        return loss.sum_token_losses(tokens, head) | statistics
    compute_losses = lambda: loss.compute_token_losses(tokens, head)[0]
    weights_Bl, pair_sums = weigh(batch, compute_losses)
    sums = loss.sum_token_losses(tokens._replace(weights_X=weights_Bl), head)
    sums[WEIGHTED_SUM] = sums.pop("loss_sum")
    if spec.model.has_scores:  # a score predicts no token
        del sums["num_correct"]
    return sums | pair_sums | statistics


def compute_token_losses(
    spec: StepSpec,
    values: layers.Weights,
    holders: layers.Weights,
    batch: Batch,
    token_keys: Keys | None = None,
) -> tuple[Float32[Array, "B l"], Bool[Array, "B l"], Sums]:
    """Losses of this device's tokens in a microbatch, without gradients: see `loss`; with the sums
    of routers' statistics."""
    tokens, head, statistics = _run_model(spec, values, holders, batch, token_keys)
    losses_Bl, is_correct_Bl, sums = loss.compute_token_losses(tokens, head)
    return losses_Bl, is_correct_Bl, sums | statistics


def compute_numbers(
    spec: StepSpec,
    values: layers.Weights,
    batch: Batch,
    compute: Callable[[TileTokens], dict[str, Array]],
) -> dict[str, Array]:
    """Numbers of this device's tokens in a microbatch: see `loss.compute_numbers`."""
    holders = spec.gather.make_grad_holders(spec.state_table, values)
    tokens, head, _ = _run_model(spec, values, holders, batch, None)
    return loss.compute_numbers(tokens, head, compute)


def _run_model(
    spec: StepSpec,
    values: layers.Weights,
    holders: layers.Weights,
    batch: Batch,
    token_keys: Keys | None,
) -> tuple[Tile, Head, Sums]:
    """All tokens with their hidden states, the head, and sums of routers' statistics."""
    teacher = None
    numbers = dict(batch.numbers_BL or {})
    if (teacher_spec := spec.teacher) is not None:
        weights = spec.select_teacher(values)
        no_holders = spec.gather.make_grad_holders(teacher_spec.table, weights)
        with jax.named_scope(TEACHER_SCOPE):
            hidden_BlD, teacher, _ = _run_layers(teacher_spec, weights, no_holders, batch, None)
        # The teacher runs first, so that its temporaries are gone before activations are saved
        hidden_BlD = jax.lax.stop_gradient(hidden_BlD)
        hidden_BlD, tokens_BL = jax.lax.optimization_barrier((hidden_BlD, batch.tokens_BL))
        batch = dataclasses.replace(batch, tokens_BL=tokens_BL)
        numbers[loss.TEACHER_HIDDEN] = hidden_BlD
    hidden_BlD, head, statistics = _run_layers(spec, values, holders, batch, token_keys)
    tokens = Tile(hidden_BlD, batch.labels_BL, batch.weights_BL, numbers)
    head = dataclasses.replace(head, teacher=teacher)
    objective = spec.objective
    if isinstance(objective, TokenObjective) and objective.is_by_document:
        tokens = tokens._replace(
            numbers=numbers | _sum_documents(spec, objective, batch, tokens, head)
        )
    return tokens, head, statistics


def _sum_documents(
    spec: StepSpec, objective: TokenObjective, batch: Batch, tokens: Tile, head: Head
) -> dict[str, Array]:
    """Numbers of the document of each token, which an objective by document needs."""
    numbers = {LENGTH: jnp.ones(batch.labels_BL.shape, jnp.float32)}
    if objective.has_document_sums:
        numbers |= loss.compute_numbers(tokens, head, objective.sum_over_documents)
    keep = lambda values_Bl: jnp.where(batch.labels_BL != NO_LABEL, values_Bl, 0)
    sums = {
        name: segments.sum_over_segments(spec, keep(values_Bl), batch)
        for name, values_Bl in numbers.items()
    }
    return sums | {LENGTH: jnp.maximum(sums[LENGTH], 1)}


def _run_layers(
    spec: StepSpec,
    values: layers.Weights,
    holders: layers.Weights,
    batch: Batch,
    token_keys: Keys | None,
) -> tuple[Array, Head, Sums]:
    """Hidden states, the head, and sums of routers' statistics."""
    make_shard = lambda _, value, holder: Shard(value=value, grad_holder=holder)
    trees = (spec.table, spec.select_own(values), spec.select_own(holders))
    shards = jax.tree.map(make_shard, *trees)
    hidden_BlD, statistics = decoder.hidden_states(
        shards,
        batch,
        config=spec.model,
        attend=spec.attend,
        gather=spec.gather,
        dtype=spec.dtype,
        policy=spec.remat_policy,
        tile_tokens=spec.mlp_tile,
        token_keys=token_keys,
    )
    head = Head(
        gather=spec.gather,
        param=decoder.lm_head(spec.table),
        shard=decoder.lm_head(shards),
        tile=min(spec.loss_tile, batch.tokens_BL.size),
        tile_loss=_choose_tile_loss(spec),
        vocab_size=spec.common_vocab_size,
        transform_logits=functools.partial(decoder.transform_logits, spec.model),
    )
    sums = routing.sum_over_rows(statistics, batch.lengths_BM) if statistics else {}
    return hidden_BlD, head, sums


def _choose_tile_loss(spec: StepSpec) -> TileLoss | None:
    """Function that computes the losses of a tile; None: cross entropy."""
    if spec.model.has_scores:
        return loss.score_loss
    if spec.loss is not None:
        return loss.make_tile_loss(spec.loss)
    return spec.objective.compute_tile if isinstance(spec.objective, TokenObjective) else None


def make_token_keys(
    spec: StepSpec, batch: Batch, step: Array, microbatch: Array | int
) -> Keys | None:
    """Random keys of this device's tokens in a microbatch; None without dropout."""
    lora = spec.model.lora
    if lora is None or not lora.dropout:
        return None
    num_rows, num_tokens = batch.tokens_BL.shape
    num_groups = device_mesh.num_groups(spec.mesh)
    slots_B = jax.lax.axis_index(axes.GROUPS) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
    places_l = jax.lax.axis_index(axes.SEQ) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
    return linear.make_token_keys(
        seed=spec.config.seed,
        step=step,
        rows_B=step_row_index(
            microbatch, slots_B, num_groups=num_groups, rows_per_microbatch=num_rows
        ),
        tokens_l=spec.attend.layout.tokens_in_places(
            places_l, row_tokens=num_tokens * spec.mesh.shape[axes.SEQ]
        ),
    )
