"""Everything that a run writes: its folder, numbers, trackers, console and checkpoints."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import rich.console
from jax.experimental import multihost_utils

from jaxsp.checkpoint import run_paths, run_storage
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.config import config_file
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.model import flops
from jaxsp.planning import fit
from jaxsp.planning.fit import CompiledStep
from jaxsp.run import metrics, trackers
from jaxsp.run.build import Run
from jaxsp.run.config_file import Config
from jaxsp.run.console import Progress
from jaxsp.run.metrics import MetricsWriter, StartLine
from jaxsp.run.schedule import CheckpointSchedule
from jaxsp.run.trackers import Client, Outcome, TrackedRun, Tracker
from jaxsp.system import jsonl, run_lock
from jaxsp.system.watchdog import RunStatus
from jaxsp.training.metric_table import Line


class RunDirectory:
    """Context of the files of a run. All processes make it together, when nothing else can fail.

    Files of checkpoints are those of all processes; process 0 writes the others.

    Args: banner_text: whole banner. on_line: see `trainer.train`.
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
        directory = run.directory
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
            is_shared = not files.is_url(config.run.directory)
            self.writer = enter(
                CheckpointWriter(
                    directory / run_paths.CHECKPOINTS_DIR,
                    table=run.spec.state_table,
                    config=config.checkpoint,
                    status=status,
                    # Before a checkpoint is written, metrics.jsonl must have the lines of its steps
                    before_write=self.metrics.sync,
                    eval_set=run.ranking_eval_set,
                    is_writer=config.run.is_writer,
                    has_separate_folders=not is_shared and jax.process_count() > 1,
                    uploads=run_storage.uploads.get(directory.resolve()),
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
            self._stack = stack.pop_all()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def describe_start(run: Run, step: CompiledStep, *, compile_s: float) -> StartLine:
    """Returns the line of a start."""
    spec = run.spec
    devices = spec.mesh.devices.flatten()
    version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("jaxsp")
    path = run.directory / metrics.METRICS_FILE
    lines = path.read_bytes().splitlines() if path.exists() else []
    # the last line of a killed run may be damaged
    steps = ((files.parse_json(line) or {}).get("step") for line in reversed(lines))
    return StartLine(
        time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        host=platform.node(),
        from_step=run.start.step,
        previous_step=next((step for step in steps if isinstance(step, int)), None),
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
        memory=dataclasses.asdict(fit.find_causes(step)),
    )


def _write_first_files(run: Run, banner_text: str, start_line: StartLine) -> None:
    """Writes the files that are known before the first step, which all processes must see."""
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


class Trackers:
    """Context of a run's trackers."""

    def __init__(self, config: Config, *, from_step: int, is_resume: bool):
        """Starts the trackers in process 0. Args: is_resume: False for a run new to them."""
        directory = config.run.local_dir
        saved = files.read_json(directory / trackers.IDS_FILE) if is_resume else None
        run = TrackedRun(
            directory=directory,
            config=config.model_dump(mode="json"),
            shutdown_grace=config.run.shutdown_grace,
            from_step=from_step,
            ids=saved or {},
        )
        self.outcome: Outcome = "finished"
        """End of the run, if no exception ends it."""
        self._clients: dict[str, Client] = {}

        def start(choice: Tracker) -> None:
            self._clients[choice.type] = choice.start(run)

        for choice in config.logging.trackers if jax.process_index() == 0 else ():
            self._try(choice.type, start, choice)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        outcome = self.outcome if kind is None else "failed"
        for name, client in list(self._clients.items()):
            self._try(name, client.close, outcome)

    def log(self, line: Mapping[str, Any]) -> None:
        """Records the numbers of a line of metrics.jsonl, eval.jsonl or tasks.jsonl."""
        numbers = name_numbers(line)
        for name, client in list(self._clients.items()):
            self._try(name, client.log, numbers, line["step"])

    def _try(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a tracker, which is left out from then on if it fails."""
        try:
            call(*arguments)
        except Exception as error:  # the clients raise errors of many kinds
            self._clients.pop(name, None)
            trackers.print_failure(name, f"{type(error).__name__}: {error}")


def name_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line by name: the group, such as train or eval/NAME, and field."""
    group = "train"
    if "task" in line:
        group = f"task/{line['task']}/{line['length']}"
    elif "data" in line:
        group = f"eval/{line['data']}"
    fields = dict(line)
    for field, value in line.items():
        if isinstance(value, dict):
            fields |= {f"{field}/{name}": number for name, number in value.items()}
    return {
        f"{group}/{name}": float(value)
        for name, value in fields.items()
        if name not in ("step", "length") and isinstance(value, int | float)
    }
