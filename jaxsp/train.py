"""python -m jaxsp.train CONFIG.yaml [key.path=value ...]: trains, and says what it does."""

import os
import pathlib

import jax
import rich.console

from jaxsp import cli, example, prepare, resume
from jaxsp.core import config, jobs, processes
from jaxsp.core import mesh as meshes
from jaxsp.training import checkpoint, directory, pace, stopping, trainer, watchdog


def main(arguments: list[str]) -> None:
    """The command. Raises: UserError with every problem that can be found before the first step."""
    parser = cli.parser("train", "Trains a model and writes a run directory.", fields=True, several=True)
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("changes", metavar="key.path=value", nargs="*", default=[], help="changes a field of the config")
    parser.add_argument(
        "--show-example", action="store_true", help="prints what is learned of each source's first record, and trains nothing"
    )
    parser.add_argument("--verbose", action="store_true", help="says who gets which rows of the first step")
    given = parser.parse_intermixed_args(arguments)
    settings = config.load(given.config, given.changes)
    process = cli.process(given)
    if given.show_example:
        example.show(settings, rich.console.Console(quiet=process.index > 0, markup=False))
        return
    meshes.choose_platform(
        virtual_cpu_devices=settings.mesh.virtual_cpu_devices,
        num_processes=process.num_processes,
        num_local=jobs.num_local(process, os.environ),
    )
    now, folder = pace.Pace(), pathlib.Path(settings.run.directory)
    with stopping.Stopping(settings.run, now) as stop:
        processes.start(process)
        console = rich.console.Console(quiet=process.index > 0, markup=False)
        with directory.hold(folder, asked=given.config), watchdog.Watchdog(settings.run, now, beats=process.index == 0):
            damaged: list[pathlib.Path] = []
            while True:
                try:
                    program, material = prepare.training(settings, devices=jax.devices(), damaged=damaged)
                    trainer.train(program, material, console, stop=stop, verbose=given.verbose)
                    break
                except checkpoint.Damaged as damage:
                    words = resume.retreat(settings.run, damage)
                    damaged.append(damage.path)
                if process.index == 0:
                    processes.say(words)
        stop.over()
        processes.end()  # while a signal still means that all is well


if __name__ == "__main__":
    cli.run(main)
