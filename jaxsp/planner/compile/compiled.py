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
from jaxsp.config import schema
from jaxsp.core import errors
from jaxsp.model import layers
from jaxsp.model.config import ModelConfig
from jaxsp.planner.compile import gpus
from jaxsp.runtime import device_mesh
from jaxsp.training import compile_options, host_offload, memory_fit, optimizer, train_step

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages with XLA's compiler for GPUs, one of which is needed."""

NODE_HOST_GIB = 250.0
"""Host memory of a node for each of its GPUs, where nobody says otherwise: 2,000 GiB for eight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A compiled program as XLA writes it."""

    text: str
    """Its operations."""
    buffers: str
    """Where each array lies."""
    lives: str
    """From which operation to which each array is there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A training step compiled for absent devices, and what it was compiled for."""

    program: train_step.Program
    choice: attention.Choice
    executable: jax.stages.Compiled
    written: Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """GPUs that are not there, in nodes that are alike: what is planned for."""

    kind: str
    """One of gpus.KINDS."""
    num_devices: int
    node_devices: int
    """GPUs of a node."""
    node_host_gib: float
    """Host memory of a node."""

    @property
    def gpu(self) -> gpus.Gpu:
        return gpus.KINDS[self.kind]

    @property
    def limits(self) -> memory_fit.Room:
        """Memory that JAX may use on each device, and of its node for each device, with one process
        per device."""
        host_bytes = device_mesh.host_bytes(self.node_host_gib * memory_fit.GIB, num_processes=self.node_devices)
        return memory_fit.Room(device_mesh.gpu_share(os.environ) * self.gpu.memory_bytes, host_bytes / self.node_devices)


def site(kind: str, num_devices: int, *, node_devices: int | None = None, node_host_gib: float | None = None) -> Site:
    """So many GPUs of a kind, in nodes of 8 unless it is said otherwise.

    Raises: UserError for a kind that is not known, and devices that do not fill their nodes.
    """
    if kind not in gpus.KINDS:
        longer = next((name for name in gpus.KINDS if name.startswith(f"{kind}-")), kind)
        hint = errors.did_you_mean(longer, gpus.KINDS)
        known = errors.choices(gpus.KINDS)
        raise errors.UserError(f"--device = {kind}: is not known. Use {known}.{hint}")
    of_node = node_devices or math.gcd(num_devices, device_mesh.NODE_DEVICES)
    if num_devices % of_node:
        fits = [count for count in range(1, num_devices + 1) if num_devices % count == 0]
        raise errors.UserError(
            f"--node-devices = {of_node}: {num_devices} GPUs do not fill nodes of {of_node}. Use {errors.choices(fits)}."
        )
    host = NODE_HOST_GIB * of_node if node_host_gib is None else node_host_gib
    return Site(kind=kind, num_devices=num_devices, node_devices=of_node, node_host_gib=host)


def devices(kind: str, count: int) -> list[Any]:
    """So many GPUs of a kind of gpus.KINDS, none of which is there: to compile for, not to compute on.

    Raises: UserError where XLA's compiler for GPUs is not installed.
    """
    if not any(map(importlib.util.find_spec, PLUGINS)):
        raise errors.UserError(
            f"--device = {kind}: compiling for a GPU needs XLA's compiler for GPUs, which is not installed. "
            "Use pip install 'jaxsp[plan]'."
        )
    return list(_devices(kind, count))


@functools.cache
def _devices(kind: str, count: int) -> tuple[Any, ...]:
    # else the plugin looks for a driver
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    from jax.experimental import topologies

    return tuple(
        topologies.get_topology_desc(platform="cuda", target_config=gpus.KINDS[kind].target, topology=f"1x{count}x1").devices
    )


def program(
    settings: schema.Config, *, model: ModelConfig, devices: Sequence[Any], device_bytes: int | None = None
) -> tuple[train_step.Program, attention.Choice]:
    """What the training step of a config on these devices is made of, and how it attends.

    Args:   device_bytes: what JAX may take of a device.
    Raises: UserError for a mesh that does not fit the devices, and what `attention.choose` raises.
    """
    sizes = device_mesh.shape(settings.mesh, len(devices))
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    choice = attention.choose(settings, devices=devices, window=model.sliding_window, device_bytes=device_bytes, **heads)
    attend = attention.attend_of(choice)
    on = device_mesh.make(sizes, list(devices))
    return train_step.Program(config=settings, model=model, mesh=on, attend=attend, num_steps=1), choice


