"""jaxsp train CONFIG.yaml [key.path=value ...]: trains a model."""

import argparse
import os
import pathlib

import jax
import rich.console

from jaxsp import cli
from jaxsp.checkpoint.reader import DamagedCheckpointError
from jaxsp.core.errors import UserError
from jaxsp.processes import distributed, hardware
from jaxsp.run import jax_limits, trainer
from jaxsp.runtime import compilation_cache, run_dir, run_paths
from jaxsp.runtime.preemption import Preemption
from jaxsp.runtime.run_status import RunStatus
from jaxsp.runtime.watchdog import Watchdog
from jaxsp.setup import build, config_file, data_preparation, preview, resume
from jaxsp.storage import run_storage


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with all problems found before the first step."""
    joined: list[str] = []
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        if before == "--preview" and argument.isdecimal():
            joined[-1] = f"--preview={argument}"
        else:
            joined.append("--preview=0" if argument == "--preview" else argument)
    args = _make_parser().parse_intermixed_args(joined)
    config = config_file.load(args.config, args.changes)
    process = cli.detect_process(args)
    if process.index == 0:
        config.logging.check_installed()
    console = rich.console.Console(quiet=process.index > 0, markup=False)
    if args.preview is not None:
        if args.preview < 0:
            raise UserError(f"--preview {args.preview}: must be a number of records. Use 5.")
        preview.print_preview(config, console, num_records=args.preview or None)
        return
    if args.prepare_data:
        data_preparation.prepare_data(config, console)
        return
    jax_limits.choose_platform(config, process)
    compilation_cache.enable(config.run.compilation_cache, num_processes=process.num_processes)
    status = RunStatus()
    preemption = Preemption(config.run, status)
    with preemption.listen():
        distributed.initialize(process)
        folder = run_paths.local_dir(config.run)
        with (
            run_dir.lock(folder, config_path=args.config, name=config.run.directory),
            run_storage.open_run(config.run),
            Watchdog(
                config.run,
                status,
                has_heartbeat=process.index == 0,
                has_cpu_devices=hardware.count_gpus(os.environ) == 0 and process.num_processes == 1,
            ),
        ):
            damaged: list[pathlib.Path] = []
            while True:
                try:
                    spec, inputs = build.build_training(config, devices=jax.devices(), skip=damaged)
                    trainer.train(
                        spec, inputs, console, preemption=preemption, verbose=args.verbose
                    )
                    break
                except DamagedCheckpointError as damage:
                    message = resume.skip_damaged(config.run, damage)
                    damaged.append(damage.path)
                if process.index == 0:
                    distributed.log(message)
        preemption.mark_done()
        # Before the signal handlers are removed: a signal must not fail a run that is complete
        distributed.shutdown()


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "train",
        "Trains a model and writes a run directory.",
        config_help="fields",
        is_multi_process=True,
        verbose_help="also prints details of the run, and the traceback of an error",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--preview",
        metavar="N",
        nargs="?",
        const=0,
        type=int,
        help="prints the first N records of each source and marks the tokens with a loss, without "
        "training; default: the first record, and one of each kind of chat",
    )
    parser.add_argument(
        "--prepare-data",
        action="store_true",
        help="reads, tokenizes and packs the data, and prints its rows and steps, without training "
        "or GPUs; a run then finds the tokens in the cache",
    )
    return parser


if __name__ == "__main__":
    cli.run_command(main)
