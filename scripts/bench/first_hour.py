"""Checks the assumptions that no CPU test covers, on the GPUs of this node, most harmful first.

    python -m scripts.bench.first_hour --out scripts/bench/results/today-first.json
    python -m scripts.bench.first_hour --checks options profile

Each check runs in a process of its own, and prints each number when it is measured, beside the
range that jaxsp assumes.
"""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from scripts.bench import first_checks, isolation, machine, report, results
from scripts.bench.first_checks import Number

MODULE = "scripts.bench.first_hour"

CHECK_SECONDS = 300.0
"""Time limit of a check."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A check, and what it measures."""

    topic: str
    measure: Callable[[pathlib.Path], Iterable[Number]]


CHECKS = {
    "checkpoint": Check(
        topic="a checkpoint while the pool for offloaded arrays is small",
        measure=first_checks.measure_checkpoint,
    ),
    "offload": Check(
        topic="gradients with offloaded activations, prefetched and not",
        measure=first_checks.measure_offload,
    ),
    "outside": Check(
        topic="memory of CUDA and NCCL outside of JAX's part",
        measure=first_checks.measure_outside,
    ),
    "pinning": Check(
        topic="pinning host memory in one process, and in one per GPU",
        measure=first_checks.measure_pinning,
    ),
    "workspace": Check(
        topic="cuDNN's workspace over the formula", measure=first_checks.measure_workspace
    ),
    "profile": Check(
        topic="a step of 8,192 tokens: gaps, slowdown beside NCCL, error of the plan",
        measure=first_checks.measure_profile,
    ),
    "options": Check(
        topic="XLA options that may make a step of 8,192 tokens faster",
        measure=first_checks.measure_options,
    ),
}
"""In this order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A check to run in a process of its own."""

    check: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Numbers of a check, as fields of Number."""

    status: str
    message: str | None = None
    numbers: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Runs the command. Returns: 1 if a check failed or a number is out of range, 2 without GPU."""
    parser = results.make_parser(MODULE, __doc__)
    results.add_limits(parser, case="check")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    args = parser.parse_args(arguments)
    problem = machine.find_gpu_problem()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    contents = results.open_gpu_results(MODULE, arguments, commit=args.commit)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(machine.REPO / "build" / "jax_cache"))
    began = time.monotonic()
    for name in args.checks:
        remaining = args.seconds - (time.monotonic() - began)
        result = run_check(name, seconds=remaining)
        contents["cases"].append({"check": name, **dataclasses.asdict(result)})
        contents["summary"] = summarize(contents["cases"])
        print("\n".join(format_check(name, result)), flush=True)
        results.write(args.out, contents)
    return int(any(not is_as_assumed(case) for case in contents["cases"]))


def run_check(name: str, *, seconds: float) -> Result:
    """Runs a check in a process of its own, for at most `seconds`."""
    if seconds <= 0:
        return Result(status=report.NOT_RUN, message=f"run it with --checks {name}")
    limit = min(seconds, CHECK_SECONDS)
    return isolation.run_isolated(MODULE, Case(check=name), Result, seconds=limit)


def measure(case: Case, folder: pathlib.Path) -> Result:
    """Runs a check in this process."""
    numbers = []
    for number in CHECKS[case.check].measure(folder):
        print(f"  {number.describe()}", flush=True)
        numbers.append(number._asdict())
    return Result(status=report.OK, numbers=numbers)


def format_check(name: str, result: Result) -> list[str]:
    """Formats a check as a line of text, and a line for each of its numbers."""
    lines = [f"{name}: {CHECKS[name].topic}"]
    if result.status != report.OK:
        lines[0] += f": {result.status}: {result.message}"
    for fields in result.numbers:
        lines.append(f"  {Number(**fields).describe()}")
    return lines


def is_as_assumed(case: dict[str, Any]) -> bool:
    """True if a check ran and measured numbers that are in their ranges."""
    numbers = [Number(**fields) for fields in case["numbers"]]
    return case["status"] == report.OK and bool(numbers) and all(x.is_in_range for x in numbers)


def summarize(cases: list[dict[str, Any]]) -> str:
    """Summarizes the checks in one line."""
    words = []
    for case in cases:
        verdict = "as assumed" if is_as_assumed(case) else "NOT as assumed"
        if case["status"] != report.OK:
            verdict = case["status"]
        words.append(f"{case['check']} {verdict}")
    return ", ".join(words)


if __name__ == "__main__":
    isolation.start(main, Case, measure)
