"""Everything that a run writes: its folder, numbers, trackers, console and checkpoints."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import rich.console
from jax.experimental import multihost_utils

from jaxsp.checkpoint import run_paths
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.config import config_file
from jaxsp.core import durations, files, paths
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_count
from jaxsp.evaluation import task_plots
from jaxsp.model import flops
from jaxsp.planning.descriptions import StepMemory
from jaxsp.run import metrics, stored_run
from jaxsp.run.checkpoint_schedule import CheckpointSchedule
from jaxsp.run.config_file import Config
from jaxsp.run.metrics import MetricsWriter, StartLine
from jaxsp.run.progress import Progress
from jaxsp.run.run import Run
from jaxsp.run.tracking import Trackers
from jaxsp.system import distributed, jsonl, run_lock
from jaxsp.system.watchdog import RunStatus
from jaxsp.training.metric_table import Line


class RunDirectory:
    """Context of the files of a run. All processes make it together, when nothing else can fail.

    Files of checkpoints are those of all processes; process 0 writes the others.

    Args:
        banner_text: whole banner.
        on_line: see `trainer.train`.
    Raises: UserError if the directory cannot be written, or if other processes do not see it.
    """

    def __init__(
        self,
        run: Run,
        console: rich.console.Console,
        status: RunStatus,
        *,
        banner_text: str,
        start_line: StartLine,
        on_line: Callable[[Line], None] | None = None,
    ):
        config = run.config
        self._directory = directory = run.directory
        first_step = run.start.step
        # A new run also drops lines of an evaluation before its first step, and repeats it
        from_step = first_step if run.is_resume else first_step - 1
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(run_lock.lock(directory))
            _write_first_files(run, banner_text, start_line)
            run.reference.keep([run.train_set, *run.eval_sets])
            self.trackers = enter(Trackers(config, from_step=from_step, is_resume=run.is_resume))
            receivers = (self.trackers.log, on_line) if on_line else (self.trackers.log,)
            self.metrics = enter(MetricsWriter(directory, from_step=from_step, receivers=receivers))
            self.writer = enter(
                CheckpointWriter(
                    directory / run_paths.CHECKPOINTS_DIR,
                    table=run.spec.table,
                    config=config.checkpoint,
                    status=status,
                    # Before a checkpoint is written, metrics.jsonl must have the lines of its steps
                    before_write=self.metrics.sync,
                    eval_set=run.ranking_eval_set,
                    is_writer=config.run.is_writer,
                    has_separate_folders=paths.is_url(config.run.directory)
                    and jax.process_count() > 1,
                    uploads=stored_run.uploads.get(directory.resolve()),
                )
            )
            self.progress = enter(
                Progress(console, first_step=first_step, num_steps=run.spec.num_steps)
            )
            self.checkpoints = CheckpointSchedule(
                self.writer,
                config.run,
                first_step=first_step,
                print_line=self.progress.print_line,
            )
            self._trace = enter(contextlib.ExitStack())
            self._stack = stack.pop_all()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def start_trace(self) -> None:
        """Starts a trace of JAX's profiler, in process 0. No step may be running."""
        if jax.process_index() == 0:
            self._trace.enter_context(jax.profiler.trace(str(self._directory / "profile")))

    def stop_trace(self) -> None:
        """Stops and writes the trace, if one was started."""
        self._trace.close()

    def draw_needles(self, lines: Sequence[Line]) -> None:
        """Draws needles if lines of tasks.jsonl have some, in process 0."""
        if jax.process_index() > 0:
            return
        try:
            task_plots.draw_if_possible(self._directory, lines)
        except OSError as error:
            distributed.log(
                f"needle.png: could not be written: {error.strerror}. The run continues"
            )


def describe_start(run: Run, *, memory: StepMemory, compile_s: float) -> StartLine:
    """Returns the line of a start."""
    spec = run.spec
    devices = spec.mesh.devices.flatten()
    version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("jaxsp")
    return StartLine(
        time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        host=platform.node(),
        from_step=run.start.step,
        previous_step=_read_last_step(run.directory / metrics.METRICS_FILE),
        checkpoint=None if run.start.checkpoint is None else str(run.start.checkpoint),
        config_changes=list(run.start.config_changes),
        num_steps=spec.num_steps,
        num_parameters=flops.num_parameters(spec.table),
        num_devices=len(devices),
        device_kind=devices[0].device_kind,
        num_processes=jax.process_count(),
        mesh=dict(spec.mesh.shape),
        strategy=spec.attention.strategy.description,
        kernel=spec.attention.kernel.name,
        jaxsp_version=version,
        jax_version=jax.__version__,
        python_version=platform.python_version(),
        compile_s=round(compile_s, 3),
        memory=dataclasses.asdict(memory),
    )


def _read_last_step(path: pathlib.Path) -> int | None:
    """Step of the last complete line of a file; None if there is no such line."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    # the last line of a killed run may be damaged
    steps = ((files.parse_json(line) or {}).get("step") for line in reversed(lines))
    return next((step for step in steps if isinstance(step, int)), None)


def _write_first_files(run: Run, banner_text: str, start_line: StartLine) -> None:
    """Writes the files that are known before the first step. All processes must see them."""
    directory = run.directory
    config_path = directory / run_paths.CONFIG_FILE
    with run_lock.report_write_errors(directory):
        if run.config.run.is_writer:
            config_file.save(run.config, config_path)
            files.write_atomic(directory / "banner.txt", banner_text)
            run.write_model(directory / "model")
        if jax.process_index() == 0:
            jsonl.append_record(directory / metrics.STARTS_FILE, dataclasses.asdict(start_line))
    if jax.process_count() == 1:
        return
    multihost_utils.sync_global_devices("run directory created")
    for _ in range(30):  # files written on another node may become visible seconds later
        if config_path.is_file():
            return
        time.sleep(1)
    raise UserError(
        f"run.directory = {directory}: was created by process 0, but process "
        f"{jax.process_index()} does not see it. Use a folder that all nodes share."
    )


def describe(config: Config, *, has_eval_sets: bool, first_step: int) -> tuple[str, str]:
    """Describes what a run writes: all names, and the directory with the times of checkpoints.

    Args: first_step: number of steps before the start.
    """
    run = config.run
    profiled = config.logging.profile_steps
    names = ["config.yaml", "banner.txt", "starts.jsonl", "metrics.jsonl"]
    names += ["eval.jsonl"] if has_eval_sets else []
    names += ["tasks.jsonl"] if config.eval.tasks else []
    names += ["samples.jsonl"] if run.generate_samples else []
    names += ["profile/"] if profiled is not None and profiled[0] > first_step else []
    names += [f"{tracker.folder}/" for tracker in config.logging.trackers if tracker.folder]
    times = "at the end"
    if run.save_every == "epoch":
        times = "after every epoch"
    elif run.save_interval is not None:
        times = f"every {durations.to_text(run.save_interval)} and at the end"
    elif run.save_steps is not None:
        times = f"every {format_count(run.save_steps, 'step')} and at the end"
    names += ["model/", f"checkpoints/ ({times})"]
    short = f"{run.directory}, with a checkpoint {times}; details: {run.directory}/banner.txt"
    return f"{run.directory}: {', '.join(names)}", short
