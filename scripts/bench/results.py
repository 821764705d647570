"""Command line and file of results that all benchmarks share."""

import argparse
import datetime
import json
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from scripts.bench import machine


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark's command line, with --out."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json", help="file of results")
    return parser


def add_limits(parser: argparse.ArgumentParser, *, case: str) -> None:
    """Adds --seconds and --commit, with which scripts/gpu_check.py calls its parts."""
    parser.add_argument(
        "--seconds", type=float, default=3600, help=f"no {case} starts after this time"
    )
    parser.add_argument("--commit", help="commit to record, outside of a git checkout")


def open_results(
    module: str, arguments: Sequence[str], *, commit: str | None = None, **facts: Any
) -> dict[str, Any]:
    """The content of a results file before the first case."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or machine.read_commit(),
        "command": shlex.join(["python", "-m", module, *arguments]),
        **facts,
        "cases": [],
    }


def open_gpu_results(
    module: str, arguments: Sequence[str], *, commit: str | None
) -> dict[str, Any]:
    """The content of a results file of a GPU; the first case adds device and runtime."""
    versions = {"device": None, "runtime": None, **machine.read_gpu_versions()}
    return open_results(module, arguments, commit=commit, **versions)


def write(path: pathlib.Path | None, results: dict[str, Any]) -> None:
    """Writes a results file, if one was asked for.

    Benchmarks call this after each case, so that an interrupted one keeps its results so far.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
