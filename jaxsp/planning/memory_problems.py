"""Memory options that do not work, and changes of a config that need less memory."""

import contextlib
import dataclasses
from typing import Any, get_args

import jax

from jaxsp.attention.selection import choose_strategy
from jaxsp.blocks.config import ModelConfig
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.model.remat import RematPolicy, list_kept
from jaxsp.sharding import host_offload
from jaxsp.training import compile_options
from jaxsp.training.specs import StepSpec, find_division_problems
from jaxsp.training.step_config import MemoryConfig, StepConfig

WRONG_OFFLOAD_RELEASES = ("0.10.2", "0.11.0")
"""jax releases that read offloaded activations back in the wrong order (openxla/xla PR 46231)."""

MIN_DOUBLE_BUFFER_RELEASE = (0, 11, 2)
"""First jax release whose copies of offloaded arrays are right in double-buffered loops, which XLA
uses from optimization level O1 on."""

_UPGRADE = "Install jax 0.11.1 or later (Python 3.12), or use "


def find_problems(
    config: StepConfig,
    *,
    platform: str,
    model: ModelConfig | None = None,
    version: str = jax.__version__,
) -> list[str]:
    """Reasons that the memory options of a config do not work with this release of JAX on these
    devices. Args: model: None if it is not known."""
    memory = config.memory
    problems = []
    release = compile_options.parse_version(version)
    if memory.offload_activations != "none":
        requested = f"memory.offload_activations = {memory.offload_activations}: jax {version}"
        if version in WRONG_OFFLOAD_RELEASES:
            problems.append(
                f"{requested} reads offloaded activations back in the wrong order, and gradients "
                "would be wrong. Install another release, or use memory.offload_activations=none."
            )
        elif release < host_offload.MIN_RELEASE and model is not None and model.inner_loop:
            problems.append(
                f"{requested} cannot compile it for models whose layers differ. {_UPGRADE}"
                "memory.offload_activations=none."
            )
        elif release < host_offload.MIN_RELEASE and platform == "cpu":
            problems.append(
                f"{requested} cannot compile it for CPUs. {_UPGRADE}"
                "memory.offload_activations=none; on GPUs it works."
            )
    if release < host_offload.MIN_RELEASE:
        for name, default in (
            ("offload_optimizer", "none"),
            ("offload_every", 1),
            ("offload_during_attention", "auto"),
        ):
            value = getattr(memory, name)
            if value not in (default, "never"):
                problems.append(
                    f"memory.{name} = {value}: jax {version} cannot keep arrays in host memory "
                    f"inside shard_map and loops. {_UPGRADE}memory.{name}={default}."
                )
    level = jax.config.values["jax_optimization_level"]
    is_offloaded = not memory.offload_activations == memory.offload_optimizer == "none"
    if is_offloaded and level in ("O1", "O2", "O3") and release < MIN_DOUBLE_BUFFER_RELEASE:
        problems.append(
            f"JAX_OPTIMIZATION_LEVEL = {level}: copies of offloaded arrays would have wrong "
            "offsets in loops (openxla/xla PR 47218). Unset it, install jax 0.11.2 or later, or "
            "use memory.offload_activations=none memory.offload_optimizer=none."
        )
    if model is not None:
        problems += _find_period_problems(memory, model)
        if RematPolicy(remat=memory.remat).is_mlp_saved and not list_kept(model)[-1]:
            problems.append(
                f"memory.remat = {memory.remat}: all layers of this model have experts, which are "
                "recomputed. Use memory.remat=save_attention."
            )
    if problem := _find_kept_problem(memory, model):
        problems.append(f"memory.kept_mlp_layers = {memory.kept_mlp_layers}: {problem}")
    tokens = config.row_tokens * config.microbatch_rows
    tokens //= config.mesh.degree
    tile = memory.mlp_tile_tokens
    if RematPolicy(remat=memory.remat).is_mlp_saved and tile != "auto" and tile < tokens:
        problems.append(
            f"memory.mlp_tile_tokens = {tile}: must be at least {tokens}, all tokens of a device, "
            f"because memory.remat = {memory.remat} cannot keep activations of tiles. "
            "Use memory.mlp_tile_tokens=auto, or memory.remat=auto."
        )
    return problems


def _find_kept_problem(memory: MemoryConfig, model: ModelConfig | None) -> str | None:
    """Reason that memory.kept_mlp_layers layers do not keep the MLP's products."""
    number = memory.kept_mlp_layers
    if isinstance(number, str) or number == 0:
        return None
    if not RematPolicy(remat=memory.remat).is_mlp_saved:
        return "needs memory.remat=save_attention_and_mlp. Use that, or leave it out."
    if memory.offload_optimizer == "state_and_gradients":
        return (
            "with memory.offload_optimizer = state_and_gradients, layers cannot differ. Use "
            "memory.offload_optimizer=state, or leave it out."
        )
    if model is not None and number > model.num_layers:
        return f"the model has {model.num_layers} layers. Use auto for all of them."
    kept = list_kept(model) if model is not None else []
    if kept and (equal := kept.index(kept[number])) < number:
        return (
            "whole periods of layers with an MLP keep its products, here as many as with "
            f"{equal}. Use {equal}."
        )
    return None


def _find_period_problems(memory: MemoryConfig, model: ModelConfig) -> list[str]:
    """Reasons that options do not work if the layers of a model differ in their weights.

    JAX's backward pass would return the gradients of all layers of a kind on the device.
    """
    policy = RematPolicy(
        offload_every=memory.offload_every,
        offloads_during_attention=memory.offload_during_attention == "always",
    )
    kinds = [kind for segment in model.segments for kind in {*segment.period}]
    is_divided = len(kinds) > len({*kinds})
    if (
        memory.offload_optimizer != "state_and_gradients"
        or len(model.kinds) == 1
        or (policy.has_own_backward_pass and not is_divided)
    ):
        return []
    period = max(len(segment.period) for segment in model.segments)
    instead = (
        f"memory.offload_every={max(2, period)} memory.offload_activations=layer_inputs "
        "memory.remat=full, or "
    )
    return [
        "memory.offload_optimizer = state_and_gradients: needs a whole period of layers in host "
        "memory, because the layers of this model differ. Use "
        f"{'' if is_divided else instead}memory.offload_optimizer=state."
    ]


def suggest_changes(spec: StepSpec, *, is_device_short: bool) -> list[str]:
    """Suggestions: changes that reduce a step's memory and work with this release of JAX and this
    model."""
    memory_changes: list[dict[str, Any]] = []
    memory = spec.config.memory
    if is_device_short:
        policy = spec.remat_policy
        is_fixed = memory.remat != "auto"
        if is_fixed and policy.is_attention_saved and not policy.is_attention_offloaded:
            memory_changes.append({"remat": "auto"})
        if policy.can_split_layers and memory.offload_during_attention == "never":
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
        num_layers = spec.model.num_layers
        policy = RematPolicy(remat="full", offload_activations=memory.offload_activations)
        every = 2 * memory.offload_every
        now, fewer = (
            dataclasses.replace(policy, offload_every=number).num_offloaded_inputs(num_layers)
            for number in (memory.offload_every, every)
        )
        can_split = policy.can_split_layers and not policy.is_attention_offloaded
        if can_split and fewer < now:
            change: dict[str, Any] = {"offload_every": every}
            if memory.remat not in ("auto", "full"):
                change["remat"] = "full"
            memory_changes.append(change)
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
        if not find_problems(config, platform="gpu", model=spec.model):
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
