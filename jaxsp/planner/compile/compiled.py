"""The training step compiled for GPUs that are not there."""

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib
from jaxlib.mlir import ir

from jaxsp import attention
from jaxsp.attention import AttentionChoice
from jaxsp.config.schema import Config
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.model.config import ModelConfig
from jaxsp.model.layers import Parameter
from jaxsp.planner.compile import gpus
from jaxsp.planner.compile.gpus import Gpu
from jaxsp.runtime import device_mesh, memory_limits
from jaxsp.training import (
    compile_options,
    host_offload,
    memory_formula,
    optimizer,
    train_state,
    train_step,
)
from jaxsp.training.available_memory import MemoryLimit
from jaxsp.training.program import Program

COMPILER_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages with XLA's compiler for GPUs, one of which is needed."""

HOST_GIB_PER_GPU = 250.0
"""Host memory of a node for each of its GPUs, where nobody says otherwise: 2,000 GiB for eight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerDump:
    """A compiled program as XLA writes it."""

    hlo_text: str
    """Its operations."""
    buffer_assignment: str
    """Where each array lies."""
    live_ranges: str
    """From which operation to which each array is there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A training step compiled for absent devices, and what it was compiled for."""

    program: Program
    choice: AttentionChoice
    executable: jax.stages.Compiled
    dump: CompilerDump


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs that are not there, in nodes that are alike: what is planned for."""

    device_type: str
    """One of gpus.KINDS."""
    num_devices: int
    node_devices: int
    """GPUs of a node."""
    node_host_gib: float
    """Host memory of a node."""

    @property
    def gpu(self) -> Gpu:
        return gpus.GPUS[self.device_type]

    @property
    def memory_limit(self) -> MemoryLimit:
        """Memory that JAX may use on each device, and of its node for each device, with one process
        per device."""
        host_bytes = memory_limits.usable_host_bytes(
            self.node_host_gib * memory_formula.GIB, num_processes=self.node_devices
        )
        return MemoryLimit(
            memory_limits.gpu_memory_fraction(os.environ) * self.gpu.memory_bytes,
            host_bytes / self.node_devices,
        )


def make_cluster(
    device_type: str,
    num_devices: int,
    *,
    node_devices: int | None = None,
    node_host_gib: float | None = None,
) -> Cluster:
    """So many GPUs of a kind, in nodes of 8 unless it is said otherwise.

    Raises: UserError for a kind that is not known, and devices that do not fill their nodes.
    """
    if device_type not in gpus.GPUS:
        longer = next(
            (name for name in gpus.GPUS if name.startswith(f"{device_type}-")), device_type
        )
        hint = errors.did_you_mean(longer, gpus.GPUS)
        known = errors.format_choices(gpus.GPUS)
        raise UserError(f"--device = {device_type}: is not known. Use {known}.{hint}")
    of_node = node_devices or math.gcd(num_devices, memory_limits.DEVICES_PER_NODE)
    if num_devices % of_node:
        fits = [count for count in range(1, num_devices + 1) if num_devices % count == 0]
        raise UserError(
            f"--node-devices = {of_node}: {num_devices} GPUs do not fill nodes of {of_node}. Use {errors.format_choices(fits)}."
        )
    host = HOST_GIB_PER_GPU * of_node if node_host_gib is None else node_host_gib
    return Cluster(
        device_type=device_type, num_devices=num_devices, node_devices=of_node, node_host_gib=host
    )


def make_devices(kind: str, count: int) -> list[Any]:
    """So many GPUs of a kind of gpus.KINDS, none of which is there: to compile for, not to compute on.

    Raises: UserError where XLA's compiler for GPUs is not installed.
    """
    if not any(map(importlib.util.find_spec, COMPILER_PLUGINS)):
        raise UserError(
            f"--device = {kind}: compiling for a GPU needs XLA's compiler for GPUs, which is not installed. "
            "Use pip install 'jaxsp[plan]'."
        )
    return list(_make_devices_cached(kind, count))


@functools.cache
def _make_devices_cached(kind: str, count: int) -> tuple[Any, ...]:
    # else the plugin looks for a driver
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    from jax.experimental import topologies

    return tuple(
        topologies.get_topology_desc(
            platform="cuda", target_config=gpus.GPUS[kind].target_config, topology=f"1x{count}x1"
        ).devices
    )


def build_program(
    config: Config, *, model: ModelConfig, devices: Sequence[Any], device_bytes: int | None = None
) -> tuple[Program, AttentionChoice]:
    """What the training step of a config on these devices is made of, and how it attends.

    Args:   device_bytes: what JAX may take of a device.
    Raises: UserError for a mesh that does not fit the devices, and what `attention.choose` raises.
    """
    sizes = device_mesh.resolve_axis_sizes(config.mesh, len(devices))
    choice = attention.choose(config, model, devices=devices, device_bytes=device_bytes)
    attend = attention.make_chosen_attend(choice)
    on = device_mesh.make_mesh(sizes, list(devices))
    return Program(config=config, model=model, mesh=on, attend=attend, num_steps=1), choice


