"""jaxsp train CONFIG.yaml [key.path=value ...]: trains a model."""

import argparse

from jaxsp import cli
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.run import config_file


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with all problems found before the first step."""
    parser = cli.make_parser(
        "train",
        "Trains a model and writes a run directory.",
        takes="CONFIG.yaml",
        is_multi_process=True,
        verbose_help="also prints details of the run, and the traceback of an error",
    )
    text = "prints the first N records of each source and marks the tokens with a loss, without "
    text += "training; default: 1"
    parser.add_argument("--preview", metavar="N", nargs="?", const=1, type=int, help=text)
    text = "reads, tokenizes and packs the data, and prints its rows and steps, without training "
    text += "or GPUs; a run then finds the tokens in the cache"
    parser.add_argument("--prepare-data", action="store_true", help=text)
    words: list[str] = []
    for word in arguments:  # the word after --preview may be the config
        if words[-1:] == ["--preview=1"] and word.isdecimal():
            words[-1] = f"--preview={word}"
        else:
            words.append("--preview=1" if word == "--preview" else word)
    args = argparse.Namespace(**cli.parse(parser, words))
    config = config_file.load(args.config, args.changes)
    trains = args.preview is None and not args.prepare_data
    if args.process.index == 0:
        if trains:
            print(f"run        {errors.escape(config.run.directory)}", flush=True)
        config.logging.check_installed()
    if args.preview is not None and args.preview < 1:
        raise UserError(f"--preview {args.preview}: must be a number of records. Use 5.")
    # these import jax
    import rich.console

    from jaxsp.run import preview, train_command

    console = rich.console.Console(quiet=args.process.index > 0, markup=False)
    if args.preview is not None:
        preview.print_preview(config, console, num_records=args.preview)
    elif args.prepare_data:
        preview.prepare_data(config, console)
    else:
        verbose = "--verbose" in arguments
        train_command.train(config, args.process, console, path=args.config, verbose=verbose)


if __name__ == "__main__":
    cli.run_command(main)
