"""jaxsp convert FILE... --gpus N: prints the config for a run of another system."""

import argparse
import pathlib

from jaxsp import cli
from jaxsp.conversion import conversion
from jaxsp.core.errors import UserError


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError"""
    args = _make_parser().parse_args(arguments)
    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus = {args.gpus}: must be at least 1.")
    print(conversion.convert(args.files, num_gpus=args.gpus), end="")


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "convert",
        "Prints the config for a run of Axolotl (YAML), TRL (YAML, a Python script with\n"
        "SFTConfig(...) or DPOConfig(...), or a shell script) or ms-swift (a shell script, or\n"
        "YAML). Scripts are parsed and never executed. What cannot be converted is named in\n"
        "comments.\n\n"
        "  jaxsp convert axolotl.yaml --gpus 8 > my.yaml",
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=pathlib.Path,
        help="config or script, and files of Accelerate or DeepSpeed that belong to it",
    )
    parser.add_argument(
        "--gpus",
        metavar="N",
        type=int,
        help="number of GPUs of the run, on which its batch depends; default: that in the files",
    )
    return parser


if __name__ == "__main__":
    cli.run_command(main)
