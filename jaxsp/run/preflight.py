"""Checks and compilation before the first step of a run."""

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
import rich.console
import rich.status
from jax.experimental import multihost_utils

from jaxsp.checkpoint import disk_space, files, reader
from jaxsp.core import durations
from jaxsp.core.batch import Batch
from jaxsp.core.errors import UserError
from jaxsp.evaluation import evaluator
from jaxsp.memory import memory_causes, memory_compile, memory_descriptions
from jaxsp.memory.memory_causes import StepMemory
from jaxsp.reporting import console as output
from jaxsp.run import selfcheck
from jaxsp.runtime import run_paths
from jaxsp.setup import resume
from jaxsp.training import train_state
from jaxsp.training.early_stopping import EarlyStopping
from jaxsp.training.inputs import RunInputs
from jaxsp.training.specs import RunSpec, StepSpec
from jaxsp.training.train_state import TrainState
from jaxsp.training.train_step import StepResults

StepFunctions = Mapping[int, Callable[[TrainState, Batch], tuple[TrainState, StepResults]]]
"""Compiled step for each row length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledSteps:
    """Compiled steps of a run."""

    functions: StepFunctions
    memory: tuple[StepMemory, ...]
    """Memory of the step for each row length."""
    seconds: float
    """Duration of the compilation."""


def check_agreement(run_spec: RunSpec, inputs: RunInputs) -> None:
    """Checks that all processes have the same config, data, options and starting step.

    Raises: UserError in all processes if they differ.
    """
    if jax.process_count() == 1:
        return
    start = inputs.start
    choices = [spec.attention for spec in run_spec.steps.values()]
    compared = [
        (f"data: {source.name}", digest)
        for data in (inputs.train_set, *inputs.eval_sets)
        for source, digest in data.digested_sources
    ]
    compared += [
        ("the config", repr(run_spec.config)),
        ("the checkpoint to resume from", repr(start.rows_consumed)),
        ("XLA_FLAGS", repr(run_spec.longest.compile_options)),
        ("attention (the devices' memory or versions)", repr(choices)),
    ]
    digests = [hashlib.sha256(text.encode()).digest()[:8] for _, text in compared]
    hashes = [np.frombuffer(digest, np.int32) for digest in digests]
    local = np.stack([np.array([start.step, 0], np.int32), *hashes])
    all_processes = multihost_utils.process_allgather(local)
    resume.check_same_step(run_spec.config.run, all_processes[:, 0, 0])
    is_different = (all_processes[:, 1:] != all_processes[0, 1:]).any((0, 2))
    for (name, _), differs in zip(compared, is_different, strict=True):
        if differs:
            raise UserError(
                f"{name}: must be the same in all processes. Give all of them the same files, "
                "for example in a folder that all nodes share."
            )


def ranking_eval_set(run_spec: RunSpec, inputs: RunInputs) -> dict[str, str] | None:
    """Name and digest of the eval set whose loss ranks checkpoints; None without eval sets."""
    best_eval = run_spec.config.checkpoint.best_eval
    for data in inputs.eval_sets:
        if best_eval in (None, data.name):
            return evaluator.identify_eval_set(data, run_spec.config)
    return None


def make_early_stopping(run_spec: RunSpec, inputs: RunInputs) -> EarlyStopping:
    """Early stopping with the state of the run's own checkpoint, if it resumes from one."""
    config = run_spec.config
    is_resume = inputs.start.is_resume_in(run_paths.local_dir(config.run))
    return EarlyStopping(
        config.run,
        ranking_eval_set(run_spec, inputs),
        resumed_state=inputs.start.early_stopping if is_resume else None,
    )


def describe_completion(
    run_spec: RunSpec, inputs: RunInputs, early_stopping: EarlyStopping
) -> str | None:
    """Message for a run that has nothing left to do; None if it has steps to run."""
    directory = run_spec.config.run.directory
    if inputs.start.step >= run_spec.num_steps:
        return (
            f"{directory}: has all its {run_spec.num_steps} steps. "
            "Raise run.steps or run.epochs to train longer."
        )
    if early_stopping.should_stop():
        return (
            f"{directory}: stopped early at step {inputs.start.step}: {early_stopping.reason}. "
            "Raise run.early_stopping_patience, or set it to null, to train longer."
        )
    return None


def report_checks(run_spec: RunSpec, inputs: RunInputs, console: rich.console.Console) -> None:
    """Runs the self-checks and the disk check, and prints a line for each result.

    Raises: UserError if a kernel is wrong on this device, or if no checkpoint fits on the disk.
    """
    lines: list[str | None] = [
        *selfcheck.check_device(
            run_spec.longest, [spec.attention for spec in run_spec.steps.values()]
        )
    ]
    if jax.process_index() == 0:
        state = train_state.abstract_inputs(run_spec.longest)[0]
        checkpoints = run_paths.local_dir(run_spec.config.run) / run_paths.CHECKPOINTS_DIR
        warning = disk_space.check(
            run_spec.config,
            checkpoint_bytes=disk_space.tree_bytes(
                reader.list_items(state, run_spec.longest.table)
            ),
            num_steps=run_spec.num_steps - inputs.start.step,
            leftover_bytes=files.leftover_bytes(checkpoints),
        )
        lines.append(warning)
    for line in filter(None, lines):
        output.print_line(console, line)


def _make_candidate_printer(
    title: str, console: rich.console.Console, status: rich.status.Status
) -> Callable[[StepSpec], None]:
    """Returns a function that prints each candidate of memory options that are `auto`, before it
    is compiled. On a GPU, XLA times kernels meanwhile, which may take minutes."""
    numbers = itertools.count(1)

    def print_candidate(candidate: StepSpec) -> None:
        text = f"{title}: remat {candidate.remat_policy.remat}"
        number = next(numbers)
        if number > 1:
            text += f", candidate {number}"
        if console.is_terminal:
            status.update(text)
        else:
            output.print_line(console, text)

    return print_candidate


def compile_steps(
    run_spec: RunSpec, inputs: RunInputs, console: rich.console.Console
) -> CompiledSteps:
    """Compiles the step for each row length and reserves the host memory for offloaded arrays.

    Raises: UserError if a step does not fit the device or the host.
    """
    functions = {}
    memory = []
    seconds = 0.0
    host_bytes = 0
    lengths = [stream.row_tokens for stream in inputs.train_set.streams]
    for number, row_tokens in enumerate(lengths, 1):
        name = "the step"
        progress = ""
        if len(lengths) > 1:
            name += f" for rows of {row_tokens:,} tokens"
            progress = f", {number} of {len(lengths)}"
        began = time.perf_counter()
        with console.status(f"compiling {name}{progress}") as status:
            step = memory_compile.compile_fitting_step(
                run_spec.steps[row_tokens],
                on_candidate=_make_candidate_printer(
                    f"compiling {name}{progress}", console, status
                ),
            )
        compile_s = time.perf_counter() - began
        duration = durations.describe(round(compile_s, 1))
        output.print_line(
            console,
            f"{name} was compiled in {duration}; {memory_descriptions.describe_compiled(step)}",
        )
        functions[row_tokens] = step.executable
        memory.append(memory_causes.find_causes(step))
        seconds += compile_s
        host_bytes = max(host_bytes, step.memory_use.host)
    memory_compile.reserve_host_memory(run_spec.longest, host_bytes)
    return CompiledSteps(functions=functions, memory=tuple(memory), seconds=seconds)