def step(settings: schema.Config, *, model: ModelConfig, devices: Sequence[Any], device_bytes: int | None = None) -> Step:
    """Compiles the training step of a config for these devices; `auto` in its group `memory` means
    values that always work.

    Raises: what `program` and `compile_step` raise.
    """
    return compile_step(*program(settings, model=model, devices=devices, device_bytes=device_bytes))


def compile_step(made: train_step.Program, choice: attention.Choice) -> Step:
    """Compiles a training step as training does, except for what _QUICKLY leaves out.

    Raises: what `training.train_step.compile` raises.
    """
    lowered = train_step.make(made).lower(*train_step.shapes(made))
    if made.offloads:
        _name_host_arguments(lowered, made)
    with tempfile.TemporaryDirectory(prefix="jaxsp-plan-") as name:
        folder = pathlib.Path(name)
        _make_assembler(folder)
        options = (
            _QUICKLY | made.told.options | {"xla_dump_to": name, "xla_dump_hlo_as_text": True, "xla_gpu_cuda_data_dir": name}
        )
        executable = train_step.check(made, compile_options.compiled(lowered, dataclasses.replace(made.told, options=options)))
        ends = ("pu_after_optimizations.txt", "buffer-assignment.txt", "live-range.txt")
        text, buffers, lives = (_read(folder, end) for end in ends)
    return Step(program=made, choice=choice, executable=executable, written=Written(text=text, buffers=buffers, lives=lives))


_QUICKLY: compile_options.Options = {
    # how good the machine code of a kernel is changes no array and no collective
    "xla_backend_optimization_level": 0,
}
"""Compile options for a step that will not run. They halve the time, and change neither memory nor collectives."""

# Without a GPU, autotuning times nothing and only compiles every candidate kernel. But without it, XLA of
# jaxlib 0.11.2 fails: "No supported config found for HLO". There it stays on, for a third more time
if jaxlib.__version__.startswith(("0.10.1", "0.12.0")):
    _QUICKLY["xla_gpu_autotune_level"] = 0

_ASSEMBLER = """#!/bin/sh
[ "$1" != --version ] || { echo "Cuda compilation tools, release 12.9, V12.9.0"; exit 0; }
while [ $# -gt 0 ]; do
    [ "$1" != -o ] || echo none > "$2"
    shift
done
"""


def _make_assembler(folder: pathlib.Path) -> None:
    """Puts a stand-in for CUDA's assembler where XLA looks for it first: hundreds of kernels need not become machine code."""
    (folder / "bin").mkdir()
    assembler = folder / "bin" / "ptxas"
    assembler.write_text(_ASSEMBLER, encoding="utf-8")
    assembler.chmod(0o755)


def _name_host_arguments(lowered: jax.stages.Lowered, made: train_step.Program) -> None:
    """Says of the arguments that are in host memory that they are: shardings on absent devices have forgotten it."""
    state, rows = train_step.shapes(made)

    def of_weight(row: layers.Parameter, weight: Any, opt: Any) -> tuple[Any, Any]:
        away = host_offload.worth_it(row)
        return away, jax.tree.map(lambda x: away and x.shape == weight.shape, opt)

    weights, averages = optimizer.apart(made.table, of_weight, state.master, state.opt)
    # in the order of the arguments: master, opt, step, then rows
    away = [*jax.tree.leaves((weights, averages)), False, *(False for _ in jax.tree.leaves(rows))]
    module: Any = lowered.compiler_ir()
    with module.context:
        (main,) = (op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"')
        arguments = [{named.name: named.attr for named in one} for one in main.arg_attrs]
        for one, is_away in zip(arguments, away, strict=True):
            if is_away:
                one["mhlo.memory_kind"] = ir.StringAttr.get(host_offload.KIND)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(one) for one in arguments])


def _read(folder: pathlib.Path, end: str) -> str:
    """The one dumped file with this end of its name, of the step itself."""
    (file,) = folder.glob(f"*jit_step*{end}")
    return file.read_text(encoding="utf-8")
