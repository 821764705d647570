"""jaxsp report RUN...: one HTML page about a run, or about several side by side."""

import importlib.util
import pathlib

from jaxsp import cli
from jaxsp.core.errors import UserError


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError for folders that are not runs."""
    text = "Writes one HTML page about a run, or about several side by side. The page needs no "
    parser = cli.make_parser("report", f"{text}network. The run may still be running.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=pathlib.Path, help="run directory")
    text = "file to write; default: report.html in the directory of one run, else here"
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, help=text)
    args = parser.parse_args(arguments)
    if importlib.util.find_spec("plotly") is None:
        raise UserError("jaxsp report needs plotly. Use pip install 'jaxsp[report]'.")
    from jaxsp.run import report as page

    folder = args.runs[0] if len(args.runs) == 1 else pathlib.Path()
    out = args.out or folder / "report.html"
    runs = [page.read_run(run) for run in args.runs]
    cli.check_file(out, flag="--out")
    text = page.render(runs)
    cli.write_output(out, text, flag="--out")
    print(f"-> {out} ({len(text.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    cli.run_command(main)
