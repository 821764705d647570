"""How near plans come: memory and time of a step as `python -m jaxsp.plan` says, over what the GPU that is here measures.

    python -m scripts.bench.plan_error --out scripts/bench/results/today-plan-error.json

Each case is a step of scripts.bench.step, planned without the GPU and then run on it, in a process of its own. What cuDNN takes
beside the compiled program is an allowance in the plan; what it has to be for the peak to come out is said for each case.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

import jax

from jaxsp.core import jobs
from jaxsp.hf import families
from jaxsp.planner import budget, compiled, gpus, plans
from scripts.bench import report, step

CASES = (
    step.Case(shape="llama8b-2layers", row_tokens=32768, documents="packed", kernel="auto", steps=3),
    step.Case(shape="llama8b-2layers", row_tokens=65536, documents="one", kernel="auto", steps=3),
    step.Case(shape="qwen3-0.6b", row_tokens=32768, documents="packed", kernel="auto", steps=3),
)
"""Packed and not, K/V heads shared by four query heads and by two, a head larger than a layer and not."""

WITHIN = 0.10
"""How far a plan may be from the measured peak, relative."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """A case, planned and measured; GiB of the device, seconds of a step."""

    shape: str
    row_tokens: int
    documents: str
    status: str
    message: str | None
    planned_gib: float
    allowance_gib: float
    """Of that, what the plan allows for cuDNN;"""
    implied_gib: float | None
    """and what would have been right."""
    peak_gib: float | None
    ratio: float | None
    """Planned over measured."""
    planned_s: float | None
    step_s: float | None
    ratio_s: float | None


def main(arguments: list[str]) -> int:
    """The command; 1 if a plan is further off than WITHIN, or a case failed; 2 without a GPU that can be planned for."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.plan_error", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case-seconds", type=float, default=200, help="a case that takes longer is ended")
    parser.add_argument("--commit", help="for the file, where this is no git repository")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    if not jobs.num_gpus({}):
        print("There is no NVIDIA GPU here: /dev/nvidia0 is missing. Use a machine with one.", file=sys.stderr)
        return 2
    # planning needs no GPU, and must not hold the memory of the one that is here
    jax.config.update("jax_platforms", "cpu")
    found, errors = step.opened("scripts.bench.plan_error", arguments, given.commit), list[Error]()
    for case in CASES:
        measured = step.apart(case, seconds=given.case_seconds)
        if measured.device is None:  # it was ended, or failed before it had looked
            found["cases"].append(dataclasses.asdict(case) | {"status": measured.status, "message": measured.message})
            print(f"{case.shape} {case.row_tokens}: {measured.status}: {measured.message}", flush=True)
            step.write(given.out, found)
            continue
        gpu = gpus.of_kind(measured.device)
        if gpu is None:
            known = ", ".join(one.name for one in gpus.KINDS.values())
            print(f"{measured.device}: is none of {known}.", file=sys.stderr)
            return 2
        kind = next(name for name, one in gpus.KINDS.items() if one is gpu)
        found["device"] = measured.device
        error = compared(case, planned(case, kind), measured)
        found["cases"].append(dataclasses.asdict(error))
        print(line(error), flush=True)
        step.write(given.out, found)
        errors.append(error)
    print(summary(errors))
    near = [error.ratio is not None and abs(error.ratio - 1) <= WITHIN for error in errors]
    return int(len(near) < len(CASES) or not all(near))


def planned(case: step.Case, kind: str) -> plans.Plan:
    """The plan of a case on one such GPU."""
    nowhere = pathlib.Path("unused")
    settings = step.settings_of(case, source=nowhere, directory=nowhere)
    model = families.model_config(step.SHAPES[case.shape], field=case.shape)
    return plans.of(
        settings,
        model=model,
        site=compiled.site(kind, 1),
        document_tokens=case.row_tokens // step.NUM_PIECES[case.documents],
    )


def compared(case: step.Case, plan: plans.Plan, measured: step.Result) -> Error:
    """A plan beside what was measured."""
    allowance, peak = plan.memory[budget.WORKSPACE], measured.peak_gib
    estimate, seconds = plan.step_s_estimate, measured.step_s
    return Error(
        shape=case.shape,
        row_tokens=case.row_tokens,
        documents=case.documents,
        status=measured.status,
        message=measured.message,
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
    """A case as a line of text."""
    asked = f"{error.shape:<16} {error.row_tokens:>7,} {error.documents:<6}  planned {error.planned_gib:6.2f} GiB"
    if error.ratio is None or error.peak_gib is None or error.implied_gib is None:
        return f"{asked}, not measured: {error.status}: {error.message or 'the device does not say what it had in use'}"
    words = (
        f"{asked}, measured {error.peak_gib:6.2f}: {error.ratio:.3f}; cuDNN's allowance {error.allowance_gib:.2f}, "
        f"implied {error.implied_gib:.2f}"
    )
    if error.ratio_s is not None:
        words += f"; {error.planned_s:.3g} s estimated, {error.step_s:.3g} measured: {error.ratio_s:.2f}"
    return words


def summary(errors: Sequence[Error]) -> str:
    """All cases in a line."""
    ratios = [error.ratio for error in errors if error.ratio is not None]
    if not ratios:
        return "nothing was measured"
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    verdict = "within" if abs(worst - 1) <= WITHIN and len(ratios) == len(errors) else "NOT within"
    words = f"planned over measured peak {min(ratios):.3f} to {max(ratios):.3f}: {verdict} {100 * WITHIN:.0f} %"
    failed = [error for error in errors if error.status != report.OK]
    return f"{words}; {len(failed)} of {len(errors)} cases failed" if failed else words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
