"""The training step compiled for GPUs that are not there."""

import dataclasses
import importlib.util
import os
import pathlib
import tempfile
from typing import Any

import jax
from jaxlib.mlir import ir

from jaxsp import attention
from jaxsp.core import config, errors, mesh
from jaxsp.model import layers
from jaxsp.model.config import ModelConfig
from jaxsp.training import host, optimizer, xla
from jaxsp.training import step as steps

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages with XLA's compiler for GPUs, one of which is needed."""

_H100_80GB = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.2"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 2 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

KINDS = {"h100-80gb": _H100_80GB}
"""What XLA has to know of each kind of GPU: the text of its GpuTargetConfigProto."""


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

    program: steps.Program
    choice: attention.Choice
    executable: jax.stages.Compiled
    written: Written


def devices(kind: str, count: int) -> list[Any]:
    """So many GPUs of a kind of KINDS, all in one node, none of which is there: to compile for, not to compute on.

    Raises: UserError for a kind that is not known, and where XLA's compiler for GPUs is not installed.
    """
    if kind not in KINDS:
        raise errors.UserError(
            f"--device = {kind}: is not known. Use {errors.choices(KINDS)}.{errors.nearest(kind, list(KINDS))}"
        )
    if not any(map(importlib.util.find_spec, PLUGINS)):
        raise errors.UserError(
            f"--device = {kind}: compiling for a GPU needs XLA's compiler for GPUs, which is not installed. "
            "Use pip install 'jaxsp[plan]'."
        )
    # else the plugin looks for a driver
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="cuda", target_config=KINDS[kind], topology=f"1x{count}x1").devices)


def program(settings: config.Config, *, model: ModelConfig, devices: list[Any]) -> tuple[steps.Program, attention.Choice]:
    """What the training step of a config on these devices is made of, and how it attends.

    Raises: UserError for a mesh that does not fit the devices, and what `attention.choose` raises.
    """
    sizes = mesh.shape(settings.mesh, len(devices))
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    choice = attention.choose(settings, devices=devices, window=model.sliding_window, **heads)
    attend = attention.make_attend(
        seq=settings.mesh.seq, kernel=choice.kernel, window=choice.window, head_chunks=choice.head_chunks
    )
    on = mesh.make(sizes, devices)
    return steps.Program(config=settings, model=model, mesh=on, attend=attend, num_steps=1), choice


def step(settings: config.Config, *, model: ModelConfig, devices: list[Any]) -> Step:
    """The training step of a config on these devices, compiled as training compiles it; memory.remat=auto is attention.

    Raises: what `program` and `training.step.compile` raise.
    """
    made, choice = program(settings, model=model, devices=devices)
    lowered = steps.make(made).lower(*steps.shapes(made))
    if made.offloads:
        _name_host_arguments(lowered, made)
    with tempfile.TemporaryDirectory(prefix="jaxsp-plan-") as folder:
        dumps: xla.Options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        executable = xla.compiled(lowered, dataclasses.replace(made.told, options=made.told.options | dumps))
        buffers, lives = (_read(pathlib.Path(folder), end) for end in ("buffer-assignment.txt", "live-range.txt"))
    written = Written(text=executable.as_text() or "", buffers=buffers, lives=lives)
    return Step(program=made, choice=choice, executable=executable, written=written)


def _name_host_arguments(lowered: jax.stages.Lowered, made: steps.Program) -> None:
    """Says of the arguments that are in host memory that they are: shardings on absent devices have forgotten it."""
    state, rows = steps.shapes(made)

    def of_weight(row: layers.Parameter, weight: Any, opt: Any) -> tuple[Any, Any]:
        away = host.worth_it(row)
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
                one["mhlo.memory_kind"] = ir.StringAttr.get(host.KIND)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(one) for one in arguments])


def _read(folder: pathlib.Path, end: str) -> str:
    """The one dumped file with this end of its name, of the step itself."""
    (file,) = folder.glob(f"*jit_step*{end}")
    return file.read_text(encoding="utf-8")
