"""Memory options: the order in which they are tried, the numbers for `mesh.seq: auto` and
`batch.rows_per_microbatch: auto`, problems, and changes of a config that need less memory."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax

from jaxsp.attention.selection import choose_strategy
from jaxsp.blocks.config import ModelConfig
from jaxsp.core import axes
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.model.remat import RematPolicy, list_kept
from jaxsp.planning import estimate
from jaxsp.sharding import host_offload
from jaxsp.system import device_memory, device_mesh, hardware
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training import compile_options
from jaxsp.training.specs import StepSpec, find_division_problems, make_spec
from jaxsp.training.step_config import MemoryConfig, StepConfig

MAX_PREDICTED_RATIO = 1.15
"""Maximum ratio of predicted to available memory for which a candidate is compiled.

Predictions are 0.86 to 1.05 times what jax 0.10.1 compiles for the recipes in configs/.
"""

MIN_PREDICTED_RATIO = 0.86
"""Minimum ratio of predicted to compiled memory."""


def list_candidates(spec: StepSpec, *, is_memory_known: bool = True) -> Iterator[StepSpec]:
    """Steps whose memory options are decided, the fastest first.

    Args:
        is_memory_known: True if the devices' memory is known. If not, tiles have a safe size.
    """
    requested = spec.config.memory
    for remat in list_remats(spec, is_memory_known=is_memory_known):
        policy = RematPolicy(remat=remat, offload_activations=requested.offload_activations)
        loss_tiles = spec.loss_tiles if is_memory_known else [spec.loss_tile]
        kept_mlp_layers = 0
        mlp_tiles = spec.mlp_tiles if is_memory_known else [spec.mlp_tile]
        if policy.is_mlp_saved:  # activations of tiles cannot be saved
            mlp_tiles = [tile for tile in spec.mlp_tiles if tile == spec.tokens_per_device]
            kept_mlp_layers = spec.model.num_layers
            if requested.kept_mlp_layers != "auto":
                kept_mlp_layers = requested.kept_mlp_layers
        elif is_memory_known and _is_number_of_layers_free(spec):
            # The memory of all logits is better used for products of the MLP
            loss_tiles = loss_tiles[1:] or loss_tiles
        offloads = [requested.offload_during_attention]
        if offloads == ["auto"]:
            is_possible = jax.__version_info__ >= host_offload.MIN_RELEASE
            offloads = ["never", "always"] if policy.can_split_layers and is_possible else ["never"]
        for during_attention in offloads:
            # With all tokens at once, the MLP needs more memory than attention
            tiles = mlp_tiles if during_attention == "never" else mlp_tiles[1:] or mlp_tiles
            for mlp_tile, loss_tile in itertools.product(tiles, loss_tiles):
                memory = {
                    "remat": remat,
                    "kept_mlp_layers": kept_mlp_layers,
                    "mlp_tile_tokens": mlp_tile,
                    "loss_tile_tokens": loss_tile,
                    "offload_during_attention": during_attention,
                }
                yield spec.respec(memory=memory)


def group_candidates(spec: StepSpec) -> list[list[StepSpec]]:
    """Candidates that differ only in tiles, of which the last ones need least memory."""

    def find_group(candidate: StepSpec) -> tuple[str, str]:
        return candidate.remat_policy.remat, candidate.config.memory.offload_during_attention

    groups = itertools.groupby(list_candidates(spec), find_group)
    return [list(members) for _, members in groups]


def list_remats(spec: StepSpec, *, is_memory_known: bool = True) -> list[str]:
    """Values of memory.remat in the order in which they are tried."""
    memory = spec.config.memory
    policy = spec.remat_policy
    if memory.remat != "auto":
        return [memory.remat]
    if policy.has_own_backward_pass:
        return ["full"]
    if policy.is_attention_offloaded:
        return ["save_attention"]
    frees_memory = policy.is_input_offloaded or spec.has_offloaded_state
    keeps_nothing = memory.kept_mlp_layers == 0 or not list_kept(spec.model)[-1]
    if frees_memory or not is_memory_known or keeps_nothing:
        return ["save_attention", "full"]
    return ["save_attention_and_mlp", "save_attention", "full"]


def can_keep_more(spec: StepSpec, candidate: StepSpec) -> bool:
    """True if the layers of a candidate may keep the MLP's products."""
    is_tiled = candidate.mlp_tile < candidate.tokens_per_device
    saves_only_attention = candidate.config.memory.remat == "save_attention"
    return saves_only_attention and not is_tiled and _is_number_of_layers_free(spec)


def _is_number_of_layers_free(spec: StepSpec) -> bool:
    """True if as many layers as fit keep the MLP's products."""
    memory = spec.config.memory
    is_free = "auto" == memory.remat == memory.kept_mlp_layers
    return is_free and RematPolicy(remat=list_remats(spec)[0]).is_mlp_saved