def compile_config(
    config: Config, *, model: ModelConfig, devices: Sequence[Any], device_bytes: int | None = None
) -> PlannedStep:
    """Compiles the training step of a config for these devices; `auto` in its group `memory` means
    values that always work.

    Raises: what `program` and `compile_step` raise.
    """
    return compile_program(
        *build_program(config, model=model, devices=devices, device_bytes=device_bytes)
    )


def compile_program(made: Program, choice: AttentionChoice) -> PlannedStep:
    """Compiles a training step as training does, except for what _QUICKLY leaves out.

    Raises: what `training.train_step.compile` raises.
    """
    lowered = train_step.build_step(made).lower(*train_state.abstract_inputs(made))
    if made.has_offloaded_state:
        _mark_host_arguments(lowered, made)
    with tempfile.TemporaryDirectory(prefix="jaxsp-plan-") as name:
        folder = pathlib.Path(name)
        _write_stub_ptxas(folder)
        options = (
            _FAST_COMPILE_OPTIONS
            | made.compile_options.options
            | {"xla_dump_to": name, "xla_dump_hlo_as_text": True, "xla_gpu_cuda_data_dir": name}
        )
        executable = train_step.check_collectives(
            made,
            compile_options.compile_lowered(
                lowered, dataclasses.replace(made.compile_options, options=options)
            ),
        )
        ends = ("pu_after_optimizations.txt", "buffer-assignment.txt", "live-range.txt")
        text, buffers, lives = (_read_dump(folder, end) for end in ends)
    return PlannedStep(
        program=made,
        choice=choice,
        executable=executable,
        dump=CompilerDump(hlo_text=text, buffer_assignment=buffers, live_ranges=lives),
    )


_FAST_COMPILE_OPTIONS: compile_options.XlaOptions = {
    # how good the machine code of a kernel is changes no array and no collective
    "xla_backend_optimization_level": 0,
}
"""Compile options for a step that will not run. They halve the time, and change neither memory nor collectives."""

# Without a GPU, autotuning times nothing and only compiles every candidate kernel. But without it, XLA of
# jaxlib 0.11.2 fails: "No supported config found for HLO". There it stays on, for a third more time
if jaxlib.__version__.startswith(("0.10.1", "0.12.0")):
    _FAST_COMPILE_OPTIONS["xla_gpu_autotune_level"] = 0

_STUB_PTXAS = """#!/bin/sh
[ "$1" != --version ] || { echo "Cuda compilation tools, release 12.9, V12.9.0"; exit 0; }
while [ $# -gt 0 ]; do
    [ "$1" != -o ] || echo none > "$2"
    shift
done
"""


def _write_stub_ptxas(folder: pathlib.Path) -> None:
    """Puts a stand-in for CUDA's assembler where XLA looks for it first: hundreds of kernels need not become machine code."""
    (folder / "bin").mkdir()
    assembler = folder / "bin" / "ptxas"
    assembler.write_text(_STUB_PTXAS, encoding="utf-8")
    assembler.chmod(0o755)


def _mark_host_arguments(lowered: jax.stages.Lowered, made: Program) -> None:
    """Says of the arguments that are in host memory that they are: shardings on absent devices have forgotten it."""
    state, rows = train_state.abstract_inputs(made)

    def of_weight(row: Parameter, weight: Any, opt: Any) -> tuple[Any, Any]:
        away = host_offload.should_offload(row)
        return away, jax.tree.map(lambda x: away and x.shape == weight.shape, opt)

    weights, averages = optimizer.map_weights_and_state(
        made.table, of_weight, state.master, state.opt_state
    )
    # in the order of the arguments: master, opt, step, then rows
    away = [*jax.tree.leaves((weights, averages)), False, *(False for _ in jax.tree.leaves(rows))]
    module: Any = lowered.compiler_ir()
    with module.context:
        (main,) = (
            op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"'
        )
        arguments = [{named.name: named.attr for named in one} for one in main.arg_attrs]
        for one, is_away in zip(arguments, away, strict=True):
            if is_away:
                one["mhlo.memory_kind"] = ir.StringAttr.get(host_offload.MEMORY_KIND)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(one) for one in arguments])


def _read_dump(folder: pathlib.Path, end: str) -> str:
    """The one dumped file with this end of its name, of the step itself."""
    (file,) = folder.glob(f"*jit_step*{end}")
    return file.read_text(encoding="utf-8")
