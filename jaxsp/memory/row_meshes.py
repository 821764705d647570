"""The mesh and the attention for each row length, and the choice of `mesh.seq: auto`."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxsp import attention
from jaxsp.attention import AttentionChoice, HasHeads
from jaxsp.blocks import float8
from jaxsp.blocks.config import ModelConfig
from jaxsp.config.schema import Config
from jaxsp.core import axes
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.experts import kernels
from jaxsp.memory import available_memory, memory_fit, memory_formula
from jaxsp.memory.available_memory import MemoryLimit
from jaxsp.runtime import device_mesh, memory_limits
from jaxsp.training.specs import RunSpec, StepSpec


def choose_attention(
    config: Config,
    model: HasHeads,
    *,
    devices: Sequence[Any],
) -> dict[int, AttentionChoice]:
    """Chooses the attention for each row length.

    Raises: UserError with the problems of all lengths.
    """
    problems = ProblemCollector()
    choices = {}
    for row_tokens, row_config in config.row_configs.items():
        with _collect_problems(problems, config, row_tokens):
            choices[row_tokens] = attention.choose(row_config, model, devices=devices)
    problems.raise_if_any()
    return choices


def find_division_problems(
    config: Config,
    num_devices: int,
    choices: Mapping[int, AttentionChoice] | None,
    *,
    with_training: bool = True,
) -> list[str]:
    """Problems with the mesh of each row length, and with dividing rows among the devices.

    Args:
        choices: None: unknown.
        with_training: False: leaves out batch.rows_per_step.
    """
    problems = ProblemCollector()
    longest = config.data.max_row_tokens
    for row_tokens, row_config in config.row_configs.items():
        # with equal degrees, a step of any length divides if one of the longest rows does
        is_divided_alike = row_tokens != longest and isinstance(config.mesh.seq, int)
        with _collect_problems(problems, config, row_tokens):
            found = device_mesh.find_division_problems(
                row_config,
                device_mesh.resolve_axis_sizes(row_config.mesh, num_devices),
                layout=None if choices is None else choices[row_tokens].strategy.layout,
                num_per_longest=longest // row_tokens,
                with_training=with_training and not is_divided_alike,
            )
            if found:
                raise UserError(found)
    return list(dict.fromkeys(problems))


@contextlib.contextmanager
def _collect_problems(
    problems: ProblemCollector, config: Config, row_tokens: int
) -> Iterator[None]:
    """Adds the problems of the block, with the length of the rows if mesh.seq depends on it.

    Example: `mesh.seq = 6: must divide ...` becomes `mesh.seq = 6 (rows of 4,096 tokens): ...`.
    """
    row_problems = ProblemCollector()
    with row_problems.collect():
        yield
    if isinstance(config.mesh.seq, tuple):
        rows = f" (rows of {row_tokens:,} tokens):"
        problems += [problem.replace(":", rows, 1) for problem in row_problems]
    else:
        problems += row_problems


def make_run_spec(
    config: Config,
    model: ModelConfig,
    choices: Mapping[int, AttentionChoice],
    *,
    devices: Sequence[Any],
    num_steps: int = 1,
) -> RunSpec:
    """Makes the steps of a config whose mesh.seq is no longer `auto`.

    Args:
        choices: from `choose_attention`.
        num_steps: number of steps of the run.
    Raises: UserError for a mesh that does not fit the devices.
    """
    model = _choose_experts_kernel(config, model, devices)
    if (linear_dtype := config.model.linear_dtype) is not None:
        float8.check_devices(devices)
        float8.check_model(model.hidden_size)
        model = dataclasses.replace(model, linear_dtype=linear_dtype)
    row_configs = config.row_configs
    longest = row_configs[config.data.max_row_tokens]
    sizes = device_mesh.resolve_axis_sizes(longest.mesh, len(devices))
    mesh = device_mesh.make_mesh(sizes, list(devices))
    steps = {
        row_tokens: StepSpec(
            config=row_config,
            model=model,
            mesh=_reshape(mesh, seq=row_config.mesh.degree),
            attention=choices[row_tokens],
            num_steps=num_steps,
        )
        for row_tokens, row_config in row_configs.items()
    }
    return RunSpec(config=config, steps=steps)


def _choose_experts_kernel(
    config: Config, model: ModelConfig, devices: Sequence[Any]
) -> ModelConfig:
    """The model with the kernel of its experts. Raises: UserError if it cannot run."""
    requested = config.model.experts_kernel
    if model.experts is None:
        if requested != "auto":
            raise UserError(
                f"model.experts_kernel = {requested}: the model has no experts. Remove the field."
            )
        return model
    kernel = kernels.choose(
        requested,
        dims=(model.hidden_size, model.experts.size),
        dtype=config.model.compute_dtype,
        devices=devices,
    )
    return dataclasses.replace(model, experts=dataclasses.replace(model.experts, kernel=kernel))


def make_step_spec(
    config: Config,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    device_bytes: int | None = None,
) -> StepSpec:
    """Makes the step of a config of one row length.

    Args: device_bytes: memory of a device; None: what the devices report, if they are present.
    Raises: UserError for attention or a mesh that is not possible.
    """
    choice = attention.choose(config, model, devices=devices, device_bytes=device_bytes)
    choices = {config.data.max_row_tokens: choice}
    return make_run_spec(config, model, choices, devices=devices).longest


def _reshape(mesh: Mesh, *, seq: int) -> Mesh:
    """The mesh of the same devices in the same order, with groups of `seq` devices."""
    if seq == mesh.shape[axes.SEQ]:
        return mesh
    devices = mesh.devices.reshape(mesh.shape[axes.REPLICA], -1, seq)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def resolve_degrees(
    config: Config,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    limits: MemoryLimit | None = None,
    device_bytes: int | None = None,
    with_training: bool = True,
) -> Config:
    """Replaces `mesh.seq: auto` by a number of devices for each row length.

    Numbers are compared by the memory formula: attention is recomputed only if it is with all of
    them, groups stay inside a node if possible, and then least is recomputed. Of equal numbers it
    is the smallest, because smaller groups communicate less. The longest rows come first, because
    the microbatches of the others follow from them. `batch.rows_per_microbatch: auto` counts as 1.

    Args:
        limits: memory of a device and the host; None: what the devices report.
        device_bytes: see `make_step_spec`.
        with_training: False: batch.rows_per_step does not matter.
    Raises: UserError if rows of a length cannot be divided among any number of devices.
    """
    if config.mesh.seq != "auto":
        return config
    if limits is None:
        limits = available_memory.find_limits(devices)
    tried = config.with_one_row_for_auto()
    degrees: dict[int, int] = {}
    for row_tokens in reversed(config.data.row_lengths):
        possible: dict[int, StepSpec] = {}
        problems = ProblemCollector()
        for seq in list_degrees(config, len(devices)):
            candidate = tried.with_degrees(dict.fromkeys(config.data.row_lengths, seq) | degrees)
            row_config = candidate.row_configs[row_tokens]
            with problems.collect():
                spec = make_step_spec(row_config, model, devices=devices, device_bytes=device_bytes)
                found = find_division_problems(
                    row_config,
                    len(devices),
                    {row_tokens: spec.attention},
                    with_training=with_training,
                )
                if found:
                    raise UserError(found)
                possible[seq] = spec
        if not possible:
            raise UserError(
                problems[0].replace(":", f" (mesh.seq = auto, rows of {row_tokens:,} tokens):", 1)
            )
        degrees[row_tokens] = _choose_degree(possible, limits)
    return config.with_degrees(degrees)


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
