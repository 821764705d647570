"""jaxsp score CONFIG.yaml [key.path=value ...]: writes a teacher's predictions for the data."""

import argparse

from jaxsp import cli
from jaxsp.run import config_file


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with the problems of the input."""
    parser = cli.make_parser(
        "score",
        "Writes the predictions of objective.teacher for all documents of data.train and data.eval "
        "into the folder\nobjective.predictions. Training with the same config then reads them. "
        "An interrupted command continues where it ended.",
        takes="CONFIG.yaml",
        is_multi_process=True,
    )
    args = argparse.Namespace(**cli.parse(parser, arguments))
    config = config_file.load(args.config, args.changes)
    # these import jax
    import rich.console

    from jaxsp.run import score_command

    console = rich.console.Console(quiet=args.process.index > 0, markup=False)
    score_command.score(config, args.process, console)


if __name__ == "__main__":
    cli.run_command(main)
