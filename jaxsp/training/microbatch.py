"""Sums over a device's part of a microbatch, and the weights that objectives give to its tokens.

Example of weights: the loss of a pair is f(s_chosen, s_rejected), where s is the sum of
log-probabilities of a document's tokens, which may lie on several devices. The sums are taken over
the mesh; then each token of a document has the weight -df/ds in the ordinary backward pass of the
token losses.

Dims: D = 2 P documents of a step, in pairs; M slots for segments of a row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxsp.blocks import layers, linear
from jaxsp.blocks.linear import Keys
from jaxsp.core import axes
from jaxsp.core.batch import NO_LABEL, Batch, step_row_index
from jaxsp.delta_rule import spans
from jaxsp.experts import routing
from jaxsp.model import decoder
from jaxsp.objectives.objective import LENGTH, TileTokens, TokenObjective
from jaxsp.objectives.pairs import PairObjective, PairSums
from jaxsp.sharding.sharding import Shard
from jaxsp.system import device_mesh
from jaxsp.training import loss, metric_table
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


Shards = dict[str, Any]
"""Tree of a `Shard` for each weight of the state."""


def make_shards(spec: StepSpec, values: layers.Weights, holders: layers.Weights) -> Shards:
    """Shards of a step, from their values and the holders of their gradients."""
    make = lambda _, value, holder: Shard(value=value, grad_holder=holder)
    return jax.tree.map(make, spec.state_table, values, holders)


def sum_microbatch(
    spec: StepSpec,
    shards: Shards,
    batch: Batch,
    token_keys: Keys | None = None,
    weigh: Weigh | None = None,
) -> Sums:
    """Sums over this device's part of a microbatch.

    Args:
        token_keys: see `decoder.hidden_states`.
        weigh: computes the weights of tokens for an objective; None: those of the batch.
    """
    tokens, head, statistics = _run_model(spec, shards, batch, token_keys)
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
    spec: StepSpec, shards: Shards, batch: Batch, token_keys: Keys | None = None
) -> tuple[Float32[Array, "B l"], Bool[Array, "B l"], Sums]:
    """Losses of this device's tokens in a microbatch, without gradients: see `loss`; with the sums
    of routers' statistics."""
    tokens, head, statistics = _run_model(spec, shards, batch, token_keys)
    losses_Bl, is_correct_Bl, sums = loss.compute_token_losses(tokens, head)
    return losses_Bl, is_correct_Bl, sums | statistics


def compute_numbers(
    spec: StepSpec,
    shards: Shards,
    batch: Batch,
    compute: Callable[[TileTokens], dict[str, Array]],
) -> dict[str, Array]:
    """Numbers of this device's tokens in a microbatch: see `loss.compute_numbers`."""
    tokens, head, _ = _run_model(spec, shards, batch, None)
    return loss.compute_numbers(tokens, head, compute)


def _run_model(
    spec: StepSpec, shards: Shards, batch: Batch, token_keys: Keys | None
) -> tuple[Tile, Head, Sums]:
    """All tokens with their hidden states, the head, and sums of routers' statistics."""
    teacher = None
    numbers = dict(batch.numbers_BL or {})
    if (teacher_spec := spec.teacher) is not None:
        own = spec.select_teacher(shards)
        with jax.named_scope(TEACHER_SCOPE):
            hidden_BlD, teacher, _ = _run_layers(teacher_spec, own, batch, None)
        # The teacher runs first, so that its temporaries are gone before activations are saved
        hidden_BlD = jax.lax.stop_gradient(hidden_BlD)
        hidden_BlD, tokens_BL = jax.lax.optimization_barrier((hidden_BlD, batch.tokens_BL))
        batch = dataclasses.replace(batch, tokens_BL=tokens_BL)
        numbers[loss.TEACHER_HIDDEN] = hidden_BlD
    own = spec.select_own(shards)
    hidden_BlD, head, statistics = _run_layers(spec, own, batch, token_keys)
    tokens = Tile(hidden_BlD, batch.labels_BL, batch.weights_BL, numbers)
    head = dataclasses.replace(head, teacher=teacher)
    objective = spec.objective
    if isinstance(objective, TokenObjective) and objective.is_by_document:
        sums = {LENGTH: jnp.ones(batch.labels_BL.shape, jnp.float32)}
        if objective.has_document_sums:
            sums |= loss.compute_numbers(tokens, head, objective.sum_over_documents)
        for name, values_Bl in sums.items():
            values_Bl = jnp.where(batch.labels_BL != NO_LABEL, values_Bl, 0)
            sums_BM = jax.lax.psum(_sum_slots(spec, values_Bl, batch), axes.SEQ)
            sums[name] = _spread(spec, sums_BM, batch)
        sums[LENGTH] = jnp.maximum(sums[LENGTH], 1)
        tokens = tokens._replace(numbers=numbers | sums)
    return tokens, head, statistics


