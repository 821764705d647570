"""Gradients and counts of a step, equal on every mesh.

Loss and gradients are computed inside one shard_map over the whole mesh. The function that is
differentiated there is this device's *sum* of token losses, with no collective on it. Sums over
devices come afterwards, each exactly once, and gradients are divided once by the loss tokens of the
whole step. (DeepSpeed 0.19.8 with its documented recipe differentiates a gathered mean, and its
gradients are `seq` times too large with ZeRO 0 to 2.)
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxsp.blocks import dropout, layers
from jaxsp.blocks.dropout import Keys
from jaxsp.blocks.layers import Parameter
from jaxsp.core import axes, host_memory
from jaxsp.core.batch import NO_LABEL, Batch, Pairs, partition_specs, step_row_index
from jaxsp.experts import balance
from jaxsp.model import decoder
from jaxsp.runtime import device_mesh
from jaxsp.sharding import host_offload, sharding
from jaxsp.sharding.sharding import Shard
from jaxsp.training import loss, metric_table, pair_losses
from jaxsp.training.metric_table import Sums
from jaxsp.training.specs import StepSpec

_RETURN_GRADIENT = jax.ad.GradValue  # type: ignore[attr-defined]  # public, without type stubs
"""Marks a gradient that the backward pass returns instead of adding it to a reference."""


def compute_gradients(
    spec: StepSpec, master: layers.Weights, batch: Batch, step: Array | int = 0
) -> tuple[layers.Weights, dict[str, Array]]:
    """Gradients of the loss of a step, and its metrics. Call under jit.

    The loss is the mean token loss and, if routers have losses of their own, their means over rows.

    Args: step: its number, for dropout.
    Returns: gradients sharded like the weights, with None for frozen weights; and METRICS with the
        sums that they are made from.
    """

    def local(master: layers.Weights, batch: Batch) -> tuple[layers.Weights, Sums]:
        return _local_gradients(spec, master, batch, jnp.asarray(step, jnp.int32))

    gradients, sums = _run_on_mesh(spec, local, master, batch, has_gradients=True)
    return gradients, sums | metric_table.compute_metrics(sums)


def _local_gradients(
    spec: StepSpec, master: layers.Weights, batch: Batch, step: Array
) -> tuple[layers.Weights, Sums]:
    """Gradients and sums from this device's shards and rows, inside shard_map."""
    table = spec.table
    values = master
    if not spec.has_offloaded_gradients:
        values = spec.gather.make_working_copy(table, master)
    grad_holders = spec.gather.make_grad_holders(table, values)
    holders, structure = jax.tree.flatten(grad_holders)
    make_objective = _choose_objective(spec, batch)
    weigh, pair_sums = _prepare_pairs(spec, values, grad_holders, batch, step)
    batch = dataclasses.replace(batch, pairs=None)
    params = [param for param in jax.tree.leaves(table) if param.is_trainable]
    has_one_microbatch = batch.tokens_BL.shape[0] == 1
    returned_holders = _select_returned(
        spec, params, holders, is_all_returned=has_one_microbatch and spec.has_one_loop
    )
    targets = [
        _RETURN_GRADIENT() if number in returned_holders else jax.new_ref(holder)
        for number, holder in enumerate(holders)
    ]

    def run_microbatch(
        batch: Batch, index: Array | int, totals: dict[int, Array]
    ) -> tuple[Sums, dict[int, Array]]:
        """Sums over a microbatch, and `totals` with the gradients that are returned."""
        keys = _make_token_keys(spec, batch, step, index)
        inputs = [
            holder if host_memory.is_on_host(holder) else totals.get(number, holder)
            for number, holder in enumerate(holders)
        ]

        def sum_loss(holders: list[Array]) -> tuple[Array, Sums]:
            tree = jax.tree.unflatten(structure, holders)
            sums = _sum_microbatch(spec, values, tree, batch, keys, weigh)
            return make_objective(sums), sums

        _, backward, sums = jax.vjp(sum_loss, inputs, has_aux=True)
        (gradients,) = cast(Any, backward).with_refs(targets)(jnp.float32(1))
        return sums, {number: gradients[number] for number in totals}

    def add_microbatch(carry: tuple, inputs: tuple[Batch, Array]) -> tuple[tuple, None]:
        sums, totals = carry
        microbatch_sums, gradients = run_microbatch(*inputs, totals)
        gradients |= _add_on_host(params, totals, gradients)
        return (jax.tree.map(jnp.add, sums, microbatch_sums), gradients), None

    if has_one_microbatch:
        sums, returned = run_microbatch(jax.tree.map(lambda x: x[0], batch), 0, returned_holders)
    else:
        sum_microbatch = functools.partial(_sum_microbatch, spec, values, grad_holders, weigh=weigh)
        carry = (metric_table.make_zeros(sum_microbatch, batch), returned_holders)
        indices = jnp.arange(batch.tokens_BL.shape[0], dtype=jnp.int32)
        (sums, returned), _ = jax.lax.scan(add_microbatch, carry, (batch, indices))
    leaves = [
        returned[number] if number in returned else jax.freeze(target)
        for number, target in enumerate(targets)
    ]
    sums = _sum_over_mesh(sums | pair_sums, batch)
    divisor = metric_table.make_divisor(sums["loss_weight"])
    return spec.gather.reduce(table, jax.tree.unflatten(structure, leaves), divisor), sums


