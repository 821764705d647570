"""Work of the command `jaxsp train`."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import rich.console

from jaxsp.checkpoint import run_paths, run_storage
from jaxsp.checkpoint.reader import DamagedCheckpointError
from jaxsp.run import build, preflight, resume, trainer
from jaxsp.run.build import Run
from jaxsp.run.config_file import Config
from jaxsp.system import distributed, jax_platform, run_lock
from jaxsp.system.cluster import Process
from jaxsp.system.preemption import Preemption
from jaxsp.system.watchdog import RunStatus, Watchdog
from jaxsp.training.loss import TokenLoss
from jaxsp.training.metric_table import Line
from jaxsp.training.train_state import TrainState


def train(
    config: Config, process: Process, console: rich.console.Console, *, path: str, verbose: bool
) -> None:
    """Trains a config. Raises: UserError with all problems found before the first step."""
    preflight.choose_platform(config, process)
    jax_platform.enable_cache(config.run.compilation_cache, num_processes=process.num_processes)
    preemption = make_preemption(config)
    with preemption.listen():
        distributed.initialize(process)
        train_config(config, console, preemption, config_path=path, verbose=verbose)
        preemption.is_done = True
        # Before the signal handlers are removed: a signal must not fail a run that is complete
        distributed.shutdown()


def make_preemption(config: Config) -> Preemption:
    """Makes the handler of a run's requests to stop."""
    return Preemption(
        RunStatus(),
        shutdown_grace=config.run.shutdown_grace,
        stop_after=config.run.stop_after,
        describe_loss=lambda last: run_paths.describe_lost_steps(config.run.local_dir, last),
    )


def train_config(
    config: Config,
    console: rich.console.Console,
    preemption: Preemption,
    *,
    config_path: str = "",
    verbose: bool = False,
    loss: TokenLoss | None = None,
    on_line: Callable[[Line], None] | None = None,
    needs_state: bool = False,
) -> tuple[Run, TrainState | None]:
    """Trains a config from its latest checkpoint to its last step, in its locked run directory.

    Args:
        config_path: file of the config, for messages about the lock.
        loss: a loss per token; None: cross entropy.
        needs_state: restore the state of a run that was complete.
    Returns: the run and its last state; None if it was complete, unless `needs_state`.
    """
    folder = config.run.local_dir
    process = distributed.this_process
    with (
        run_lock.lock(folder, config_path=config_path, name=config.run.directory),
        run_storage.open_run(config.run.directory, folder),
        Watchdog(
            preemption.status,
            step_timeout=config.run.step_timeout,
            heartbeat_file=None if process.index else folder / run_lock.HEARTBEAT_FILE,
        ),
    ):
        damaged: list[pathlib.Path] = []
        while True:
            try:
                run = build.build_training(config, devices=jax.devices(), skip=damaged)
                run = dataclasses.replace(run, spec=dataclasses.replace(run.spec, loss=loss))
                run, state = trainer.train(
                    run, console, preemption=preemption, verbose=verbose, on_line=on_line
                )
                if state is None and needs_state:
                    state, _ = trainer.make_state(run)
                return run, state
            except DamagedCheckpointError as damage:
                message = resume.skip_damaged(config.run, damage)
                damaged.append(damage.path)
            if process.index == 0:
                distributed.log(message)
