"""Limits for JAX's memory, which must be set before it initializes its devices.

They are formulas, because no step is compiled yet.
"""

import contextlib
import os

from jaxsp.attention.selection import choose_strategy
from jaxsp.attention.strategies.strategy import combine
from jaxsp.attention.strategies.workload import count_workloads
from jaxsp.blocks.config import ModelConfig
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config, peft
from jaxsp.planning import estimate
from jaxsp.planning.candidates import list_degrees
from jaxsp.run.config_file import Config
from jaxsp.system import (
    cluster,
    device_mesh,
    distributed,
    hardware,
    jax_platform,
)
from jaxsp.system.cluster import Process
from jaxsp.training.step_config import StepConfig

ONE_PROCESS = Process()


def start(config: Config, process: Process = ONE_PROCESS) -> None:
    """Makes JAX ready to compile a config's steps, in all processes. Raises: UserError."""
    choose_platform(config, process)
    jax_platform.enable_cache(config.run.compilation_cache, num_processes=process.num_processes)
    distributed.initialize(process)


def choose_platform(config: Config, process: Process = ONE_PROCESS) -> None:
    """Selects the platform and limits of JAX for a config. Call it before JAX counts devices."""
    num_local = cluster.count_local_processes(process, os.environ)
    pool_bytes = None
    outside_bytes = 0.0
    model = None
    if num_gpus := hardware.count_gpus(os.environ):
        num_devices = process.num_processes * max(1, num_gpus // num_local)
        # A resumed run reads the model from its checkpoint; errors are reported later, with others
        with contextlib.suppress(UserError):
            fields, _ = model_config.read_fields(config.model)
            model = model_config.parse_model_config(fields, row_tokens=config.data.row_tokens)
            model = peft.resolve(config.adapter, model).model
        pool_bytes = estimate_pool_bytes(config.step, model, num_devices)
        outside_bytes = estimate_outside_bytes(config.step, model, num_devices)
    jax_platform.choose_platform(
        virtual_cpu_devices=config.mesh.virtual_cpu_devices,
        num_processes=process.num_processes,
        num_local_processes=num_local,
        max_pool_bytes=pool_bytes,
        outside_bytes=outside_bytes,
    )


def estimate_pool_bytes(
    config: StepConfig, model: ModelConfig | None, num_devices: int
) -> int | None:
    """Size of XLA's pool of pinned host memory for each GPU; None if nothing is offloaded, the
    model is unknown, or a number is `auto`."""
    is_offloaded = {config.memory.offload_activations, config.memory.offload_optimizer} != {"none"}
    if not is_offloaded or model is None or "auto" in (config.mesh.seq, config.rows_per_microbatch):
        return None
    num_shards = max(1, num_devices // config.mesh.replica)
    offloaded = estimate.offloaded_bytes(model, config, num_shards=num_shards)
    return estimate.pool_bytes(offloaded)


def estimate_outside_bytes(
    config: StepConfig, model: ModelConfig | None, num_devices: int
) -> float:
    """Maximum memory of a GPU that CUDA and NCCL need, of all meshes that `auto` may choose."""
    config = config.with_one_row_for_auto()
    candidates = [config]
    if config.mesh.seq == "auto":
        candidates = [config.change(mesh={"seq": x}) for x in list_degrees(config, num_devices)]
    nccl_bytes = [0.0]
    for candidate in candidates:
        with contextlib.suppress(UserError):  # reported later, with all others
            sizes = device_mesh.resolve_axis_sizes(candidate.mesh, num_devices)
            if model is None:
                nccl_bytes.append(estimate.nccl_bytes(sizes, combine(candidate.mesh.degree)))
            else:
                strategy = choose_strategy(candidate.attention, candidate.rows, model)
                workloads = count_workloads(candidate.rows, model)
                nccl_bytes.append(estimate.nccl_bytes(sizes, strategy, workloads))
    return estimate.CUDA_BYTES + max(nccl_bytes)
