"""Runs one stage of tests and measurements on an NVIDIA GPU, in at most 8 minutes.

    scripts/gpu_check.sh kernels
    scripts/gpu_check.sh memory --out results --commit 1a2b3c

scripts/README.md describes the stages.

A stage that is interrupted keeps its results so far. Files are named DATE-GPU-STAGE in
scripts/bench/results/: `.json` (versions, and each part's exit code, duration and summary), `.txt`
(all output), and a `.json` or JUnit `.xml` per part. At its end, a stage adds a line to
scripts/bench/LOG.md. With --out FOLDER, all of this is written to FOLDER instead. JAX's compilation
cache, in build/jax_cache, is kept between stages.

Exit code: 0 success, 1 if a part failed or ran out of time, 2 without a GPU or for an invalid
command.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO
from xml.etree import ElementTree

from scripts.bench import machine, report
from scripts.gpu_stages import SECONDS, STAGES, Part

KILL_AFTER_S = 15
"""Seconds from the interruption of a part to SIGKILL."""

LEAST_S = 20
"""A part does not start with less time than this."""

BENCH_LOG = pathlib.Path("scripts/bench/LOG.md")


def main(arguments: Sequence[str]) -> int:
    """Runs the command."""
    began = time.monotonic()
    stages = "\n".join(f"  {name:<8} {stage.topics}" for name, stage in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", nargs="?", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    for option, metavar, text in (
        ("--out", "FOLDER", "folder for all results and the line of LOG.md"),
        ("--resume", "TABLE.json", "with speed: continues an earlier table"),
    ):
        parser.add_argument(option, type=pathlib.Path, metavar=metavar, help=text)
    parser.add_argument(
        "--commit", metavar="NAME", help="commit to record, outside of a git checkout"
    )
    args = parser.parse_args(arguments)
    if args.stage is None:
        print(f"Name a stage: scripts/gpu_check.sh STAGE\n{stages}", file=sys.stderr)
        return 2
    if args.resume and not any(part.is_resumable for part in STAGES[args.stage].parts):
        print(f"--resume: {args.stage} has no table. Use it with speed.", file=sys.stderr)
        return 2
    # SIGTERM raises KeyboardInterrupt, so that processes started here are ended too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update(JAX_PLATFORMS="cuda", PYTHONUNBUFFERED="1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(machine.REPO / "build" / "jax_cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    facts = read_machine_facts()
    if facts is None:
        return 2
    if args.resume:
        device = json.loads(args.resume.read_text(encoding="utf-8"))["device"]
        if device not in (None, facts["device"]):
            print(f"--resume: {args.resume} is from {device}, not this GPU.", file=sys.stderr)
            return 2
    return run_stage(args.stage, args, facts, until=began + SECONDS)


def read_machine_facts() -> dict[str, str] | None:
    """Returns the facts that scripts.bench.machine prints.

    Without a GPU, prints the reason and returns None.
    """
    command = [sys.executable, "-m", "scripts.bench.machine"]
    try:
        done = subprocess.run(
            command,
            cwd=machine.REPO,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print("JAX did not find its devices within 120 s.", file=sys.stderr)
        return None
    if done.returncode:
        return None
    print(done.stdout, end="", flush=True)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return dict(lines)


def run_stage(name: str, args: argparse.Namespace, facts: dict[str, str], *, until: float) -> int:
    """Runs a stage's parts one after another, each within its time limit.

    Returns: the exit code.
    """
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H%M")
    gpu = re.sub("[^a-z0-9]+", "-", facts["device"].removeprefix("NVIDIA ").lower()).strip("-")
    folder = args.out or machine.REPO / "scripts" / "bench" / "results"
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"{when}-{gpu}-{name}"
    if args.commit:
        facts = facts | {"commit": args.commit}
    index: dict[str, Any] = {"date": when, "stage": name, **facts, "parts": []}
    with open(f"{base}.txt", "w", encoding="utf-8") as log:
        for part in STAGES[name].parts:
            seconds = min(part.seconds, until - time.monotonic())
            outcome = run_part(part, base, args, seconds=seconds, log=log)
            index["parts"].append(dataclasses.asdict(outcome))
            text = json.dumps(index, indent=1) + "\n"
            pathlib.Path(f"{base}.json").write_text(text, encoding="utf-8")
    parts = "; ".join(f"{part['name']}: {part['summary']}" for part in index["parts"])
    versions = f"driver {facts['driver']}, jax {facts['jax']}, cuDNN {facts['cudnn_loaded']}"
    link = f"[results](results/{base.name}.json)"
    line = f"- {when}, {facts['device']}, {facts['commit']}, {versions}, {name}: {parts} ({link})"
    print(line)
    bench_log = folder / BENCH_LOG.name if args.out else machine.REPO / BENCH_LOG
    with open(bench_log, "a", encoding="utf-8") as lines:
        lines.write(f"{line}\n")
    return int(any(part["status"] != report.OK for part in index["parts"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a part."""

    name: str
    command: list[str]
    status: str
    """report.OK, FAILED, TIMED_OUT or NOT_RUN."""
    exit_code: int | None
    seconds: float
    summary: str
    """The results in one line."""


