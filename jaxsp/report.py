"""jaxsp report RUN...: one HTML page about a run, or about several side by side."""

import pathlib

from jaxsp import cli
from jaxsp.config import yaml_io
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.reporting.report import facts, page, run_files
from jaxsp.setup import config_changes

FILE_NAME = "report.html"


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError for folders that are not runs."""
    parser = cli.make_parser(
        "report",
        "Writes one HTML page about a run, or about several side by side. The page needs no "
        "network. The run may still be running.",
    )
    text = "a run's directory"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=pathlib.Path, help=text)
    text = (
        f"file to write; default: {FILE_NAME} in the directory of one run, or in the current "
        "folder for several"
    )
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, help=text)
    args = parser.parse_args(arguments)
    runs = run_files.read_runs(args.runs)
    folder = args.runs[0] if len(args.runs) == 1 else pathlib.Path()
    out = args.out or folder / FILE_NAME
    cli.check_file(out, flag="--out")
    configs = [dict(yaml_io.flatten(run.config)) for run in runs]
    differences = facts.compare_configs(configs, is_neutral=config_changes.is_neutral)
    text = page.render(runs, differences)
    try:
        files.write_output(out, text)
    except OSError as error:
        raise UserError(
            f"--out = {out}: cannot be written: {error.strerror}. Use --out FILE with a file in "
            "another folder."
        ) from None
    print(f"-> {out} ({len(text.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    cli.run_command(main)
