"""Before the first step of a run: limits of JAX's memory, checks and compilation.

The limits must be set before JAX initializes its devices. They are formulas, because no step is
compiled yet.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import time
import zlib

import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from jaxsp.attention.selection import choose_strategy
from jaxsp.attention.strategy import combine
from jaxsp.attention.workload import count_workloads
from jaxsp.blocks.config import ModelConfig
from jaxsp.checkpoint import reader, retention, run_paths
from jaxsp.core import units
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_bytes
from jaxsp.hf import model_config, peft
from jaxsp.planning import estimate, fit
from jaxsp.planning.candidates import list_degrees
from jaxsp.planning.fit import CompiledStep
from jaxsp.run import console as output
from jaxsp.run import selfcheck
from jaxsp.run.build import Run
from jaxsp.run.config_file import Config
from jaxsp.system import device_mesh, distributed, hardware, jax_platform
from jaxsp.system.distributed import Process
from jaxsp.training import train_state
from jaxsp.training.specs import StepSpec
from jaxsp.training.step_config import StepConfig

ONE_PROCESS = Process()


def start(config: Config, process: Process = ONE_PROCESS) -> None:
    """Makes JAX ready to compile a config's steps, in all processes. Raises: UserError."""
    choose_platform(config, process)
    jax_platform.enable_cache(config.run.compilation_cache, num_processes=process.num_processes)
    distributed.initialize(process)


def choose_platform(config: Config, process: Process = ONE_PROCESS) -> None:
    """Selects the platform and limits of JAX for a config. Call it before JAX counts devices."""
    num_local = distributed.count_local_processes(process, os.environ)
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


def check_agreement(run: Run) -> None:
    """Checks that all processes have the same config, data and start. Raises: UserError"""
    compared = [
        (f"data: {source.name}", digest)
        for data in (run.train_set, *run.eval_sets)
        for source, digest in zip(data.documents.sources, data.digests, strict=True)
    ]
    compared += [
        ("the config", repr((run.config, sorted(run.automatic_fields)))),
        ("the checkpoint to resume from", repr((run.start.step, run.start.rows_consumed))),
        ("XLA_FLAGS", repr(run.spec.compile_options)),
        ("attention (the devices' memory or versions)", repr(run.spec.attention)),
    ]
    hashes = np.array([zlib.crc32(text.encode()) for _, text in compared], np.uint32)
    is_same = (multihost_utils.process_allgather(hashes) == hashes).all(axis=0)
    for (name, _), is_equal in zip(compared, is_same, strict=True):
        if not is_equal:
            raise UserError(
                f"{name}: must be the same in all processes. Give all of them the same files, "
                "for example in a folder that all nodes share."
            )


def finish_run(run: Run) -> None:
    """Deletes superseded checkpoints of a run that has done all its steps, unless they are another
    run's."""
    if run.is_resume and run.config.run.is_writer:
        checkpoints = run.directory / run_paths.CHECKPOINTS_DIR
        try:
            retention.remove_unfinished(checkpoints)
            retention.delete_superseded(checkpoints, run.config.checkpoint, run.ranking_eval_set)
        except OSError as error:
            reason = reader.describe_error(error)
            distributed.log(f"{checkpoints}: an old checkpoint could not be deleted: {reason}")


def report_checks(run: Run, console: rich.console.Console) -> Run:
    """Runs the self-checks and the disk check, and prints their results.

    Returns: the run. It has another kernel of delta nets, in all processes, if the one that `auto`
        chose is wrong in any process.
    Raises: UserError if another check fails, or no checkpoint fits on the disk.
    """
    delta_net = run.spec.model.delta_net
    is_automatic = selfcheck.DELTA_NET_FIELD in run.automatic_fields
    may_replace = is_automatic and delta_net is not None and delta_net.kernel != "xla"
    lines, problem = selfcheck.check_device(run.spec, may_replace=may_replace)
    if problem:
        distributed.log(f"warning: {problem}. All processes use {selfcheck.DELTA_NET_FIELD}=xla.")
    if may_replace and multihost_utils.process_allgather(np.bool_(problem)).any():
        fields = {"delta_net_kernel": "xla"}
        config = run.config.with_fields(model=fields)
        run = dataclasses.replace(run, config=config, spec=run.spec.respec(**fields))
        lines += selfcheck.check_device(run.spec)[0]
    if jax.process_index() == 0:
        items = reader.list_items(train_state.abstract_inputs(run.spec)[0], run.spec.state_table)
        check_space(run.directory, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(items)))
    for line in lines:
        output.print_line(console, line)
    return run


def check_space(directory: pathlib.Path, checkpoint_bytes: int) -> None:
    """Checks that a checkpoint fits on the disk, uncompressed, because it is unknown how much zstd
    leaves. Unfinished checkpoints count as free: they are removed before the first one is written.
    Raises: UserError."""
    free = retention.free_bytes(directory)
    if free is None:
        return
    checkpoints = directory / run_paths.CHECKPOINTS_DIR
    for unfinished in retention.list_unfinished(checkpoints) if checkpoints.is_dir() else ():
        free += sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    if free < checkpoint_bytes:
        raise UserError(
            f"run.directory = {directory}: a checkpoint takes {format_bytes(checkpoint_bytes)}, "
            f"but only {format_bytes(free)} are free. Free some space, or use a folder on another "
            "disk."
        )


def compile_step(spec: StepSpec, console: rich.console.Console) -> tuple[CompiledStep, float]:
    """Compiles the step and reserves host memory. Raises: UserError if it does not fit.

    Returns: the step, and the seconds.
    """
    began = time.perf_counter()
    numbers = itertools.count(1)

    def print_candidate(candidate: StepSpec) -> None:
        number = next(numbers)
        text = f"compiling the step: remat {candidate.remat_policy.remat}"
        output.print_line(console, text + (f", candidate {number}" if number > 1 else ""))

    step = fit.compile_fitting_step(spec, on_candidate=print_candidate)
    seconds = time.perf_counter() - began
    text = f"the step was compiled in {units.format_seconds(round(seconds, 1))}; "
    output.print_line(console, text + fit.describe_compiled(step))
    fit.reserve_host_memory(spec, step.memory_use.host)
    return step, seconds
