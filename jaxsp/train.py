"""python -m jaxsp.train CONFIG.yaml [key.path=value ...]: trains a model."""

import argparse
import os
import pathlib

import jax
import rich.console

from jaxsp import cli
from jaxsp.checkpoint.reader import DamagedCheckpointError
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config, peft
from jaxsp.reporting.trackers import registry
from jaxsp.run import build, preview, resume, trainer
from jaxsp.runtime import (
    cluster,
    compilation_cache,
    distributed,
    hardware,
    jax_platform,
    run_dir,
    run_paths,
)
from jaxsp.runtime.cluster import Process
from jaxsp.runtime.preemption import Preemption
from jaxsp.runtime.run_status import RunStatus
from jaxsp.runtime.watchdog import Watchdog
from jaxsp.storage import copies, run_storage
from jaxsp.training import memory_formula


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with all problems found before the first step."""
    args = _make_parser().parse_intermixed_args(_join_preview(arguments))
    config = config_file.load(args.config, args.changes)
    process = cli.detect_process(args)
    if process.index == 0:
        registry.check_installed(config.logging)
    if args.preview is not None:
        console = rich.console.Console(quiet=process.index > 0, markup=False)
        preview.print_preview(config, console, num_records=args.preview or None)
        return
    jax_platform.choose_platform(
        virtual_cpu_devices=config.mesh.virtual_cpu_devices,
        num_processes=process.num_processes,
        num_local_processes=cluster.count_local_processes(process, os.environ),
        max_pool_bytes=_pinned_pool_bytes(config, process),
    )
    compilation_cache.enable(config.run.compilation_cache, num_processes=process.num_processes)
    status = RunStatus()
    folder = run_paths.local_dir(config.run)
    with Preemption(config.run, status) as preemption:
        distributed.initialize(process)
        console = rich.console.Console(quiet=process.index > 0, markup=False)
        with (
            run_dir.lock(folder, config_path=args.config, name=config.run.directory),
            run_storage.open_run(config.run),
            Watchdog(
                config.run,
                status,
                has_heartbeat=process.index == 0,
                has_cpu_devices=hardware.count_gpus(os.environ) == 0,
            ),
        ):
            damaged: list[pathlib.Path] = []
            while True:
                try:
                    program, inputs = build.build_training(
                        config, devices=jax.devices(), skip=damaged
                    )
                    trainer.train(
                        program, inputs, console, preemption=preemption, verbose=args.verbose
                    )
                    break
                except DamagedCheckpointError as damage:
                    if copies.fetch_again(damage.path):
                        continue
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
        documents_fields=True,
        is_multi_process=True,
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--preview",
        metavar="N",
        type=int,
        help="prints what is learned of each source's first N records, or of one record of each "
        "kind, and trains nothing",
    )
    return parser


def _join_preview(arguments: list[str]) -> list[str]:
    """Joins --preview and its number; without one it is 0, also before key.path=value."""
    joined: list[str] = []
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        if before == "--preview" and argument.isdecimal():
            joined[-1] = f"--preview={argument}"
        else:
            joined.append("--preview=0" if argument == "--preview" else argument)
    return joined


def _pinned_pool_bytes(config: Config, process: Process) -> int | None:
    """Size of XLA's pool of pinned host memory for each GPU.

    None if nothing is offloaded, if the model cannot be read yet, or if mesh.seq is `auto`. The
    size must be set before JAX initializes its devices, so this is a formula with a margin.
    """
    memory = config.memory
    num_gpus = hardware.count_gpus(os.environ)
    if not num_gpus or memory.offload_activations == memory.offload_optimizer == "none":
        return None
    if config.mesh.seq == "auto":
        return None
    try:
        fields, field = model_config.read_fields(config.model)
        model = model_config.parse_model_config(
            fields, field=field, row_tokens=config.data.max_row_tokens
        )
        model = peft.resolve(config.adapter, model).model
    except UserError:
        # A resumed run reads the model from its checkpoint. Otherwise the error is reported later,
        # with all others.
        return None
    num_local = cluster.count_local_processes(process, os.environ)
    num_devices = process.num_processes * max(1, num_gpus // num_local)
    num_shards = max(1, num_devices // config.mesh.replica)
    return max(
        memory_formula.pool_bytes(
            memory_formula.offloaded_bytes(
                model, config.with_row_tokens(row_tokens), num_shards=num_shards
            )
        )
        for row_tokens in config.data.row_lengths
    )


if __name__ == "__main__":
    cli.run_command(main)