def _add_on_host(
    params: Sequence[Parameter], totals: dict[int, Array], gradients: dict[int, Array]
) -> dict[int, Array]:
    """Sums of the gradients in host memory, in place: devices hold one layer at a time."""
    return {
        number: host_offload.update_each_layer(params[number], jnp.add, total, gradients[number])
        for number, total in totals.items()
        if host_memory.is_on_host(total)
    }


def _select_returned(
    spec: StepSpec, params: Sequence[Parameter], holders: Sequence[Array], *, is_all_returned: bool
) -> dict[int, Array]:
    """Holders, by number, whose gradients the backward pass returns. It adds others to references.

    Added after the backward pass, the gradients of all layers would be on the device twice (8B on 8
    GPUs: 3.5 GiB more). The layers' own backward pass adds to the values of its holders, and JAX's
    to references, which host memory does not have.

    Args: is_all_returned: True if there is nothing to add to, so that all are returned.
    """
    if is_all_returned:
        return dict(enumerate(holders))
    has_sums_in_holders = spec.remat_policy.has_own_backward_pass
    return {
        number: holder
        for number, (param, holder) in enumerate(zip(params, holders, strict=True))
        if host_memory.is_on_host(holder) or (has_sums_in_holders and param.num_layers is not None)
    }


def compute_sums(spec: StepSpec, master: layers.Weights, batch: Batch) -> Sums:
    """Sums over a step's rows: those of the loss, and counts. Call under jit.

    With an objective for pairs, `logps_P2` and `counts_P2` instead of those of the loss: the
    log-probability and the number of loss tokens of each document.
    """

    def local(master: layers.Weights, batch: Batch) -> Sums:
        holders = spec.gather.make_grad_holders(spec.table, master)
        pairs = batch.pairs
        batch = dataclasses.replace(batch, pairs=None)

        def compute(batch: Batch) -> Sums:
            if pairs is None:
                return _sum_microbatch(spec, master, holders, batch)
            return _score_microbatch(spec, master, holders, batch, pairs)

        sums, _ = metric_table.scan_sums(lambda batch: (compute(batch), None), batch)
        return _sum_over_mesh(sums, batch)

    return _run_on_mesh(spec, local, master, batch, has_gradients=False)


Weigh = Callable[[Batch, Callable[[], Array]], tuple[Array, Sums]]
"""Function of a microbatch, and of a function that computes its token losses. It returns a weight
for the loss of each token, and sums over pairs."""


def _prepare_pairs(
    spec: StepSpec, values: layers.Weights, holders: layers.Weights, batch: Batch, step: Array
) -> tuple[Weigh | None, Sums]:
    """Function that computes the weights of tokens, None without pairs; and sums over pairs.

    The sums are empty if each microbatch has its own.
    """
    if spec.objective is None:
        return None, {}
    pairs = pair_losses.find_step_pairs(spec, batch)
    batch = dataclasses.replace(batch, pairs=None)
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
        keys = _make_token_keys(spec, rows, step, microbatch)
        sums = _score_microbatch(spec, values, holders, rows, pairs.inputs, keys)
        return {"logps_P2": sums["logps_P2"]}, None

    indices = jnp.arange(batch.tokens_BL.shape[0], dtype=jnp.int32)
    scores, _ = metric_table.scan_sums(score, (batch, indices))
    logps_P2 = jax.lax.psum(scores["logps_P2"], axes.ALL)
    pair_sums, weights_P2 = pair_losses.differentiate(
        spec, pairs, logps_P2, pairs.counts_P2[:, 0] > 0
    )
    return lambda batch, _: (pair_losses.spread(spec, weights_P2, batch), {}), pair_sums


