"""The choice of `mesh.seq: auto`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxsp.blocks.config import ModelConfig
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.memory import available_memory, memory_fit, memory_formula
from jaxsp.memory.available_memory import MemoryLimit
from jaxsp.runtime import memory_limits
from jaxsp.training.specs import StepSpec, find_division_problems, make_spec
from jaxsp.training.step_config import StepConfig


def resolve_degree(
    config: StepConfig,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    limits: MemoryLimit | None = None,
    device_bytes: int | None = None,
    with_training: bool = True,
) -> StepConfig:
    """Replaces `mesh.seq: auto` by a number of devices.

    Numbers are compared by the memory formula: attention is recomputed only if it is with all of
    them, groups stay inside a node if possible, and then least is recomputed. Of equal numbers it
    is the smallest, because smaller groups communicate less. `batch.rows_per_microbatch: auto`
    counts as 1.

    Args:
        limits: memory of a device and the host; None: what the devices report.
        device_bytes: see `make_spec`.
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
