"""Gradients and counts of a step, equal on every mesh.

Loss and gradients are computed inside one shard_map over the whole mesh. The function that is
differentiated there is this device's *sum* of token losses, with no collective on it. Sums over
devices come afterwards, each exactly once, and gradients are divided once by the loss tokens of the
whole step. (DeepSpeed 0.19.8 with its documented recipe differentiates a gathered mean, and its
gradients are `seq` times too large with ZeRO 0 to 2.)
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32, Int8

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.core import axes
from jaxsp.core.batch import NO_LABEL, PER_TOKEN, Batch, partition_specs
from jaxsp.objectives.objective import TileTokens
from jaxsp.sharding import host_offload, sharding
from jaxsp.system import device_memory
from jaxsp.training import metric_table, microbatch
from jaxsp.training.metric_table import Sums
from jaxsp.training.microbatch import Shards
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

    out_specs = (_weight_specs(spec), PartitionSpec())
    gradients, sums = run_on_mesh(spec, local, master, batch, out_specs=out_specs)
    return gradients, sums | metric_table.compute_metrics(sums)


def _local_gradients(
    spec: StepSpec, master: layers.Weights, batch: Batch, step: Array
) -> tuple[layers.Weights, Sums]:
    """Gradients and sums from this device's shards and rows, inside shard_map."""
    table = spec.state_table
    values = master
    if not spec.has_offloaded_gradients:
        values = spec.gather.make_working_copy(table, master)
    grad_holders = spec.gather.make_grad_holders(table, values)
    values = spec.gather.add_scales(table, values)
    holders, structure = jax.tree.flatten(grad_holders)
    make_objective = _choose_objective(spec, batch)
    shards = microbatch.make_shards(spec, values, grad_holders)
    weigh, pair_sums = microbatch.prepare_pairs(spec, shards, batch, step)
    batch = batch.without_pairs()
    params = [param for param in jax.tree.leaves(table) if param.is_trainable]
    has_one_microbatch = batch.tokens_BL.shape[0] == 1
    is_all_returned = has_one_microbatch and spec.has_one_loop
    returned_holders = _select_returned(spec, params, holders, is_all_returned=is_all_returned)
    targets = [
        _RETURN_GRADIENT() if number in returned_holders else jax.new_ref(holder)
        for number, holder in enumerate(holders)
    ]

    def run_microbatch(
        batch: Batch, index: Array | int, totals: dict[int, Array]
    ) -> tuple[Sums, dict[int, Array]]:
        """Sums over a microbatch, and `totals` with the gradients that are returned."""
        keys = microbatch.make_token_keys(spec, batch, step, index)
        inputs = [
            holder if device_memory.is_on_host(holder) else totals.get(number, holder)
            for number, holder in enumerate(holders)
        ]

        def sum_loss(holders: list[Array]) -> tuple[Array, Sums]:
            own = microbatch.make_shards(spec, values, jax.tree.unflatten(structure, holders))
            sums = microbatch.sum_microbatch(spec, own, batch, keys, weigh)
            return make_objective(sums), sums

        _, backward, sums = jax.vjp(sum_loss, inputs, has_aux=True)
        (gradients,) = cast(Any, backward).with_refs(targets)(jnp.float32(1))
        return sums, {number: gradients[number] for number in totals}

    def add_microbatch(carry: tuple, inputs: tuple[Batch, Array]) -> tuple[tuple, None]:
        sums, totals = carry
        microbatch_sums, gradients = run_microbatch(*inputs, totals)
        for number, total in totals.items():
            if device_memory.is_on_host(total):  # in place: devices hold one layer at a time
                gradients[number] = host_offload.update_each_layer(
                    params[number], jnp.add, total, gradients[number]
                )
        return (metric_table.add(sums, microbatch_sums), gradients), None

    if has_one_microbatch:
        sums, returned = run_microbatch(jax.tree.map(lambda x: x[0], batch), 0, returned_holders)
    else:
        sum_rows = functools.partial(microbatch.sum_microbatch, spec, shards, weigh=weigh)
        zeros = metric_table.make_zeros(sum_rows, batch)
        inputs = (batch, jnp.arange(batch.tokens_BL.shape[0], dtype=jnp.int32))
        (sums, returned), _ = jax.lax.scan(add_microbatch, (zeros, returned_holders), inputs)
    leaves = [
        returned[number] if number in returned else jax.freeze(target)
        for number, target in enumerate(targets)
    ]
    sums = _sum_over_mesh(spec, sums | pair_sums, batch)
    divisor = metric_table.make_divisor(sums["loss_weight"])
    return spec.gather.reduce(table, jax.tree.unflatten(structure, leaves), divisor), sums


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
        if device_memory.is_on_host(holder)
        or (has_sums_in_holders and param.num_layers is not None)
    }


class BatchLosses(NamedTuple):
    """Losses of the tokens of a batch, in the order of its rows and places."""

    losses_BL: Float32[Array, "microbatches B L"]
    """0 without a label."""
    outcomes_BL: Int8[Array, "microbatches B L"]
    """-1 without a label; 1 where the label is the likeliest token; otherwise 0."""
    sums: Sums
    """Counts, and sums over the tokens and of routers' statistics."""


