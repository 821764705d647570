"""jaxsp plan CONFIG.yaml [key.path=value ...]

Plans memory, traffic and time of a run on absent GPUs.
"""

import argparse
import math
import pathlib
import re

from jaxsp import cli
from jaxsp.core.errors import ProblemCollector
from jaxsp.planning import gpus
from jaxsp.run import config_file

_NUMBERS = {
    "--devices": (
        "N",
        int,
        "number of GPUs; default: the product of the mesh, with data=-1 filling a node of 8",
    ),
    "--node-devices": ("N", int, "GPUs per node; default: 8, or all if there are fewer"),
    "--host-gib": ("GIB", float, "host memory of a node; default: 250 per GPU"),
    "--document-tokens": (
        "N",
        int,
        "length of the documents that fill a row, for the time; default: the whole row",
    ),
    "--tokens": (
        "N",
        float,
        "tokens to train on, such as 10e9, for GPU-hours and days; default: all steps",
    ),
}
"""Flags with a positive number: metavar, type and help."""

_DEVICE_TYPE = re.compile(r"[a-z]+\d[\w-]*")
"""Matches names of GPUs, known or not, and neither file.yaml nor key.path=value."""


def main(arguments: list[str]) -> None:
    """Runs the command.

    Raises: UserError for what training would refuse, and for conflicting flags.
    """
    given = parse_arguments(arguments)
    config = config_file.load(given.config, given.changes)
    from jaxsp import plan_modes  # imports jax

    plan_modes.run(given, config)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line.

    Raises: UserError for invalid numbers and conflicting flags.
    """
    parser = cli.make_parser(
        "plan",
        "Compiles a config's training step for absent GPUs, and prints its memory, traffic and "
        "estimated time.",
        config_help="fields",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--device",
        metavar="KIND [KIND ...]",
        action="append",
        help=f"one or more of {', '.join(gpus.GPUS)} (default: h100-80gb); compares several in a "
        "table",
    )
    for flag, (metavar, number, text) in _NUMBERS.items():
        parser.add_argument(flag, metavar=metavar, type=number, help=text)
    parser.add_argument(
        "--data",
        action="store_true",
        help="reads data.train, and prints its rows and steps, from which the cost follows",
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--longest", action="store_true", help="finds the longest row that fits")
    question.add_argument(
        "--meshes",
        action="store_true",
        help="plans every mesh of these devices, and ranks them",
    )
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="writes the plan as JSON")
    # Rewrites `--device a100 h100` to `--device a100 --device h100`
    words: list[str] = []
    for word in arguments:
        if words[-2:-1] == ["--device"] and _DEVICE_TYPE.fullmatch(word):
            words.append("--device")
        words.append(word)
    given = parser.parse_intermixed_args(words)
    values = {f"--{name.replace('_', '-')}": value for name, value in vars(given).items()}
    problems = ProblemCollector(
        f"{flag} = {values[flag]}: must be greater than 0 and finite. Use 1 or more."
        for flag in _NUMBERS
        if values[flag] is not None and not 0 < values[flag] < math.inf
    )
    if len(given.device or ()) > 1:
        problems += [
            f"{flag}: needs one type of GPU. Use one --device, or leave {flag} out."
            for flag in ("--longest", "--meshes")
            if values[flag]
        ]
    if given.longest and given.document_tokens is not None:
        problems.append(
            "--document-tokens: must not be set with --longest, whose rows are one document. "
            "Leave it out."
        )
    if given.json:
        with problems.collect():
            cli.check_file(given.json, flag="--json")
    problems.raise_if_any()
    return given


if __name__ == "__main__":
    cli.run_command(main)
