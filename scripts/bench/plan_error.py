"""Compares plans with measurements: memory and time of a step, planned over measured.

    python -m scripts.bench.step --shapes llama8b-4layers --lengths 32768 --out measured.json
    python -m scripts.bench.plan_error measured.json

Reads the results of scripts.bench.step or scripts.bench.peer_transformers, and plans each case as
`python -m jaxsp.plan` does, for the GPU that the file names. Planning needs no GPU, so this runs
on any machine with the plan extra. A plan contains an allowance for cuDNN's workspace; each line
also shows the allowance that would have been right.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxsp.core.errors import UserError
from jaxsp.hf import families
from jaxsp.planner import planning
from jaxsp.planner.compile import compiled, gpus, memory
from jaxsp.planner.planning import Plan
from scripts.bench import report, step

MODULE = "scripts.bench.plan_error"

WITHIN = 0.10
"""Relative tolerance of the planned memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """A case, planned and measured: GiB on the device, seconds of a step."""

    shape: str
    row_tokens: int
    documents: str
    status: str
    """Status of the measurement."""
    message: str | None
    planned_gib: float
    allowance_gib: float
    """Part of planned_gib: the plan's allowance for cuDNN's workspace."""
    implied_gib: float | None
    """The allowance with which the plan would equal the measured peak."""
    peak_gib: float | None
    ratio: float | None
    """Planned over measured."""
    planned_s: float | None
    step_s: float | None
    ratio_s: float | None


def main(arguments: list[str]) -> int:
    """Runs the command.

    Returns: 1 if a plan is missing or off by more than WITHIN, 2 for a GPU that plans do not know.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measured", type=pathlib.Path, metavar="MEASURED.json")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="no plan starts after this time"
    )
    parser.add_argument("--commit", help="commit to record, outside of a git checkout")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    measured = json.loads(given.measured.read_text(encoding="utf-8"))
    kind = gpu_kind(measured["device"])
    if kind is None:
        known = ", ".join(gpu.name for gpu in gpus.GPUS.values())
        device = measured["device"]
        print(f"{given.measured} is from {device}. Plans know {known}.", file=sys.stderr)
        return 2
    # planning must not take the memory of a GPU that is here
    jax.config.update("jax_platforms", "cpu")
    # it reads files that XLA writes while it compiles: a program from the cache has none
    jax.config.update("jax_enable_compilation_cache", False)
    found = step.opened(MODULE, arguments, given.commit) | {"device": measured["device"]}
    ended = [case for case in measured["cases"] if case["status"] in report.FINAL]
    results: list[Error] = []
    began = time.monotonic()
    for came in ended:
        is_late = time.monotonic() - began > given.seconds
        result = "not planned: out of time" if is_late else plan_case(came, kind)
        if isinstance(result, str):
            print(f"{came['shape']} {came['row_tokens']:,} {came['documents']}: {result}")
            continue
        results.append(result)
        found["cases"].append(dataclasses.asdict(result))
        found["summary"] = summary(results)
        print(line(result), flush=True)
        step.write(given.out, found)
    print(summary(results))
    near = [abs(error.ratio - 1) <= WITHIN for error in results if error.ratio is not None]
    return int(len(results) < len(ended) or not near or not all(near))


def plan_case(came: dict[str, Any], kind: str) -> Error | str:
    """Plans a measured case. Returns: the error of the plan, or the reason that there is none."""
    try:
        return compared(came, planned(case_of(came), kind))
    except UserError as error:
        return f"no plan: {error}"


def gpu_kind(device: str | None) -> str | None:
    """The planner's name of a GPU by JAX's; None if it cannot be planned for."""
    gpu = gpus.find_by_device_kind(device) if device else None
    return next((name for name, other in gpus.GPUS.items() if other is gpu), None)


def case_of(came: dict[str, Any]) -> step.Case:
    """Restores the case of a record."""
    names = [field.name for field in dataclasses.fields(step.Case)]
    return step.Case(**{name: came[name] for name in names if name in came})


def planned(case: step.Case, kind: str) -> Plan:
    """Plans a case on one GPU of a kind."""
    nowhere = pathlib.Path("unused")
    config = step.settings_of(case, source=nowhere, directory=nowhere)
    model = families.parse_model_config(step.SHAPES[case.shape], field=case.shape)
    return planning.plan_step(
        config,
        model=model,
        cluster=compiled.make_cluster(kind, 1),
        document_tokens=case.row_tokens // step.NUM_PIECES[case.documents],
    )


def compared(came: dict[str, Any], plan: Plan) -> Error:
    """Compares a plan with a measured case."""
    allowance, peak = plan.memory[memory.CUDNN_WORKSPACE], came["peak_gib"]
    estimate, seconds = plan.step_s_estimate, came["step_s"]
    return Error(
        shape=came["shape"],
        row_tokens=came["row_tokens"],
        documents=came["documents"],
        status=came["status"],
        message=came["message"],
        planned_gib=plan.device_gib,
        allowance_gib=allowance,
        implied_gib=None if peak is None else peak - (plan.device_gib - allowance),
        peak_gib=peak,
        ratio=None if peak is None else plan.device_gib / peak,
        planned_s=estimate,
        step_s=seconds,
        ratio_s=None if seconds is None or estimate is None else estimate / seconds,
    )


def line(error: Error) -> str:
    """Formats a case as a line of text."""
    words = f"{error.shape:<16} {error.row_tokens:>7,} {error.documents:<6}"
    words += f"  planned {error.planned_gib:6.2f} GiB"
    if error.ratio is None or error.peak_gib is None or error.implied_gib is None:
        reason = error.message or "the device reports no peak"
        return f"{words}, not measured: {error.status}: {reason}"
    words += f", measured {error.peak_gib:6.2f}: {error.ratio:.3f}"
    words += f"; cuDNN's allowance {error.allowance_gib:.2f}, implied {error.implied_gib:.2f}"
    if error.ratio_s is not None:
        words += f"; {error.planned_s:.3g} s estimated, {error.step_s:.3g} measured"
        words += f": {error.ratio_s:.2f}"
    return words


def summary(found: Sequence[Error]) -> str:
    """Summarizes all cases in one line."""
    ratios = [error.ratio for error in found if error.ratio is not None]
    if not ratios:
        return "no case has both a plan and a measured peak"
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    verdict = "within" if abs(worst - 1) <= WITHIN else "NOT within"
    words = f"planned over measured peak {min(ratios):.3f} to {max(ratios):.3f}"
    words += f": {verdict} {100 * WITHIN:.0f} %"
    seconds = [error.ratio_s for error in found if error.ratio_s is not None]
    if seconds:
        words += f"; estimated over measured time {min(seconds):.2f} to {max(seconds):.2f}"
    missing = len(found) - len(ratios)
    return f"{words}; {missing} of {len(found)} cases not measured" if missing else words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
