"""jaxsp train CONFIG.yaml [key.path=value ...]: trains a model."""

import argparse

from jaxsp import cli
from jaxsp.core import errors
from jaxsp.run import config_file
from jaxsp.system import cluster


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
    process = cluster.read_arguments(args)
    if process.index == 0 and args.preview is None and not args.prepare_data:
        print(f"run        {errors.escape(config.run.directory)}", flush=True)
    from jaxsp.run import train_command  # imports jax

    train_command.train(args, config, process)


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
