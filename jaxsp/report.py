"""jaxsp report RUN...: one HTML page about a run, or about several side by side."""

import argparse
import pathlib

from jaxsp import cli
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.reporting.report import page, run_files
from jaxsp.run import config_changes

FILE_NAME = "report.html"


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError for folders that are not runs."""
    args = _make_parser().parse_args(arguments)
    run_files.check_directories(args.runs)
    out = _find_output(args)
    cli.check_file(out, flag="--out")
    runs = run_files.read_runs(args.runs)
    text = page.render(runs, is_neutral=config_changes.is_neutral)
    try:
        files.write_output(out, text)
    except OSError as error:
        raise UserError(
            f"--out = {out}: cannot be written: {error.strerror}. Use --out FILE with a file in "
            "another folder."
        ) from None
    print(f"-> {out} ({len(text.encode()) / 1e6:.1f} MB)")


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "report",
        "Writes one HTML page about a run, or about several side by side. The page needs no "
        "network. The run may still be running.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=pathlib.Path, help="a run's directory"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=pathlib.Path,
        help=f"file to write; default: {FILE_NAME} in the directory of one run, or in the current "
        "folder for several",
    )
    return parser


def _find_output(args: argparse.Namespace) -> pathlib.Path:
    """Returns the file for the page."""
    if args.out is not None:
        return pathlib.Path(args.out)
    folder = args.runs[0] if len(args.runs) == 1 else pathlib.Path()
    return pathlib.Path(folder, FILE_NAME)


if __name__ == "__main__":
    cli.run_command(main)