def _run_layers(
    spec: StepSpec, shards: Shards, batch: Batch, token_keys: Keys | None
) -> tuple[Array, Head, Sums]:
    """Hidden states, the head, and sums of routers' statistics."""
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


# Documents


def prepare_pairs(
    spec: StepSpec, shards: Shards, batch: Batch, step: Array
) -> tuple[Weigh | None, Sums]:
    """Function that computes the weights of tokens, None without pairs; and sums over pairs.

    The sums are empty if each microbatch has its own. Every document has a loss token.

    Args: batch: that of all microbatches of the step.
    """
    objective = spec.objective
    if not isinstance(objective, PairObjective):
        return None, {}
    assert batch.pairs is not None
    num_documents = batch.pairs.references_P2.size

    def sum_documents(values_Bl: Array, rows: Batch) -> Float32[Array, "P 2"]:
        """This device's part of the sum over each document's tokens; 0 for those of other rows."""
        sums_D = jnp.zeros(num_documents, jnp.float32)
        indices_BM = _find_documents(rows, num_documents)
        sums_BM = _sum_slots(spec, values_Bl, rows)
        return sums_D.at[indices_BM].add(sums_BM, mode="drop").reshape(-1, 2)

    def find_present(rows: Batch) -> Array:
        """True for the pairs in the rows of a microbatch; for those that lie in one."""
        unused_D = jnp.zeros(num_documents, jnp.int32)
        is_used_D = unused_D.at[_find_documents(rows, num_documents)].set(1, mode="drop")
        return jax.lax.psum(is_used_D.reshape(-1, 2)[:, 0], axes.GROUPS) > 0

    microbatches = batch.without_pairs()
    all_rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), microbatches)
    has_label_Bl = (all_rows.labels_BL != NO_LABEL).astype(jnp.float32)
    counts_P2 = jax.lax.psum(sum_documents(has_label_Bl, all_rows), axes.ALL)
    is_real_P = counts_P2[:, 0] > 0
    pairs = PairSums(
        logps_P2=jnp.zeros_like(counts_P2),
        references_P2=batch.pairs.references_P2,
        counts_P2=counts_P2,
        is_real_P=is_real_P,
        is_desirable_P=batch.pairs.is_desirable_P,
        num_pairs=is_real_P.sum(dtype=jnp.float32),
        num_first_tokens=counts_P2[:, 0].sum(),
    )

    def differentiate(partial_P2: Array, is_real_P: Array) -> tuple[Sums, Array]:
        """Sums of metrics over real pairs, and the weight of the token losses of each document.

        Args: partial_P2: this device's part of the log-probabilities.
        Returns: sums that are not 0 on one device only, so that a sum over the mesh counts them
            once.
        """
        keep = lambda x_P2: jnp.where(is_real_P[:, None], x_P2, 0)
        sums = dataclasses.replace(
            pairs,
            logps_P2=keep(jax.lax.psum(partial_P2, axes.ALL)),
            references_P2=keep(pairs.references_P2),
            counts_P2=keep(pairs.counts_P2),
            is_real_P=is_real_P,
        )
        losses_P, dlogps_P2 = objective.differentiate(sums)
        measured = objective.sum_metrics(sums, losses_P)
        is_first = jax.lax.axis_index(axes.ALL) == 0
        measured = {name: jnp.where(is_first, x, jnp.zeros_like(x)) for name, x in measured.items()}
        return measured, -dlogps_P2

    def spread(weights_P2: Array, rows: Batch) -> Float32[Array, "B l"]:
        """Weight of the document of each token of this device; 0 at padding."""
        indices_BM = _find_documents(rows, num_documents)
        weights_BM = weights_P2.ravel().at[indices_BM].get(mode="fill", fill_value=0)
        return _spread(spec, weights_BM, rows)

    def weigh(rows: Batch, compute_losses: Callable[[], Array]) -> tuple[Array, Sums]:
        partial_P2 = sum_documents(-compute_losses(), rows)
        sums, weights_P2 = differentiate(partial_P2, find_present(rows))
        return spread(weights_P2, rows), sums

    def score(inputs: tuple[Batch, Array]) -> tuple[Sums, None]:
        rows, microbatch = inputs
        keys = make_token_keys(spec, rows, step, microbatch)
        losses_Bl, _, _ = compute_token_losses(spec, shards, rows, keys)
        return {"logps_P2": sum_documents(-losses_Bl, rows)}, None

    if not spec.scores_pairs_first:
        return weigh, {}
    indices = jnp.arange(batch.tokens_BL.shape[0], dtype=jnp.int32)
    scores, _ = metric_table.scan_sums(score, (microbatches, indices))
    pair_sums, weights_P2 = differentiate(scores["logps_P2"], is_real_P)
    return lambda rows, _: (spread(weights_P2, rows), {}), pair_sums


