"""Checks the assumptions that no CPU test covers, on the GPUs of this node, most harmful first.

    python -m scripts.bench.first_hour --out scripts/bench/results/today-first.json
    python -m scripts.bench.first_hour --checks options profile

Each check runs in a process of its own, and prints its numbers beside the range that jaxsp assumes.
A check that needs more GPUs than there are is skipped, and names what is missing.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from scripts.bench import first_checks, isolation, machine, report, results
from scripts.bench.first_checks import Number

MODULE = "scripts.bench.first_hour"

SKIPPED = "skipped"

CHECK_SECONDS = 300.0
"""Time limit of a check."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A check: what it measures, and the GPUs that it needs."""

    topic: str
    measure: Callable[[pathlib.Path], list[Number]]
    min_gpus: int = 1


CHECKS = {
    "checkpoint": Check(
        topic="a checkpoint while the pool for offloaded arrays is small",
        measure=first_checks.measure_checkpoint,
    ),
    "workspace": Check(
        topic="cuDNN's workspace over the formula", measure=first_checks.measure_workspace
    ),
    "outside": Check(
        topic="memory of CUDA and NCCL outside of JAX's part",
        measure=first_checks.measure_outside,
    ),
    "pinning": Check(
        topic="pinning host memory in one process, and in one per GPU",
        measure=first_checks.measure_pinning,
    ),
    "options": Check(
        topic="XLA options that may make a step of 8,192 tokens faster",
        measure=first_checks.measure_options,
    ),
    "offload": Check(
        topic="gradients with offloaded activations, prefetched and not",
        measure=first_checks.measure_offload,
    ),
    "profile": Check(
        topic="a step of 8,192 tokens: gaps, slowdown beside NCCL, error of the plan",
        measure=first_checks.measure_profile,
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
    num_gpus = first_checks.count_gpus()
    began = time.monotonic()
    for name in args.checks:
        remaining = args.seconds - (time.monotonic() - began)
        result = run_check(name, num_gpus=num_gpus, seconds=remaining)
        contents["cases"].append({"check": name, **dataclasses.asdict(result)})
        contents["summary"] = summarize(contents["cases"])
        print("\n".join(format_check(name, result)), flush=True)
        results.write(args.out, contents)
    return int(any(not is_as_assumed(case) for case in contents["cases"]))


def run_check(name: str, *, num_gpus: int, seconds: float) -> Result:
    """Runs a check in a process of its own, for at most `seconds`."""
    needed = CHECKS[name].min_gpus
    if num_gpus < needed:
        message = f"needs {needed} GPUs, and this node has {num_gpus}"
        return Result(status=SKIPPED, message=message)
    if seconds <= 0:
        return Result(status=report.NOT_RUN, message=f"run it with --checks {name}")
    limit = min(seconds, CHECK_SECONDS)
    return isolation.run_isolated(MODULE, Case(check=name), Result, seconds=limit)


def measure(case: Case, folder: pathlib.Path) -> Result:
    """Runs a check in this process."""
    numbers = CHECKS[case.check].measure(folder)
    return Result(status=report.OK, numbers=[number._asdict() for number in numbers])


def format_check(name: str, result: Result) -> list[str]:
    """Formats a check as a line of text, and a line for each of its numbers."""
    lines = [f"{name}: {CHECKS[name].topic}"]
    if result.status != report.OK:
        lines[0] += f": {result.status}: {result.message}"
    for fields in result.numbers:
        lines.append(f"  {Number(**fields).describe()}")
    return lines


def is_as_assumed(case: dict[str, Any]) -> bool:
    """True if a check ran and its numbers are in their ranges, or if it was skipped."""
    if case["status"] == SKIPPED:
        return True
    return case["status"] == report.OK and all(
        Number(**fields).is_in_range for fields in case["numbers"]
    )


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