def resolve(
    config: StepConfig,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    memory: MemoryLimit | None = None,
    device_bytes: int | None = None,
    with_training: bool = True,
) -> StepConfig:
    """Replaces `auto` in mesh.seq and batch.rows_per_microbatch with numbers.

    Args:
        memory: of a device and the host; None: what the devices report.
        device_bytes: see `specs.make_spec`.
        with_training: False: batch.rows_per_step does not matter.
    Raises: UserError if rows cannot be divided among any number of devices.
    """
    if "auto" not in (config.mesh.seq, config.rows_per_microbatch):
        return config
    if memory is None:
        memory = device_memory.find_limits(devices)
    make = functools.partial(make_spec, model=model, devices=devices, device_bytes=device_bytes)
    if config.mesh.seq == "auto":
        possible: dict[int, StepSpec] = {}
        problems = ProblemCollector()
        for seq in list_degrees(config, len(devices)):
            candidate = config.with_one_row_for_auto().change(mesh={"seq": seq})
            with problems.collect():
                spec = make(candidate)
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
        config = config.change(mesh={"seq": _choose_degree(possible, memory)})
    if config.rows_per_microbatch == "auto":
        number = _choose_rows(config, make, len(devices), memory)
        config = config.change(rows_per_microbatch=number)
    return config


def list_degrees(config: StepConfig, num_devices: int) -> list[int]:
    """Numbers of devices that a row can be divided among, the smallest first."""
    per_replica = max(1, num_devices // config.mesh.replica)
    return [seq for seq in range(1, per_replica + 1) if per_replica % seq == 0]


def _choose_degree(specs: Mapping[int, StepSpec], memory: MemoryLimit) -> int:
    """The degree that recomputes attention only if all do, stays inside a node if possible, and
    then recomputes least, by prediction.

    Of equal ones it is the smallest, because smaller groups communicate less; if nothing fits, it
    is the largest.
    """
    costs = {}
    for seq, spec in specs.items():
        usable = estimate.subtract_reserves(spec, memory)
        remats = list_remats(spec)
        for *_, smallest in group_candidates(spec):
            if _fits(smallest, usable.device, usable.pinned):
                policy = smallest.remat_policy
                leaves_node = seq > hardware.DEVICES_PER_NODE
                rank = remats.index(policy.remat)
                costs[seq] = (not policy.is_attention_saved, leaves_node, rank, seq)
                break
    return min(costs, key=lambda seq: costs[seq]) if costs else max(specs)


def _fits(candidate: StepSpec, device_bytes: float, pinned_bytes: float) -> bool:
    """True if a step is predicted to fit."""
    offloaded = estimate.step_offloaded_bytes(candidate).total
    return estimate.predict_bytes(candidate) <= device_bytes and offloaded <= pinned_bytes


def _choose_rows(
    config: StepConfig,
    make: Callable[[StepConfig], StepSpec],
    num_devices: int,
    memory: MemoryLimit,
) -> int:
    """Largest number of rows of a microbatch with which a step keeps as much as with 1 row.

    The prediction may be too large for 1 row, and too small for several: the number is larger
    than 1 only if it holds in both cases. It is 1 if some layers, but not all, may keep the MLP's
    products, because more rows would recompute more.
    """
    if math.isinf(memory.device):
        return 1

    def check_division(number: int) -> None:
        sizes = device_mesh.resolve_axis_sizes(config.mesh, num_devices)
        changed = config.change(rows_per_microbatch=number)
        if problems := find_division_problems(changed, sizes, layout=None):
            raise UserError(problems)

    try:
        check_division(1)
        spec = make(config.change(rows_per_microbatch=1))
        usable = estimate.subtract_reserves(spec, memory).device
        may_fit = lambda step: estimate.predict_bytes(step) <= MAX_PREDICTED_RATIO * usable
        # The fastest memory options that may fit. Tracing takes a second: the last ones come first
        possible = (
            candidate
            for members in group_candidates(spec)
            if may_fit(members[-1])
            for candidate in members
            if may_fit(candidate)
        )
        reference = next(possible, None)
    except UserError:  # reported later, with all others
        return 1
    if reference is None or can_keep_more(spec, reference):
        return 1
    for number in range(config.rows_per_step, 1, -1):
        if config.rows_per_step % number:
            continue
        with contextlib.suppress(UserError):  # not all numbers divide the rows of a group
            check_division(number)
            if _keeps_as_much(spec.respec(rows_per_microbatch=number), reference, memory):
                return number
    return 1


def _keeps_as_much(spec: StepSpec, reference: StepSpec, memory: MemoryLimit) -> bool:
    """True if some memory options of a step with more rows in a microbatch fit, even if the
    prediction is too small, recompute no more than the reference, and have no smaller tiles; with
    the same kernel."""
    if spec.attention.library_kernel != reference.attention.library_kernel:
        return False
    min_mlp_tile = reference.mlp_tile
    if min_mlp_tile >= reference.tokens_per_device:  # no tiles
        min_mlp_tile = spec.tokens_per_device
    usable = estimate.subtract_reserves(spec, memory)
    possible = [
        candidate
        for candidate in list_candidates(spec)
        if candidate.remat_policy == reference.remat_policy
        and candidate.mlp_tile >= min_mlp_tile
        and candidate.loss_tile >= reference.loss_tile
    ]
    device_bytes = MIN_PREDICTED_RATIO * usable.device
    return bool(possible) and _fits(possible[-1], device_bytes, usable.pinned)


# Options that do not work, and changes that need less memory

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
