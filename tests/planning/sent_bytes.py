"""Bytes that a device must send in a step, by formulas: the oracle of compiled programs; and those
that a program sends."""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxsp.attention.workload import count_workloads
from jaxsp.blocks import layers
from jaxsp.blocks.config import DELTA_NET
from jaxsp.blocks.layers import Parameter
from jaxsp.core import axes
from jaxsp.delta_rule.spans import RowSpans
from jaxsp.optimizers import muon, optimizer
from jaxsp.optimizers.registry import Optimizer
from jaxsp.planning.hlo import Collective
from jaxsp.sharding import sharding
from jaxsp.sharding.sharding import Gather
from jaxsp.training.specs import StepSpec


def step_bytes(spec: StepSpec) -> dict[str, float]:
    """Computes the bytes that a device must send in a step, by operation.

    Adds the formulas of attention, of the weights and of the optimizer. A few bytes of counts and
    norms, which are summed over the mesh too, are left out.
    """
    config = spec.config
    model = spec.model
    num_microbatches = spec.num_microbatches
    num_extra_passes = spec.remat_policy.num_extra_passes(model.num_layers)
    num_scoring_passes = int(spec.scores_pairs_first)
    totals: collections.Counter[str] = collections.Counter()
    of_weights = weight_bytes(
        spec.gather,
        spec.table,
        num_replicas=spec.mesh.shape[axes.REPLICA],
        num_microbatches=num_microbatches,
        num_extra_passes=num_extra_passes,
        num_scoring_passes=num_scoring_passes,
    )
    layers = count_workloads(config.rows, model, remat=spec.remat_policy.remat)
    totals.update(of_weights)
    totals.update(
        update_bytes(
            config.optimizer,
            spec.table,
            num_shards=spec.gather.num_shards,
            itemsize=spec.dtype.itemsize,
        )
    )
    num_passes = num_extra_passes + num_scoring_passes
    for layer, num_layers in layers.items():
        layer_bytes: dict[str, float] = dict(spec.attend.strategy.sent_bytes(layer))
        recomputed = dataclasses.replace(layer, remat="full", has_other_kinds=True)
        with_recomputation = spec.attend.strategy.sent_bytes(recomputed)
        without = spec.attend.strategy.sent_bytes(dataclasses.replace(recomputed, remat="none"))
        for operation, size in with_recomputation.items():
            forward = size - without.get(operation, 0)
            layer_bytes[operation] = layer_bytes.get(operation, 0) + num_passes * forward
        totals.update(
            {
                operation: num_microbatches * num_layers * size
                for operation, size in layer_bytes.items()
            }
        )
    num_layers = sum(layer.mixer == DELTA_NET for layer in model.layers)
    if num_layers:
        for operation, size in delta_net_bytes(spec).items():
            totals[operation] += num_microbatches * num_layers * size
    return dict(totals)


def weight_bytes(
    gather: Gather,
    table: layers.Weights,
    *,
    num_replicas: int,
    num_microbatches: int,
    num_extra_passes: float = 0,
    num_scoring_passes: int = 0,
) -> dict[str, float]:
    """Bytes that a device sends in a step for weights and gradients, by collective operation.

    Stacked weights are gathered in the forward and again in the backward pass, with every remat
    policy. A weight that is not stacked is gathered, and its gradient scattered, once per
    microbatch. A tied embedding is gathered once, because XLA merges gathers of the same shard,
    and both of its gradients are scattered, because their sum would need another whole float32
    table. Gradients are summed over the axes that their weights are not sharded on (all-reduce)
    once per step.

    Args:
        num_extra_passes: see `RematPolicy.num_extra_passes`.
        num_scoring_passes: forward passes of the whole model without gradients.
    """
    tied = None if "head" in table else table.get("embedding")
    sent = {"all-gather": 0.0, "reduce-scatter": 0.0, "all-reduce": 0.0}
    for param in jax.tree.leaves(table):
        size = math.prod(sharding.stored_shape(param, gather.num_shards))
        if sharding.choose_placement(param, gather.num_shards).dim is None:
            num_devices = gather.num_shards * num_replicas
            if param.is_trainable:
                sent["all-reduce"] += 4 * size * 2 * (1 - 1 / num_devices)
            continue
        fraction = num_microbatches * (1 - 1 / gather.num_shards)
        num_gathers = 1 if param.num_layers is None else 2 + num_extra_passes
        num_gathers += num_scoring_passes
        sent["all-gather"] += fraction * gather._gathered_bytes(param) * num_gathers
        if not param.is_trainable:
            continue
        moved = fraction * size
        num_scatters = 2 if param is tied else 1
        sent["reduce-scatter"] += moved * gather.reduce_dtype.itemsize * num_scatters
        sent["all-reduce"] += 4 * size / gather.num_shards * 2 * (1 - 1 / num_replicas)
    return sent