def compute_token_losses(spec: StepSpec, master: layers.Weights, batch: Batch) -> BatchLosses:
    """Losses of the tokens of a batch, without gradients. Call under jit."""

    def compute(shards: Shards, batch: Batch) -> tuple[Sums, Any]:
        losses_Bl, is_correct_Bl, sums = microbatch.compute_token_losses(spec, shards, batch)
        has_label_Bl = batch.labels_BL != NO_LABEL
        outcomes_Bl = jnp.where(has_label_Bl, is_correct_Bl.astype(jnp.int8), jnp.int8(-1))
        return sums, (losses_Bl, outcomes_Bl)

    def local(master: layers.Weights, batch: Batch) -> BatchLosses:
        batch = batch.without_pairs()
        compute_rows = functools.partial(compute, _make_shards(spec, master))
        sums, (losses_BL, outcomes_BL) = metric_table.scan_sums(compute_rows, batch)
        return BatchLosses(losses_BL, outcomes_BL, _sum_over_mesh(spec, sums, batch))

    specs = BatchLosses(PER_TOKEN, PER_TOKEN, PartitionSpec())  # type: ignore[arg-type]
    return run_on_mesh(spec, local, master, batch, out_specs=specs)


def compute_numbers(
    spec: StepSpec,
    compute: Callable[[TileTokens], dict[str, Array]],
    master: layers.Weights,
    batch: Batch,
) -> dict[str, Array]:
    """Numbers of the tokens of a batch: see `loss.compute_numbers`. Call under jit."""

    def local(master: layers.Weights, batch: Batch) -> dict[str, Array]:
        shards = _make_shards(spec, master)
        compute_rows = lambda rows: microbatch.compute_numbers(spec, shards, rows, compute)
        return jax.lax.map(compute_rows, batch.without_pairs())

    return run_on_mesh(spec, local, master, batch, out_specs=PER_TOKEN)


def _make_shards(spec: StepSpec, master: layers.Weights) -> Shards:
    """Shards of a step without gradients."""
    holders = spec.gather.make_grad_holders(spec.state_table, master)
    values = spec.gather.add_scales(spec.state_table, master)
    return microbatch.make_shards(spec, values, holders)


def _choose_objective(spec: StepSpec, batch: Batch) -> Callable[[Sums], Array]:
    """Function that computes what is differentiated from the sums of a device over a microbatch.

    It is the sum of token losses, or the weighted sum with an objective for pairs, which is divided
    by `Objective.find_divisor` at the end. Losses of routers are means over rows, and have a factor
    that makes up for that.

    Args: batch: that of the step.
    """
    experts = spec.model.experts
    differentiated = microbatch.WEIGHTED_SUM if spec.objective.has_pairs else "loss_sum"
    if experts is None or not experts.has_losses:
        return operator.itemgetter(differentiated)
    counts = _sum_over_mesh(spec, {}, batch)
    loss_weight = metric_table.make_divisor(counts["loss_weight"])
    factor = loss_weight / metric_table.make_divisor(counts["num_rows"])

    def add_router_losses(sums: Sums) -> Array:
        router_loss = experts.aux_loss_coef * sums["router_aux_loss_sum"]
        router_loss += experts.z_loss_coef * sums["router_z_loss_sum"]
        return sums[differentiated] + factor * router_loss

    return add_router_losses


def _sum_over_mesh(spec: StepSpec, sums: Sums, batch: Batch) -> Sums:
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
    if spec.objective.is_by_document:  # every document in a row has a loss token
        sums["num_trajectories"] = count(batch.lengths_BM > 0, axes.GROUPS)
    if batch.documents_BM is not None:
        sums["num_pairs"] = count(batch.documents_BM >= 0, axes.GROUPS) // 2
    sums["loss_weight"] = spec.objective.find_divisor(sums)
    if batch.weights_BL is not None:
        weights_BL = jnp.where(batch.labels_BL != NO_LABEL, batch.weights_BL, 0.0)
        sums["loss_weight"] = jax.lax.psum(weights_BL.sum(), axes.ALL)
    return sums


def _weight_specs(spec: StepSpec) -> Any:
    """PartitionSpec of each weight."""
    return jax.tree.map(
        lambda param: sharding.partition_spec(param, spec.gather.num_shards), spec.state_table
    )


def run_on_mesh(
    spec: StepSpec,
    local: Callable,
    master: layers.Weights,
    batch: Batch,
    *,
    out_specs: Any,
) -> Any:
    """Runs `local` on each device's shards and rows. Args: out_specs: of what it returns."""
    on_mesh = jax.shard_map(
        local,
        mesh=spec.mesh,
        in_specs=(_weight_specs(spec), partition_specs(batch)),
        out_specs=out_specs,
        check_vma=False,
    )
    # GPUs would multiply float32 matrices in TF32, with 10 bits of mantissa
    with jax.default_matmul_precision("float32" if spec.dtype == jnp.float32 else None):
        return on_mesh(master, batch)
