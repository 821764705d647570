"""The choice of `mesh.seq: auto` and `batch.rows_per_microbatch: auto`."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsp.blocks.config import ModelConfig
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.memory import available_memory, memory_fit, memory_formula
from jaxsp.memory.available_memory import MemoryLimit
from jaxsp.system import device_mesh, memory_limits
from jaxsp.training.specs import StepSpec, find_division_problems, make_spec
from jaxsp.training.step_config import StepConfig

MIN_PREDICTED_RATIO = 0.93
"""Minimum ratio of predicted to compiled memory (tests/memory/test_memory_fit.py)."""


def resolve(
    config: StepConfig,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    limits: MemoryLimit | None = None,
    device_bytes: int | None = None,
    with_training: bool = True,
) -> StepConfig:
    """Replaces `auto` in mesh.seq and batch.rows_per_microbatch with numbers.

    Args:
        limits: memory of a device and the host; None: what the devices report.
        device_bytes: see `specs.make_spec`.
        with_training: False: batch.rows_per_step does not matter.
    Raises: UserError if rows cannot be divided among any number of devices.
    """
    if "auto" not in (config.mesh.seq, config.rows_per_microbatch):
        return config
    if limits is None:
        limits = available_memory.find_limits(devices)
    memory: dict[str, Any] = {"limits": limits, "device_bytes": device_bytes}
    if config.mesh.seq == "auto":
        config = _resolve_degree(
            config, model, devices=devices, with_training=with_training, **memory
        )
    if config.rows_per_microbatch == "auto":
        config = _resolve_rows(config, model, devices=devices, **memory)
    return config


def _resolve_degree(
    config: StepConfig,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    limits: MemoryLimit,
    device_bytes: int | None,
    with_training: bool,
) -> StepConfig:
    """Replaces `mesh.seq: auto`.

    Numbers are compared by the memory formula: attention is recomputed only if it is with all of
    them, groups stay inside a node if possible, and then least is recomputed. Of equal numbers it
    is the smallest, because smaller groups communicate less. `batch.rows_per_microbatch: auto`
    counts as 1.
    """
    possible: dict[int, StepSpec] = {}
    problems = ProblemCollector()
    for seq in list_degrees(config, len(devices)):
        candidate = config.with_one_row_for_auto().change(mesh={"seq": seq})
        with problems.collect():
            spec = make_spec(candidate, model, devices=devices, device_bytes=device_bytes)
            found = find_division_problems(
                candidate,
                dict(spec.mesh.shape),
                layout=spec.attention.strategy.layout,
                with_training=with_training,
            )
            if found:
                raise UserError(found)
            possible[seq] = spec
    if not possible:
        raise UserError(problems[0].replace(":", " (mesh.seq = auto):", 1))
    return config.change(mesh={"seq": _choose_degree(possible, limits)})


def list_degrees(config: StepConfig, num_devices: int) -> list[int]:
    """Numbers of devices that a row can be divided among, the smallest first."""
    per_replica = max(1, num_devices // config.mesh.replica)
    return [seq for seq in range(1, per_replica + 1) if per_replica % seq == 0]


def _choose_degree(specs: Mapping[int, StepSpec], limits: MemoryLimit) -> int:
    """The degree that recomputes attention only if all do, stays inside a node if possible, and
    then recomputes least: the smallest of those, or the largest if nothing fits."""
    costs = {}
    for seq, spec in specs.items():
        usable = available_memory.subtract_reserves(spec, limits)
        remats = memory_fit.list_remats(spec, is_memory_known=True)
        for candidate in memory_fit.list_candidates(spec, is_memory_known=True):
            needed = memory_formula.predict_bytes(candidate)
            offloaded = memory_formula.step_offloaded_bytes(candidate).total
            if needed <= usable.device and offloaded <= usable.pinned:
                policy = candidate.remat_policy
                leaves_node = seq > memory_limits.DEVICES_PER_NODE
                rank = remats.index(policy.remat)
                costs[seq] = (not policy.is_attention_saved, leaves_node, rank, seq)
                break
    return min(costs, key=lambda seq: costs[seq]) if costs else max(specs)


def _resolve_rows(
    config: StepConfig,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    limits: MemoryLimit,
    device_bytes: int | None,
) -> StepConfig:
    """Replaces `batch.rows_per_microbatch: auto` by a number that adds no recomputation.

    That is the largest number with which a step keeps as much as it can with 1 row. The formula may
    predict too much for 1 row, and too little for several: the number is larger than 1 only if it
    holds in both cases.
    """
    one_row = config.change(rows_per_microbatch=1)
    if math.isinf(limits.device):
        return one_row
    try:
        _raise_if_undivided(one_row, len(devices))
        spec = make_spec(one_row, model, devices=devices, device_bytes=device_bytes)
        reference = _find_reference(spec, limits)
    except UserError:  # reported later, with all others
        return one_row
    if reference is None:
        return one_row
    rows_per_step = config.rows_per_step
    for number in range(rows_per_step, 1, -1):
        if rows_per_step % number:
            continue
        larger = config.change(rows_per_microbatch=number)
        with contextlib.suppress(UserError):  # not all numbers divide the rows of a group
            _raise_if_undivided(larger, len(devices))
            if _keeps_as_much(spec.respec(rows_per_microbatch=number), reference, limits):
                return larger
    return one_row


def _raise_if_undivided(config: StepConfig, num_devices: int) -> None:
    """Raises: UserError if rows cannot be divided among the devices."""
    sizes = device_mesh.resolve_axis_sizes(config.mesh, num_devices)
    if problems := find_division_problems(config, sizes, layout=None):
        raise UserError(problems)


def _find_reference(spec: StepSpec, limits: MemoryLimit) -> StepSpec | None:
    """A step of 1 row with the fastest memory options that may fit.

    None if more rows would recompute more: if nothing fits, and if some layers, but not all, may
    keep the MLP's products.
    """
    usable = available_memory.subtract_reserves(spec, limits).device
    for candidate in memory_fit.list_candidates(spec, is_memory_known=True):
        if memory_formula.predict_bytes(candidate) <= memory_fit.MAX_PREDICTED_RATIO * usable:
            return None if memory_fit.can_keep_more(spec, candidate) else candidate
    return None


def _keeps_as_much(spec: StepSpec, reference: StepSpec, limits: MemoryLimit) -> bool:
    """True if a step fits even if the formula predicts too little, recomputes no more than the
    reference, and has no smaller tiles."""
    if spec.attention.kernel.name != reference.attention.kernel.name:
        return False
    min_mlp_tile = reference.mlp_tile
    if min_mlp_tile >= reference.tokens_per_device:  # no tiles
        min_mlp_tile = spec.tokens_per_device
    usable = available_memory.subtract_reserves(spec, limits)
    return any(
        candidate.remat_policy == reference.remat_policy
        and candidate.mlp_tile >= min_mlp_tile
        and candidate.loss_tile >= reference.loss_tile
        and memory_formula.predict_bytes(candidate) <= MIN_PREDICTED_RATIO * usable.device
        and memory_formula.step_offloaded_bytes(candidate).total <= usable.pinned
        for candidate in memory_fit.list_candidates(spec, is_memory_known=True)
    )