def _sum_microbatch(
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
    hidden_BlD, head, statistics = _run_layers(spec, values, holders, batch, token_keys)
    if weigh is None:
        sums = loss.sum_token_losses(hidden_BlD, batch.labels_BL, batch.weights_BL, **head)
        return sums | statistics
    compute_losses = lambda: loss.compute_token_losses(hidden_BlD, batch.labels_BL, **head)[0]
    weights_Bl, pair_sums = weigh(batch, compute_losses)
    sums = loss.sum_token_losses(hidden_BlD, batch.labels_BL, weights_Bl, **head)
    sums[WEIGHTED_SUM] = sums.pop("loss_sum")
    return sums | pair_sums | statistics


WEIGHTED_SUM = "weighted_loss_sum"
"""Sum of token losses with the weights of an objective, whose own loss is `loss_sum`."""


def _score_microbatch(
    spec: StepSpec,
    values: layers.Weights,
    holders: layers.Weights,
    batch: Batch,
    pairs: Pairs,
    token_keys: Keys | None = None,
) -> Sums:
    """Log-probabilities of documents, as sums over this device's part of a microbatch."""
    hidden_BlD, head, statistics = _run_layers(spec, values, holders, batch, token_keys)
    losses_Bl, num_correct = loss.compute_token_losses(hidden_BlD, batch.labels_BL, **head)
    logps_P2 = pair_losses.sum_log_probabilities(spec, losses_Bl, batch, pairs)
    sums = {"logps_P2": logps_P2, "num_correct": num_correct}
    sums["counts_P2"] = pair_losses.count_loss_tokens(spec, batch, pairs)
    return sums | statistics


def _run_layers(
    spec: StepSpec,
    values: layers.Weights,
    holders: layers.Weights,
    batch: Batch,
    token_keys: Keys | None,
) -> tuple[Array, dict[str, Any], Sums]:
    """Hidden states, arguments of the functions of `loss`, and sums of routers' statistics."""
    shards = jax.tree.map(
        lambda _, value, holder: Shard(value=value, grad_holder=holder), spec.table, values, holders
    )
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
    head = {
        "gather": spec.gather,
        "head": decoder.lm_head(spec.table),
        "shard": decoder.lm_head(shards),
        "tile": min(spec.loss_tile, batch.tokens_BL.size),
        "token_loss": spec.loss,
        "transform_logits": functools.partial(decoder.transform_logits, spec.model),
    }
    sums = balance.sum_over_rows(statistics, batch.lengths_BM) if statistics else {}
    return hidden_BlD, head, sums


def _choose_objective(spec: StepSpec, batch: Batch) -> Callable[[Sums], Array]:
    """Function that computes what is differentiated from the sums of a device over a microbatch.

    It is the sum of token losses, which is divided by the loss tokens of the step at the end; with
    an objective for pairs the weighted sum, which is divided by the pairs.
    Losses of routers are means over rows, with a factor that makes up for that.

    Args: batch: that of the step.
    """
    experts = spec.model.experts
    differentiated = "loss_sum" if spec.objective is None else WEIGHTED_SUM
    if experts is None or not experts.has_losses:
        return operator.itemgetter(differentiated)
    counts = _sum_over_mesh({}, batch)
    loss_weight = metric_table.make_divisor(counts["loss_weight"])
    factor = loss_weight / metric_table.make_divisor(counts["num_rows"])

    def add_router_losses(sums: Sums) -> Array:
        router_loss = experts.aux_loss_coef * sums["router_aux_loss_sum"]
        router_loss += experts.z_loss_coef * sums["router_z_loss_sum"]
        return sums[differentiated] + factor * router_loss

    return add_router_losses


def _make_token_keys(
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
    return dropout.make_token_keys(
        seed=spec.config.run.seed,
        step=step,
        rows_B=step_row_index(
            microbatch, slots_B, num_groups=num_groups, rows_per_microbatch=num_rows
        ),
        tokens_l=spec.attend.layout.tokens_in_places(
            places_l, row_tokens=num_tokens * spec.mesh.shape[axes.SEQ]
        ),
    )


def _sum_over_mesh(sums: Sums, batch: Batch) -> Sums:
    """Adds each device's sums over its part of a step, and counts rows and tokens."""

    def count(values: Array, over: tuple[str, ...]) -> Array:
        return jax.lax.psum(values.sum(dtype=jnp.int32), over)

    # Labels are sharded over the whole mesh. Starts and lengths are replicated along seq, and count
    # once there.
    sums = jax.lax.psum(sums, axes.ALL) | {
        "num_rows": count((batch.lengths_BM > 0).any(-1), axes.GROUPS),
        "num_tokens": count(batch.lengths_BM, axes.GROUPS),
        "num_loss_tokens": count(batch.labels_BL != NO_LABEL, axes.ALL),
    }
    sums["loss_weight"] = sums["num_loss_tokens"]
    if batch.documents_BM is not None:
        sums["num_pairs"] = count(batch.documents_BM >= 0, axes.GROUPS) // 2
        sums["loss_weight"] = sums["num_pairs"]
    if batch.weights_BL is not None:
        weights_BL = jnp.where(batch.labels_BL != NO_LABEL, batch.weights_BL, 0.0)
        sums["loss_weight"] = jax.lax.psum(weights_BL.sum(), axes.ALL)
    return sums


def _run_on_mesh(
    spec: StepSpec,
    local: Callable,
    master: layers.Weights,
    batch: Batch,
    *,
    has_gradients: bool,
) -> Any:
    """Runs `local`, which returns sums, on each device's shards and rows.

    Args: has_gradients: True if it returns gradients and sums.
    """
    weight_specs = jax.tree.map(
        lambda param: sharding.partition_spec(param, spec.gather.num_shards), spec.table
    )
    on_mesh = jax.shard_map(
        local,
        mesh=spec.mesh,
        in_specs=(weight_specs, partition_specs(batch)),
        out_specs=(weight_specs, PartitionSpec()) if has_gradients else PartitionSpec(),
        check_vma=False,
    )
    # GPUs would multiply float32 matrices in TF32, with 10 bits of mantissa
    with jax.default_matmul_precision("float32" if spec.dtype == jnp.float32 else None):
        return on_mesh(master, batch)