def run_part(
    part: Part,
    base: pathlib.Path,
    args: argparse.Namespace,
    *,
    seconds: float,
    log: TextIO,
) -> Outcome:
    """Runs a part for at most `seconds`."""
    results = pathlib.Path(f"{base}-{part.name}.{'xml' if part.is_tests else 'json'}")
    words = list(part.arguments)
    if part.is_tests:
        words += [f"--junitxml={results}"]
    else:
        words += ["--out", str(results), "--seconds", f"{max(seconds - part.case_seconds, 0):.0f}"]
        if args.commit:
            words += ["--commit", args.commit]
        if args.resume and part.is_resumable:
            words += ["--resume", str(args.resume.resolve())]
    command = [sys.executable, "-m", part.module, *words]
    began = time.monotonic()
    code = None
    status = report.NOT_RUN
    if seconds >= LEAST_S:
        _log(f"== {part.name}: python {' '.join(command[1:])}", log)
        code = run(command, seconds, log)
        status = {0: report.OK, None: report.TIMED_OUT}.get(code, report.FAILED)
    elapsed = time.monotonic() - began
    summary = _summarize(results) if results.exists() else "no results"
    if part.is_tests and summary.startswith("0 passed"):
        status = report.FAILED  # all tests were skipped
    return Outcome(
        name=part.name,
        command=command,
        status=status,
        exit_code=code,
        seconds=elapsed,
        summary=summary if status == report.OK else f"{summary} ({status})",
    )


def run(command: Sequence[str], seconds: float, log: TextIO) -> int | None:
    """Runs a command, and copies its output to the log.

    Returns: the exit code, None if it ran out of time.
    """
    limit = ["timeout", "--signal=INT", f"--kill-after={KILL_AFTER_S}", f"{seconds:.0f}"]
    with subprocess.Popen(
        [*limit, *command],
        cwd=machine.REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _log(line.rstrip("\n"), log)
        except KeyboardInterrupt:
            process.terminate()  # `timeout` passes it on
            raise
    return None if process.returncode in (124, 137) else process.returncode


def _summarize(results: pathlib.Path) -> str:
    if results.suffix == ".json":
        contents = json.loads(results.read_text(encoding="utf-8"))
        return contents.get("summary") or report.summarize(contents)
    (suite,) = ElementTree.parse(results).getroot()
    names = {"failures": "failed", "errors": "errors", "skipped": "skipped"}
    counts = {text: int(suite.get(name, 0)) for name, text in names.items()}
    words = [f"{int(suite.get('tests', 0)) - sum(counts.values())} passed"]
    words += [f"{count} {text}" for text, count in counts.items() if count]
    return f"{', '.join(words)} in {float(suite.get('time', 0)):.0f} s"


def _log(line: str, log: TextIO) -> None:
    print(line, flush=True)
    log.write(f"{line}\n")
    log.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
