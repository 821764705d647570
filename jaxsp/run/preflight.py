"""Checks and compilation before the first step of a run."""

import dataclasses
import itertools
import pathlib
import time
import zlib
from collections.abc import Callable

import jax
import numpy as np
import rich.console
import rich.status
from jax.experimental import multihost_utils

from jaxsp.checkpoint import reader, retention, run_paths
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.core import durations
from jaxsp.core.batch import Batch
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_bytes
from jaxsp.planning import descriptions, fit
from jaxsp.planning.descriptions import StepMemory
from jaxsp.run import checkpoint_schedule, resume, selfcheck
from jaxsp.run import console as output
from jaxsp.run.early_stopping import EarlyStopping
from jaxsp.run.run import Run
from jaxsp.system import distributed
from jaxsp.training import train_state
from jaxsp.training.specs import StepSpec
from jaxsp.training.train_state import TrainState
from jaxsp.training.train_step import StepResults

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, StepResults]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStep:
    """Compiled step of a run."""

    function: StepFunction
    memory: StepMemory
    seconds: float
    """Duration of the compilation."""


def check_agreement(run: Run) -> None:
    """Checks that all processes have the same config, data, options and starting step.

    Raises: UserError in all processes if they differ.
    """
    if jax.process_count() == 1:
        return
    compared = [
        (f"data: {source.name}", digest)
        for data in (run.train_set, *run.eval_sets)
        for source, digest in data.digested_sources
    ]
    compared += [
        ("the config", repr(run.config)),
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


def describe_completion(run: Run, early_stopping: EarlyStopping) -> str | None:
    """Message for a run that has nothing left to do; None if it has steps to run."""
    directory = run.config.run.directory
    if run.start.step >= run.spec.num_steps:
        return (
            f"{directory}: has all its {run.spec.num_steps} steps. "
            "Raise run.steps or run.epochs to train longer."
        )
    if early_stopping.should_stop():
        return (
            f"{directory}: stopped early at step {run.start.step}: {early_stopping.reason}. "
            "Raise run.early_stopping_patience, or set it to null, to train longer."
        )
    return None


def finish_run(run: Run) -> None:
    """Deletes superseded checkpoints of a run that has done all its steps.

    It does nothing for a run that was to resume from a checkpoint of another run.
    """
    if run.is_resume and run.config.run.is_writer:
        checkpoints = run.directory / run_paths.CHECKPOINTS_DIR
        try:
            retention.remove_unfinished(checkpoints)
            retention.delete_superseded(checkpoints, run.config.checkpoint, run.ranking_eval_set)
        except OSError as error:
            reason = reader.describe_error(error)
            distributed.log(f"{checkpoints}: an old checkpoint could not be deleted: {reason}")


def report_checks(run: Run, console: rich.console.Console) -> None:
    """Runs the self-checks and the disk check, and prints a line for each result.

    Raises: UserError if a kernel is wrong on this device, or if no checkpoint fits on the disk.
    """
    lines: list[str | None] = [*selfcheck.check_device(run.spec)]
    if jax.process_index() == 0:
        items = reader.list_items(train_state.abstract_inputs(run.spec)[0], run.spec.table)
        warning = check_space(
            run.directory,
            run.config.checkpoint,
            checkpoint_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(items)),
            num_checkpoints=checkpoint_schedule.count(run.config.run, len(run.schedule)),
        )
        lines.append(warning)
    for line in filter(None, lines):
        output.print_line(console, line)


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

    Args: num_checkpoints: number that the run will write at most.
    Returns: a warning if the disk is too small for all checkpoints that exist at the same time, one
        of them half written; otherwise None.
    Raises: UserError if the disk is too small for one more checkpoint.
    """
    free = retention.free_bytes(directory)
    if free is None:
        return None
    checkpoints = directory / run_paths.CHECKPOINTS_DIR
    for unfinished in retention.list_unfinished(checkpoints):
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


def compile_step(spec: StepSpec, console: rich.console.Console) -> RunStep:
    """Compiles the step and reserves the host memory for offloaded arrays.

    Raises: UserError if the step does not fit the device or the host.
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
    output.print_line(
        console,
        f"the step was compiled in {durations.describe(round(seconds, 1))}; "
        f"{descriptions.describe_compiled(step)}",
    )
    fit.reserve_host_memory(spec, step.memory_use.host)
    return RunStep(function=step.executable, memory=descriptions.find_causes(step), seconds=seconds)
