"""Absent GPUs: clusters of them, and training steps compiled for them."""

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import tempfile
from typing import Any, NamedTuple

import jax
import jaxlib
from jaxlib.mlir import ir

from jaxsp.blocks.layers import Parameter
from jaxsp.core import errors, units
from jaxsp.core.errors import UserError
from jaxsp.optimizers import optimizer
from jaxsp.planning import fit, gpus, hlo
from jaxsp.planning.fit import MemoryUse
from jaxsp.planning.gpus import Gpu
from jaxsp.planning.hlo import CompilerDump
from jaxsp.system import device_memory, hardware
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training import compile_options, train_state, train_step
from jaxsp.training.specs import StepSpec

COMPILER_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages with XLA's compiler for GPUs; one of them is required."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Absent GPUs in equal nodes, for which a step is planned."""

    device_type: str
    """One of gpus.GPUS."""
    num_devices: int
    node_devices: int
    """Number of GPUs per node."""
    node_host_gib: float
    """Host memory of a node."""
    headroom: float = 0.0
    """Fraction of the memory available to a step that a plan leaves free."""

    @property
    def gpu(self) -> Gpu:
        return gpus.GPUS[self.device_type]

    @property
    def nvlink_domain_size(self) -> int:
        """GPUs of one NVLink domain, which may span several nodes."""
        if self.gpu.nvlink_domain_size == self.gpu.node_devices:
            return self.node_devices
        size = min(self.num_devices, self.gpu.nvlink_domain_size)
        return max(self.node_devices, math.gcd(self.num_devices, size))

    @property
    def memory_limit(self) -> MemoryLimit:
        """Device memory that JAX may use, and a device's part of its node's memory, with one
        process per device."""
        host_bytes = hardware.host_bytes_per_device(
            num_processes=self.node_devices,
            num_devices=1,
            total_bytes=self.node_host_gib * units.GIB,
        )
        return MemoryLimit(
            hardware.gpu_memory_fraction(os.environ) * self.gpu.memory_bytes,
            host_bytes,
        )


def make_cluster(
    device_type: str,
    num_devices: int,
    *,
    node_devices: int | None = None,
    node_host_gib: float | None = None,
) -> Cluster:
    """Makes a cluster of GPUs of one type, by default in nodes of the usual size.

    Raises: UserError for an unknown type, and for devices that do not fill their nodes.
    """
    if device_type not in gpus.GPUS:
        longer = next(
            (name for name in gpus.GPUS if name.startswith(f"{device_type}-")), device_type
        )
        hint = errors.did_you_mean(longer, gpus.GPUS)
        known = errors.format_choices(gpus.GPUS)
        raise UserError(f"--device = {device_type}: must be a known GPU. Use {known}.{hint}")
    gpu = gpus.GPUS[device_type]
    node_devices = node_devices or math.gcd(num_devices, gpu.node_devices)
    if num_devices % node_devices:
        divisors = [count for count in range(1, num_devices + 1) if num_devices % count == 0]
        raise UserError(
            f"--node-devices = {node_devices}: must divide {num_devices}, the number of GPUs. "
            f"Use {errors.format_choices(divisors)}."
        )
    if node_host_gib is None:
        node_host_gib = gpu.node_host_gib * node_devices / gpu.node_devices
    return Cluster(
        device_type=device_type,
        num_devices=num_devices,
        node_devices=node_devices,
        node_host_gib=node_host_gib,
    )


def make_devices(kind: str, count: int) -> list[Any]:
    """Makes JAX devices for absent GPUs of a type in gpus.GPUS. Programs can be compiled for them.

    Raises: UserError if XLA's compiler for GPUs is not installed.
    """
    if not any(map(importlib.util.find_spec, COMPILER_PLUGINS)):
        raise UserError(
            f"--device = {kind}: compiling for a GPU needs XLA's compiler for GPUs, which is not "
            "installed. Use pip install 'jaxsp[plan]'."
        )
    return list(_make_devices_cached(kind, count))


@functools.cache
def _make_devices_cached(kind: str, count: int) -> tuple[Any, ...]:
    # without it, the plugin requires a driver
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    from jax.experimental import topologies

    return tuple(
        topologies.get_topology_desc(
            platform="cuda", target_config=gpus.GPUS[kind].target_config, topology=f"1x{count}x1"
        ).devices
    )


class PlannedStep(NamedTuple):
    """A training step compiled for absent devices, and what it was compiled for."""

    spec: StepSpec
    executable: jax.stages.Compiled
    dump: CompilerDump


