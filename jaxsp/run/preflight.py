"""Checks and compilation before the first step of a run."""

import dataclasses
import itertools
import pathlib
import time
import zlib

import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from jaxsp.checkpoint import reader, retention, run_paths
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.core import durations
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_bytes
from jaxsp.planning import fit
from jaxsp.planning.fit import CompiledStep
from jaxsp.run import console as output
from jaxsp.run import resume, selfcheck
from jaxsp.run.run import Run
from jaxsp.system import distributed
from jaxsp.training import train_state
from jaxsp.training.specs import StepSpec


def check_agreement(run: Run) -> None:
    """Checks that all processes have the same config, data and start. Raises: UserError"""
    compared = [
        (f"data: {source.name}", digest)
        for data in (run.train_set, *run.eval_sets)
        for source, digest in data.digested_sources
    ]
    compared += [
        ("the config", repr((run.config, sorted(run.automatic_fields)))),
        ("the checkpoint to resume from", repr(run.start.rows_consumed)),
        ("XLA_FLAGS", repr(run.spec.compile_options)),
        ("attention (the devices' memory or versions)", repr(run.spec.attention)),
    ]
    hashes = [zlib.crc32(text.encode()) for _, text in compared]
    all_processes = multihost_utils.process_allgather(
        np.array([run.start.step, *hashes], np.uint32)
    )
    resume.check_same_step(run.config.run, all_processes[:, 0])
    for (name, _), (first, *others) in zip(compared, all_processes[:, 1:].T, strict=True):
        if (first != others).any():
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
    model = run.spec.model
    may_replace = selfcheck.DELTA_NET_FIELD in run.automatic_fields and (
        model.delta_net is not None and model.delta_net.kernel != "xla"
    )
    lines: list[str | None]
    checked, problem = selfcheck.check_device(run.spec, may_replace=may_replace)
    lines = [*checked]
    if problem:
        distributed.log(f"warning: {problem}. All processes use {selfcheck.DELTA_NET_FIELD}=xla.")
    if may_replace and multihost_utils.process_allgather(np.bool_(problem)).any():
        fields = {"delta_net_kernel": "xla"}
        config = run.config.with_fields(model=fields)
        run = dataclasses.replace(run, config=config, spec=run.spec.respec(**fields))
        lines += selfcheck.check_device(run.spec)[0]
    if jax.process_index() == 0:
        items = reader.list_items(train_state.abstract_inputs(run.spec)[0], run.spec.state_table)
        every = run.config.run.save_every
        num_steps = len(run.schedule)
        num_checkpoints = num_steps // (every if isinstance(every, int) else 1) + 1
        warning = check_space(
            run.directory,
            run.config.checkpoint,
            checkpoint_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(items)),
            num_checkpoints=num_checkpoints if every else 1,
        )
        lines.append(warning)
    for line in filter(None, lines):
        output.print_line(console, line)
    return run


def check_space(
    directory: pathlib.Path,
    config: CheckpointConfig,
    *,
    checkpoint_bytes: int,
    num_checkpoints: int,
) -> str | None:
    """Compares the free space in a run directory with the space that checkpoints need.

    Their bytes count uncompressed, because it is unknown how much zstd leaves. Unfinished
    checkpoints count as free: they are removed before the first one is written.

    Args: num_checkpoints: at most; one of them is half written.
    Returns: a warning if not all checkpoints that exist at the same time fit.
    Raises: UserError if not even one fits.
    """
    free = retention.free_bytes(directory)
    if free is None:
        return None
    checkpoints = directory / run_paths.CHECKPOINTS_DIR
    for unfinished in retention.list_unfinished(checkpoints) if checkpoints.is_dir() else ():
        free += sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    if free < checkpoint_bytes:
        raise UserError(
            f"run.directory = {directory}: a checkpoint takes {format_bytes(checkpoint_bytes)}, "
            f"but only {format_bytes(free)} are free. Free some space, or use a folder on another "
            "disk."
        )
    num_kept = config.keep_latest + config.keep_best
    num_missing = num_kept + 1 - len(run_paths.list_steps(checkpoints))
    num_more = max(1, min(num_missing, num_checkpoints))
    if free < checkpoint_bytes * num_more:
        return (
            f"warning: the disk may become full: {format_bytes(free)} are free in {directory}, and "
            f"the run may need space for {num_more} more checkpoints of "
            f"{format_bytes(checkpoint_bytes)} at the same time"
        )
    return None


def compile_step(spec: StepSpec, console: rich.console.Console) -> tuple[CompiledStep, float]:
    """Compiles the step and reserves host memory. Raises: UserError if it does not fit.

    Returns: the step, and the seconds.
    """
    began = time.perf_counter()
    numbers = itertools.count(1)
    with console.status("compiling the step") as status:

        def print_candidate(candidate: StepSpec) -> None:
            number = next(numbers)
            text = f"compiling the step: remat {candidate.remat_policy.remat}"
            text += f", candidate {number}" if number > 1 else ""
            if console.is_terminal:
                status.update(text)
            else:
                output.print_line(console, text)

        step = fit.compile_fitting_step(spec, on_candidate=print_candidate)
    seconds = time.perf_counter() - began
    text = f"the step was compiled in {durations.describe(round(seconds, 1))}; "
    output.print_line(console, text + fit.describe_compiled(step))
    fit.reserve_host_memory(spec, step.memory_use.host)
    return step, seconds
