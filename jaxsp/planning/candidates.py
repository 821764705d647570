"""Memory options in the order in which they are tried, and the numbers for `mesh.seq: auto` and
`batch.rows_per_microbatch: auto`."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxsp.blocks.config import ModelConfig
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.model.remat import RematPolicy, list_kept
from jaxsp.planning import estimate, limits
from jaxsp.sharding import host_offload
from jaxsp.system import device_memory, device_mesh, hardware
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training.specs import StepSpec, find_division_problems, make_spec
from jaxsp.training.step_config import StepConfig

MAX_PREDICTED_RATIO = 1.15
"""Maximum ratio of predicted to available memory for which a candidate is compiled.

The prediction is 0.93 to 1.08 times what jax 0.12 compiles (tests/planning/test_fit.py), and 1.14
times for 7.5M tokens of Llama-3.1-8B on eight H100s.
"""

MIN_PREDICTED_RATIO = 0.93
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
    then recomputes least, by formula.

    Of equal ones it is the smallest, because smaller groups communicate less; if nothing fits, it
    is the largest.
    """
    costs = {}
    for seq, spec in specs.items():
        usable = limits.subtract_reserves(spec, memory)
        remats = list_remats(spec)
        for candidate in list_candidates(spec):
            if _fits(candidate, usable.device, usable.pinned):
                policy = candidate.remat_policy
                leaves_node = seq > hardware.DEVICES_PER_NODE
                rank = remats.index(policy.remat)
                costs[seq] = (not policy.is_attention_saved, leaves_node, rank, seq)
                break
    return min(costs, key=lambda seq: costs[seq]) if costs else max(specs)


def _fits(candidate: StepSpec, device_bytes: float, pinned_bytes: float) -> bool:
    """True if a step fits by formula."""
    offloaded = estimate.step_offloaded_bytes(candidate).total
    return estimate.predict_bytes(candidate) <= device_bytes and offloaded <= pinned_bytes


def _choose_rows(
    config: StepConfig,
    make: Callable[[StepConfig], StepSpec],
    num_devices: int,
    memory: MemoryLimit,
) -> int:
    """Largest number of rows of a microbatch with which a step keeps as much as with 1 row.

    The formula may predict too much for 1 row, and too little for several: the number is larger
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
        usable = limits.subtract_reserves(spec, memory).device
        # The fastest memory options that may fit
        possible = (
            candidate
            for candidate in list_candidates(spec)
            if estimate.predict_bytes(candidate) <= MAX_PREDICTED_RATIO * usable
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
    """True if some memory options of a step with more rows in a microbatch fit, even if the formula
    predicts too little, recompute no more than the reference, and have no smaller tiles; with the
    same kernel."""
    if spec.attention.library_kernel != reference.attention.library_kernel:
        return False
    min_mlp_tile = reference.mlp_tile
    if min_mlp_tile >= reference.tokens_per_device:  # no tiles
        min_mlp_tile = spec.tokens_per_device
    usable = limits.subtract_reserves(spec, memory)
    return any(
        candidate.remat_policy == reference.remat_policy
        and candidate.mlp_tile >= min_mlp_tile
        and candidate.loss_tile >= reference.loss_tile
        and _fits(candidate, MIN_PREDICTED_RATIO * usable.device, usable.pinned)
        for candidate in list_candidates(spec)
    )