def _find_documents(rows: Batch, num_documents: int) -> Int32[Array, "B M"]:
    """Document of each slot; out of range for unused ones, which `drop` and `fill` skip."""
    documents_BM = rows.documents_BM
    assert documents_BM is not None
    return jnp.where(documents_BM >= 0, documents_BM, num_documents)


def _find_slots(spec: StepSpec, rows: Batch) -> Int32[Array, "B l"]:
    """Slot of the segment of each of this device's tokens; -1 at padding."""
    row_spans = spans.RowSpans(
        seq=spec.mesh.shape[axes.SEQ],
        layout=spec.attend.layout,
        tokens_per_device=rows.labels_BL.shape[1],
    )
    return spans.find_slots(rows.starts_BM, rows.lengths_BM, row_spans.own_tokens())


def _sum_slots(
    spec: StepSpec, values_Bl: Float32[Array, "B l"], rows: Batch
) -> Float32[Array, "B M"]:
    """Sum of this device's values of each segment's tokens.

    Each slot is summed over the whole row, with zeros for tokens of other segments, and not by a
    scatter: the order is fixed, and no segment changes the rounding of another's sum.
    """
    slots_M = jnp.arange(rows.starts_BM.shape[1], dtype=jnp.int32)
    is_own_BlM = _find_slots(spec, rows)[..., None] == slots_M[None, None]
    return jnp.sum(jnp.where(is_own_BlM, values_Bl[..., None], 0), axis=1)


def _spread(spec: StepSpec, values_BM: Float32[Array, "B M"], rows: Batch) -> Float32[Array, "B l"]:
    """Value of the segment of each of this device's tokens; 0 at padding."""
    slots_Bl = _find_slots(spec, rows)
    values_Bl = jnp.take_along_axis(values_BM, jnp.maximum(slots_Bl, 0), axis=1)
    return jnp.where(slots_Bl >= 0, values_Bl, 0)
