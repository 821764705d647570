"""The mesh and the attention of a step, and the choice of `mesh.seq: auto`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsp import attention
from jaxsp.blocks import float8
from jaxsp.blocks.config import ModelConfig
from jaxsp.config.schema import Config
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.experts import kernels
from jaxsp.memory import available_memory, memory_fit, memory_formula
from jaxsp.memory.available_memory import MemoryLimit
from jaxsp.runtime import device_mesh, memory_limits
from jaxsp.training.specs import StepSpec


def make_step_spec(
    config: Config,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    device_bytes: int | None = None,
) -> StepSpec:
    """Makes the step of a config whose mesh.seq is no longer `auto`.

    Args: device_bytes: memory of a device; None: what the devices report, if they are present.
    Raises: UserError for attention, a mesh, or kernels that are not possible.
    """
    choice = attention.choose(config, model, devices=devices, device_bytes=device_bytes)
    requested = config.model.experts_kernel
    if model.experts is None:
        if requested != "auto":
            raise UserError(
                f"model.experts_kernel = {requested}: the model has no experts. Remove the field."
            )
    else:
        kernel = kernels.choose(
            requested,
            dims=(model.hidden_size, model.experts.size),
            dtype=config.model.compute_dtype,
            devices=devices,
        )
        model = dataclasses.replace(
            model, experts=dataclasses.replace(model.experts, kernel=kernel)
        )
    if (linear_dtype := config.model.linear_dtype) is not None:
        float8.check_devices(devices)
        float8.check_model(model.hidden_size)
        model = dataclasses.replace(model, linear_dtype=linear_dtype)
    sizes = device_mesh.resolve_axis_sizes(config.mesh, len(devices))
    return StepSpec(
        config=config,
        model=model,
        mesh=device_mesh.make_mesh(sizes, list(devices)),
        attention=choice,
        num_steps=1,
    )


def resolve_degree(
    config: Config,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    limits: MemoryLimit | None = None,
    device_bytes: int | None = None,
    with_training: bool = True,
) -> Config:
    """Replaces `mesh.seq: auto` by a number of devices.

    Numbers are compared by the memory formula: attention is recomputed only if it is with all of
    them, groups stay inside a node if possible, and then least is recomputed. Of equal numbers it
    is the smallest, because smaller groups communicate less. `batch.rows_per_microbatch: auto`
    counts as 1.

    Args:
        limits: memory of a device and the host; None: what the devices report.
        device_bytes: see `make_step_spec`.
        with_training: False: batch.rows_per_step does not matter.
    Raises: UserError if rows cannot be divided among any number of devices.
    """
    if config.mesh.seq != "auto":
        return config
    if limits is None:
        limits = available_memory.find_limits(devices)
    possible: dict[int, StepSpec] = {}
    problems = ProblemCollector()
    for seq in list_degrees(config, len(devices)):
        candidate = config.with_one_row_for_auto().with_degree(seq)
        with problems.collect():
            spec = make_step_spec(candidate, model, devices=devices, device_bytes=device_bytes)
            found = device_mesh.find_division_problems(
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
    return config.with_degree(_choose_degree(possible, limits))


def list_degrees(config: Config, num_devices: int) -> list[int]:
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