def compile_step(spec: StepSpec) -> PlannedStep:
    """Compiles a training step as training does, with _FAST_COMPILE_OPTIONS.

    Raises: what `training.train_step.compile` raises.
    """
    lowered = train_step.build_step(spec).lower(*train_state.abstract_inputs(spec))
    if spec.has_offloaded_state:
        _mark_host_arguments(lowered, spec)
    with tempfile.TemporaryDirectory(prefix="jaxsp-plan-") as name:
        folder = pathlib.Path(name)
        # A stub of CUDA's assembler where XLA looks first skips the machine code of hundreds of
        # kernels
        (folder / "bin").mkdir()
        assembler = folder / "bin" / "ptxas"
        assembler.write_text(_STUB_PTXAS, encoding="utf-8")
        assembler.chmod(0o755)
        options = (
            _FAST_COMPILE_OPTIONS
            | spec.compile_options.options
            | {"xla_dump_to": name, "xla_dump_hlo_as_text": True, "xla_gpu_cuda_data_dir": name}
        )
        chosen = dataclasses.replace(spec.compile_options, options=options)
        executable = compile_options.compile_lowered(lowered, chosen)
        train_step.check_collectives(spec, executable)
        ends = ("pu_after_optimizations.txt", "buffer-assignment.txt", "live-range.txt")
        files = [next(folder.glob(f"*jit_step*{end}")) for end in ends]
        dump = CompilerDump(*(file.read_text(encoding="utf-8") for file in files))
    return PlannedStep(spec, executable, dump)


_FAST_COMPILE_OPTIONS: compile_options.XlaOptions = {
    # the quality of a kernel's machine code changes no array and no collective
    "xla_backend_optimization_level": 0,
}
"""Compile options for a step that will not run. They halve the time of compiling, and change
neither memory nor collectives."""

# Without a GPU, autotuning measures nothing and only compiles every candidate kernel. With it off,
# XLA of jaxlib 0.11.2 fails ("No supported config found for HLO"), so it stays on there and takes a
# third more time
if jaxlib.__version__.startswith(("0.10.1", "0.12.0")):
    _FAST_COMPILE_OPTIONS["xla_gpu_autotune_level"] = 0

_STUB_PTXAS = """#!/bin/sh
[ "$1" != --version ] || { echo "Cuda compilation tools, release 12.9, V12.9.0"; exit 0; }
while [ $# -gt 0 ]; do
    [ "$1" != -o ] || echo none > "$2"
    shift
done
"""


def _mark_host_arguments(lowered: jax.stages.Lowered, spec: StepSpec) -> None:
    """Marks the arguments in host memory, because shardings on absent devices lose their memory
    kind."""
    state, _ = train_state.abstract_inputs(spec)

    def is_param_on_host(param: Parameter, weight: Any, opt_state: Any) -> tuple[Any, Any]:
        on_host = spec.is_on_host(param)
        is_state_on_host = jax.tree.map(lambda x: on_host and x.shape == weight.shape, opt_state)
        return jax.tree.map(lambda _: on_host, weight), is_state_on_host

    weights, moments = optimizer.map_weights_and_state(
        spec.state_table, is_param_on_host, state.master, state.opt_state
    )
    # The arguments after these are the step and the arrays of the batch that the objective uses
    on_host = jax.tree.leaves((weights, moments))
    module: Any = lowered.compiler_ir()
    with module.context:
        (main,) = (
            op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"'
        )
        arguments = [
            {attribute.name: attribute.attr for attribute in attributes}
            for attributes in main.arg_attrs
        ]
        assert len(arguments) > len(on_host), "every weight is an argument"
        for argument, is_on_host in zip(arguments, on_host, strict=False):
            if is_on_host:
                argument["mhlo.memory_kind"] = ir.StringAttr.get(device_memory.MEMORY_KIND)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(argument) for argument in arguments])


def measure_step(step: PlannedStep) -> MemoryUse:
    """Measures the memory of a compiled step.

    Adds the part of the estimate of cuDNN's workspace that does not fit into memory that is free
    during the backward calls.

    Raises: RuntimeError if the program has no such calls.
    """
    kernel = step.spec.attention.library_kernel
    counted = fit.read_memory_use(step.executable, step.spec.attention)
    if not counted.uncounted_workspace:
        return counted
    buffers = hlo.read_buffers(step.dump)
    calls = hlo.find_backward_calls(step.dump, kernel)
    if not calls:
        raise RuntimeError(
            f"the compiled step has no backward call of {kernel.title} attention "
            f"({kernel.custom_call_prefix}*Backward), so its memory cannot be planned"
        )
    live_bytes = max(hlo.compute_live_bytes(buffers, call) for call in calls)
    analysis = step.executable.memory_analysis()
    assert analysis is not None, "read_memory_use has read it"
    free = counted.device - analysis.argument_size_in_bytes - live_bytes
    return counted._replace(uncounted_workspace=max(0, counted.uncounted_workspace - free))
