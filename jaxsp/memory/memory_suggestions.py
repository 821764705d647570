"""Suggestions for a step that does not fit into memory: changes of the config that need less."""

import contextlib
import dataclasses
from typing import Any, get_args

from jaxsp.attention.selection import choose_strategy
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.memory import memory_problems
from jaxsp.model.remat import RematPolicy
from jaxsp.training.memory_config import MemoryConfig
from jaxsp.training.specs import StepSpec, find_division_problems


def suggest_changes(spec: StepSpec, *, is_device_short: bool) -> list[str]:
    """Suggestions: changes that reduce a step's memory and work with this release of JAX and this
    model."""
    if is_device_short:
        policy = spec.remat_policy
        memory_changes: list[dict[str, Any]] = []
        is_fixed = spec.config.memory.remat != "auto"
        if is_fixed and policy.is_attention_saved and not policy.is_attention_offloaded:
            memory_changes.append({"remat": "auto"})
        if policy.can_split_layers and spec.config.memory.offload_during_attention == "never":
            memory_changes.append({"offload_during_attention": "auto"})
        if not policy.is_input_offloaded:
            memory_changes += _adjacent_levels(spec, "offload_activations", offset=1)
        memory_changes += _adjacent_levels(spec, "offload_optimizer", offset=1)
        automatic = spec.respec(memory={"mlp_tile_tokens": "auto", "loss_tile_tokens": "auto"})
        if min(automatic.mlp_tiles) < min(spec.mlp_tiles):
            memory_changes.append({"mlp_tile_tokens": "auto"})
        if min(automatic.loss_tiles) < min(spec.loss_tiles):
            memory_changes.append({"loss_tile_tokens": "auto"})
    else:
        memory_changes = _host_memory_changes(spec)
        for field in ("offload_activations", "offload_optimizer"):
            memory_changes += _adjacent_levels(spec, field, offset=-1)
        if not memory_changes:
            return [
                "nodes with more memory: a checkpoint's copy of the weights and the optimizer "
                "state has to fit"
            ]
    suggestions = []
    for change in memory_changes:
        config = spec.config.change(memory=change)
        # a limit is known only for GPUs
        if not memory_problems.find_problems(config, platform="gpu", model=spec.model):
            suggestions += [f"memory.{name}={value}" for name, value in change.items()]
    if is_device_short:
        config = spec.config
        if config.microbatch_rows > 1:
            suggestions.append("batch.rows_per_microbatch=1")
        if spec.num_microbatches > 1:  # with one, gradients exist only in the backward pass
            number = config.rows_per_step // spec.num_microbatches
            suggestions.append(f"batch.rows_per_step={number}")
        if config.max_segments > 1:
            segments = 1 if config.max_segments <= 8 else 8
            suggestions.append(f"data.max_segments_per_row={segments}")
    seq = 2 * spec.mesh.shape[axes.SEQ]
    split = spec.config.change(mesh={"seq": seq})
    with contextlib.suppress(UserError):
        strategy = choose_strategy(split.attention, split.rows, spec.model)
        if not find_division_problems(
            split,
            dict(spec.mesh.shape) | {axes.SEQ: seq},
            layout=strategy.layout,
            with_training=False,
        ):
            suggestions.append(f"mesh.seq={seq} on twice the devices")
    return [*suggestions, "shorter rows"]


def _adjacent_levels(spec: StepSpec, field: str, *, offset: int) -> list[dict[str, str]]:
    """Change of a field to the level of offloading at this offset; empty if there is none."""
    levels = get_args(MemoryConfig.model_fields[field].annotation)
    index = levels.index(getattr(spec.config.memory, field)) + offset
    return [{field: levels[index]}] if 0 <= index < len(levels) else []


def _host_memory_changes(spec: StepSpec) -> list[dict[str, Any]]:
    """Changes of `offload_every` that reduce host memory."""
    memory = spec.config.memory
    policy = RematPolicy(remat="full", offload_activations=memory.offload_activations)
    if not policy.can_split_layers or policy.is_attention_offloaded:
        return []
    num_layers = spec.model.num_layers
    now = dataclasses.replace(policy, offload_every=memory.offload_every)
    more = dataclasses.replace(policy, offload_every=2 * memory.offload_every)
    if more.num_offloaded_inputs(num_layers) >= now.num_offloaded_inputs(num_layers):
        return []
    change: dict[str, Any] = {"offload_every": more.offload_every}
    if memory.remat not in ("auto", "full"):
        change["remat"] = "full"
    return [change]
