"""The mesh and the attention for each row length, and the choice of `mesh.seq: auto`.

All meshes are the same devices in the same order, in other shapes. Weights and optimizer state are
sharded over data x seq together, so every mesh places them alike, and nothing moves between steps.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxsp import attention
from jaxsp.attention import AttentionChoice, HasHeads
from jaxsp.config.schema import Config
from jaxsp.core import axes
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.model.config import ModelConfig
from jaxsp.runtime import device_mesh, memory_limits
from jaxsp.training import available_memory, memory_fit, memory_formula
from jaxsp.training.available_memory import MemoryLimit
from jaxsp.training.program import Program, RowMesh

AttentionChoices = Mapping[int, AttentionChoice]
"""Chosen attention for each row length, the shortest first."""


def choose_attention(
    config: Config,
    model: HasHeads,
    *,
    devices: Sequence[Any],
    device_bytes: int | None = None,
) -> AttentionChoices:
    """Chooses the attention for each row length.

    Args: device_bytes: memory of a device; None: what the devices report, if they are present.
    Raises: UserError with the problems of all lengths.
    """
    problems = ProblemCollector()
    choices = {}
    for row_tokens in config.data.row_lengths:
        with _collect(problems, config, row_tokens):
            choices[row_tokens] = attention.choose(
                config.with_row_tokens(row_tokens),
                model,
                devices=devices,
                device_bytes=device_bytes,
            )
    problems.raise_if_any()
    return choices


def find_division_problems(
    config: Config,
    num_devices: int,
    choices: AttentionChoices | None,
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
    for row_tokens in config.data.row_lengths:
        # with equal degrees, a step of any length divides if one of the longest rows does
        is_divided_alike = row_tokens != longest and isinstance(config.mesh.seq, int)
        with _collect(problems, config, row_tokens):
            row_config = config.with_row_tokens(row_tokens)
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
def _collect(problems: ProblemCollector, config: Config, row_tokens: int) -> Iterator[None]:
    """Adds the problems of the block, with the length of the rows if degrees differ."""
    found = ProblemCollector()
    with found.collect():
        yield
    rows = f" (rows of {row_tokens:,} tokens):" if isinstance(config.mesh.seq, tuple) else ":"
    problems += [problem.replace(":", rows, 1) for problem in found]


def make_program(
    config: Config,
    model: ModelConfig,
    choices: AttentionChoices,
    *,
    devices: Sequence[Any],
    num_steps: int = 1,
) -> Program:
    """Makes the program of a config whose mesh.seq is no longer `auto`.

    Args:
        choices: from `choose_attention`.
        num_steps: number of steps of the run.
    Raises: UserError for a mesh that does not fit the devices.
    """
    longest = config.data.max_row_tokens
    sizes = device_mesh.resolve_axis_sizes(config.with_row_tokens(longest).mesh, len(devices))
    mesh = device_mesh.make_mesh(sizes, list(devices))
    row_meshes = {
        row_tokens: RowMesh(
            _reshape(mesh, seq=config.degrees[row_tokens]),
            attention.make_chosen_attend(choices[row_tokens]),
        )
        for row_tokens in config.data.row_lengths
    }
    return Program(
        config=config,
        model=model,
        mesh=mesh,
        attend=row_meshes[longest].attend,
        row_meshes=row_meshes if len(row_meshes) > 1 else {},
        num_steps=num_steps,
    )


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
    the microbatches of the others follow from them.

    Args:
        limits: memory of a device and the host; None: what the devices report.
        device_bytes: see `choose_attention`.
        with_training: False: batch.rows_per_step does not matter.
    Raises: UserError if rows of a length cannot be divided among any number of devices.
    """
    if config.mesh.seq != "auto":
        return config
    if limits is None:
        limits = available_memory.find_limits(devices)
    lengths = config.data.row_lengths
    degrees: dict[int, int] = {}
    row_meshes: dict[int, RowMesh] = {}
    for row_tokens in reversed(lengths):
        possible: dict[int, Program] = {}
        workspaces = {}
        problems = ProblemCollector()
        for seq in list_degrees(config, len(devices)):
            candidate = config.with_degrees(dict.fromkeys(lengths, seq) | degrees)
            candidate = candidate.with_row_tokens(row_tokens)
            with problems.collect():
                choices = choose_attention(
                    candidate, model, devices=devices, device_bytes=device_bytes
                )
                found = find_division_problems(
                    candidate, len(devices), choices, with_training=with_training
                )
                if found:
                    raise UserError(found)
                program = make_program(candidate, model, choices, devices=devices)
                own_mesh = {row_tokens: RowMesh(program.mesh, program.attend)}
                possible[seq] = dataclasses.replace(program, row_meshes=row_meshes | own_mesh)
                workspaces[seq] = choices[row_tokens].settings.workspace_bytes
        if not possible:
            raise UserError(
                problems[0].replace(":", f" (mesh.seq = auto, rows of {row_tokens:,} tokens):", 1)
            )
        degrees[row_tokens] = _choose_degree(possible, workspaces, limits)
        row_meshes |= possible[degrees[row_tokens]].row_meshes
    return config.with_degrees(degrees)


def list_degrees(config: Config, num_devices: int) -> list[int]:
    """Numbers of devices that a row can be divided among, the smallest first."""
    per_replica = max(1, num_devices // config.mesh.replica)
    return [seq for seq in range(1, per_replica + 1) if per_replica % seq == 0]


def _choose_degree(
    programs: Mapping[int, Program], workspaces: Mapping[int, int], limits: MemoryLimit
) -> int:
    """The degree that recomputes attention only if all do, stays inside a node if possible, and
    then recomputes least: the smallest of those, or the largest if nothing fits."""
    costs = {}
    for seq, program in programs.items():
        usable = available_memory.subtract_reserves(program, limits)
        remats = memory_fit.list_remats(program, is_memory_known=True)
        for candidate in memory_fit.list_candidates(program, is_memory_known=True):
            needed = memory_formula.predict_bytes(candidate, workspace_bytes=workspaces[seq])
            offloaded = memory_formula.program_offloaded_bytes(candidate).total
            if needed <= usable.device and offloaded <= usable.pinned:
                policy = candidate.remat_policy
                leaves_node = seq > memory_limits.DEVICES_PER_NODE
                rank = remats.index(policy.remat)
                costs[seq] = (not policy.is_attention_saved, leaves_node, rank, seq)
                break
    return min(costs, key=lambda seq: costs[seq]) if costs else max(programs)
