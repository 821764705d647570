"""Work of the command `jaxsp train`."""

import argparse
import os
import pathlib

import jax
import rich.console

from jaxsp.checkpoint import run_paths
from jaxsp.checkpoint.reader import DamagedCheckpointError
from jaxsp.core.errors import UserError
from jaxsp.run import build, data_sets, jax_limits, preview, resume, stored_run, trainer
from jaxsp.run.config_file import Config
from jaxsp.system import compilation_cache, distributed, hardware, run_lock
from jaxsp.system.cluster import Process
from jaxsp.system.preemption import Preemption
from jaxsp.system.run_status import RunStatus
from jaxsp.system.watchdog import Watchdog


def train(args: argparse.Namespace, config: Config, process: Process) -> None:
    """Trains a config. Raises: UserError with all problems found before the first step."""
    if process.index == 0:
        config.logging.check_installed()
    console = rich.console.Console(quiet=process.index > 0, markup=False)
    if args.preview is not None:
        if args.preview < 0:
            raise UserError(f"--preview {args.preview}: must be a number of records. Use 5.")
        preview.print_preview(config, console, num_records=args.preview or None)
        return
    if args.prepare_data:
        data_sets.prepare_data(config, console)
        return
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
            run_lock.lock(folder, config_path=args.config, name=config.run.directory),
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
                    trainer.train(run, console, preemption=preemption, verbose=args.verbose)
                    break
                except DamagedCheckpointError as damage:
                    message = resume.skip_damaged(config.run, damage)
                    damaged.append(damage.path)
                if process.index == 0:
                    distributed.log(message)
        preemption.mark_done()
        # Before the signal handlers are removed: a signal must not fail a run that is complete
        distributed.shutdown()
