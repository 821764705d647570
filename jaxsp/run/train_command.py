"""Work of the command `jaxsp train`."""

import os
import pathlib

import jax
import rich.console

from jaxsp.checkpoint import run_paths
from jaxsp.checkpoint.reader import DamagedCheckpointError
from jaxsp.run import build, jax_limits, resume, stored_run, trainer
from jaxsp.run.config_file import Config
from jaxsp.system import compilation_cache, distributed, hardware, run_lock
from jaxsp.system.cluster import Process
from jaxsp.system.preemption import Preemption
from jaxsp.system.run_status import RunStatus
from jaxsp.system.watchdog import Watchdog


def train(
    config: Config,
    process: Process,
    console: rich.console.Console,
    *,
    path: str,
    verbose: bool,
) -> None:
    """Trains a config, from the latest checkpoint that is whole.

    Raises: UserError with all problems found before the first step.
    """
    jax_limits.choose_platform(config, process)
    compilation_cache.enable(config.run.compilation_cache, num_processes=process.num_processes)
    status = RunStatus()
    preemption = Preemption(
        status,
        shutdown_grace=config.run.shutdown_grace,
        stop_after=config.run.stop_after,
        describe_loss=lambda last: run_paths.describe_lost_steps(config.run.local_dir, last),
    )
    with preemption.listen():
        distributed.initialize(process)
        folder = config.run.local_dir
        with (
            run_lock.lock(folder, config_path=path, name=config.run.directory),
            stored_run.open_run(config.run.directory, folder),
            Watchdog(
                status,
                step_timeout=config.run.step_timeout,
                heartbeat_file=None if process.index else folder / run_lock.HEARTBEAT_FILE,
                has_cpu_devices=hardware.count_gpus(os.environ) == 0 and process.num_processes == 1,
            ),
        ):
            damaged: list[pathlib.Path] = []
            while True:
                try:
                    run = build.build_training(config, devices=jax.devices(), skip=damaged)
                    trainer.train(run, console, preemption=preemption, verbose=verbose)
                    break
                except DamagedCheckpointError as damage:
                    message = resume.skip_damaged(config.run, damage)
                    damaged.append(damage.path)
                if process.index == 0:
                    distributed.log(message)
        preemption.mark_done()
        # Before the signal handlers are removed: a signal must not fail a run that is complete
        distributed.shutdown()