def update_bytes(
    config: Optimizer, table: layers.Weights, *, num_shards: int, itemsize: int
) -> dict[str, float]:
    """Bytes that a device sends in a step for the update, by collective operation.

    Args: itemsize: bytes of a number in the compute dtype.
    """
    totals: collections.Counter[str] = collections.Counter()
    for param in filter(lambda param: param.is_trainable, jax.tree.leaves(table)):
        if config.needs_whole_matrices and optimizer.is_layer_matrix(param):
            totals.update(exchange_bytes(param, num_shards, itemsize))
        state = optimizer.describe_state(config, param)
        totals.update(average_bytes(param, state, num_shards))
    return dict(totals)


def average_bytes(param: Parameter, state: Any, num_shards: int) -> dict[str, float]:
    """Bytes that a device sends to keep averages of a matrix's rows and columns on all devices.

    Averages along the sharded dim are summed over the shards (all-reduce), the others are gathered
    (all-gather). A few bytes for clipping are left out. Args: state: its shapes without padding.
    """
    placement = sharding.choose_placement(param, num_shards)
    experts = param.shape[: -len(param.matrix_shape)]
    averages = [(*experts, size) for size in param.matrix_shape]
    has_averages = any(
        x.shape[param.num_layers is not None :] in averages for x in jax.tree.leaves(state)
    )
    if placement.dim is None or len(param.matrix_shape) != 2 or not has_averages:
        return {}
    num_matrices = (param.num_layers or 1) * math.prod(experts)
    moved = 4 * num_matrices * (1 - 1 / num_shards)
    if placement.dim < len(experts):  # all averages of a device's experts are its own
        return {"all-gather": moved * sum(param.matrix_shape)}
    other_dim = 2 * len(experts) + 1 - placement.dim
    return {
        "all-gather": moved * placement.stored_shape[placement.dim],
        "all-reduce": 2 * moved * param.shape[other_dim],
    }


def exchange_bytes(param: Parameter, num_shards: int, itemsize: int) -> dict[str, float]:
    """Bytes that a device sends for all layers of a weight: two all-to-alls of its shards.

    A group that is not full is padded with matrices of zeros: 36 layers on 32 devices count as 64.
    """
    if param.num_layers is None or muon.has_whole_matrices(param, num_shards):
        return {}
    num_experts = param.num_experts or 1
    size = sharding.shard_size(param, num_shards) // (param.num_layers * num_experts)
    group_size = muon.group_size(param, num_shards)
    num_groups, num_remaining = divmod(param.num_layers, group_size)
    layers = [*num_groups * [group_size], num_remaining]
    num_matrices = sum(-(-n * num_experts // num_shards) * num_shards for n in layers)
    return {"all-to-all": 2 * itemsize * num_matrices * size * (1 - 1 / num_shards)}


def delta_net_bytes(spec: StepSpec) -> dict[str, float]:
    """Maps of states, and the tokens before each span, in the forward pass, its repetition
    and the backward pass."""
    sizes = spec.model.delta_net
    strategy = spec.attention.strategy
    seq = strategy.seq
    if seq == 1:
        return {}
    rows = spec.config.microbatch_rows
    state = 4 * sizes.num_heads * sizes.key_size * sizes.value_size
    whole_map = state + 4 * sizes.num_heads * sizes.key_size**2
    halo = (sizes.filter_size - 1) * sizes.num_channels * spec.dtype.itemsize
    layout = strategy.layout
    if layout.keeps_order:
        # The last exchange of the prefix needs no m, and its result is sent once more
        num_exchanges = math.ceil(math.log2(seq))
        sent = (num_exchanges - 1) * whole_map + 2 * state + halo
        return {"collective-permute": 3.0 * rows * sent}
    spans = RowSpans(seq=seq, layout=layout, tokens_per_device=spec.tokens_per_device // rows)
    num_others = rows * spans.count * (seq - 1)
    return {
        "all-gather": num_others * (3.0 * whole_map + 2 * halo),
        "reduce-scatter": num_others * halo,  # its gradient
    }


def sum_bytes(
    collectives: Sequence[Collective],
    *,
    operation: str | None = None,
    scope: str | None = None,
    dtype: str | None = None,
) -> float:
    """Sums the bytes that a device sends.

    Args: operation, scope, dtype: select collectives of one operation, in a jax.named_scope, or
        arrays of one dtype.
    """
    # differentiated operations are named jvp(scope)/..., and combined ones (a/scope/x:b/scope/y)
    scope_pattern = re.compile(rf"(?<![\w.]){re.escape(scope)}(?![\w.])" if scope else "")
    return sum(
        (
            num_bytes * collective.num_runs
            for collective in collectives
            for name, num_bytes in collective.bytes_by_dtype.items()
            if operation in (None, collective.operation)
            and scope_pattern.search(collective.op_name)
            and dtype in (None, name)
        ),
        start=0.0,
    )
