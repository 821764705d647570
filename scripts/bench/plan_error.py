"""Compares plans with measurements: memory and time of a step, planned over measured.

    python -m scripts.bench.step --shapes llama8b-4layers --lengths 32768 --out measured.json
    python -m scripts.bench.plan_error measured.json

Reads the results of scripts.bench.step or scripts.bench.peer_transformers, and plans each case as
`python -m jaxsp.plan` does, for the GPU that the file names. Planning needs no GPU, so this runs
on any machine with the plan extra. A plan contains an allowance for cuDNN's workspace; each line
also shows the allowance that would have been right.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxsp.core.errors import UserError
from jaxsp.memory import memory_causes
from jaxsp.planner.compile import gpus
from jaxsp.planner.planning import Plan
from scripts.bench import cases, configs, report, results
from scripts.bench.cases import Case

MODULE = "scripts.bench.plan_error"

WITHIN = 0.10
"""Relative tolerance of the planned memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanError:
    """A case, planned and measured: GiB on the device and seconds of a step."""

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
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("measured", type=pathlib.Path, metavar="MEASURED.json")
    results.add_limits(parser, case="plan")
    args = parser.parse_args(arguments)
    measured = json.loads(args.measured.read_text(encoding="utf-8"))
    device = measured["device"]
    gpu = find_gpu(device)
    if gpu is None:
        known = ", ".join(known_gpu.name for known_gpu in gpus.GPUS.values())
        print(f"{args.measured} is from {device}. Plans know {known}.", file=sys.stderr)
        return 2
    configs.prepare_to_plan()
    contents = results.open_gpu_results(MODULE, arguments, commit=args.commit)
    contents["device"] = device
    records = [record for record in measured["cases"] if record["status"] in report.FINAL]
    errors: list[PlanError] = []
    began = time.monotonic()
    for record in records:
        is_late = time.monotonic() - began > args.seconds
        result = "not planned: out of time" if is_late else plan_case(record, gpu)
        if isinstance(result, str):
            print(f"{record['shape']} {record['row_tokens']:,} {record['documents']}: {result}")
            continue
        errors.append(result)
        contents["cases"].append(dataclasses.asdict(result))
        contents["summary"] = summarize(errors)
        print(format_error(result), flush=True)
        results.write(args.out, contents)
    print(summarize(errors))
    is_within = [abs(error.ratio - 1) <= WITHIN for error in errors if error.ratio is not None]
    return int(len(errors) < len(records) or not is_within or not all(is_within))


def plan_case(record: dict[str, Any], gpu: str) -> PlanError | str:
    """Plans a measured case. Returns: the error of the plan, or the reason that there is none."""
    try:
        return compare(record, make_plan(restore_case(record), gpu))
    except UserError as error:
        return f"no plan: {error}"


def find_gpu(device: str | None) -> str | None:
    """The planner's name for a GPU with this name in JAX; None if it cannot be planned for."""
    gpu = gpus.find_by_device_kind(device) if device else None
    return next((name for name, known in gpus.GPUS.items() if known is gpu), None)


def restore_case(record: dict[str, Any]) -> Case:
    """The case of a record."""
    names = [field.name for field in dataclasses.fields(Case)]
    return Case(**{name: record[name] for name in names if name in record})


def make_plan(case: Case, gpu: str) -> Plan:
    """Plans a case on one GPU."""
    unused = pathlib.Path("unused")
    return configs.plan_config(
        cases.make_config(case, source=unused, directory=unused),
        device=gpu,
        num_devices=1,
        document_tokens=case.row_tokens // cases.NUM_DOCUMENTS[case.documents],
    )


def compare(record: dict[str, Any], plan: Plan) -> PlanError:
    """Compares a plan with a measured case."""
    allowance = plan.memory.get(memory_causes.WORKSPACE, 0.0)
    peak = record["peak_gib"]
    estimate = plan.step_s_estimate
    seconds = record["step_s"]
    return PlanError(
        shape=record["shape"],
        row_tokens=record["row_tokens"],
        documents=record["documents"],
        status=record["status"],
        message=record["message"],
        planned_gib=plan.device_gib,
        allowance_gib=allowance,
        implied_gib=None if peak is None else peak - (plan.device_gib - allowance),
        peak_gib=peak,
        ratio=None if peak is None else plan.device_gib / peak,
        planned_s=estimate,
        step_s=seconds,
        ratio_s=None if seconds is None or estimate is None else estimate / seconds,
    )


def format_error(error: PlanError) -> str:
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


def summarize(errors: Sequence[PlanError]) -> str:
    """Summarizes all cases in one line."""
    ratios = [error.ratio for error in errors if error.ratio is not None]
    if not ratios:
        return "no case has both a plan and a measured peak"
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    verdict = "within" if abs(worst - 1) <= WITHIN else "NOT within"
    words = f"planned over measured peak {min(ratios):.3f} to {max(ratios):.3f}"
    words += f": {verdict} {100 * WITHIN:.0f} %"
    seconds = [error.ratio_s for error in errors if error.ratio_s is not None]
    if seconds:
        words += f"; estimated over measured time {min(seconds):.2f} to {max(seconds):.2f}"
    missing = len(errors) - len(ratios)
    return f"{words}; {missing} of {len(errors)} cases not measured" if missing else words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
