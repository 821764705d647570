"""Compares estimated step times with published measurements of other systems; needs no GPU.

    python -m scripts.bench.anchors

Plans each run of RUNS as `python -m jaxsp.plan` does: same model, GPUs, row length and rows per
step, one document per row, and the memory options of jaxsp that recompute about as much as the
run did. Nothing of jaxsp is measured here. A ratio compares the estimate with the time that another
program needed for the same work, so it contains the differences between the programs: only runs
with the attention kernel that the estimate assumes (cuDNN) test the estimate itself.
"""

import dataclasses
import datetime
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence

from jaxsp.planner import tables
from jaxsp.planner.planning import Plan
from scripts.bench import configs, machine, results
from scripts.bench.published_runs import RUNS, SECONDS, Run

MODULE = "scripts.bench.anchors"

OTHER_KERNELS = (
    "On an H100, FlashAttention-2 is slower than cuDNN, which the estimates assume: it took the "
    "step of [1] from 373 to 606 s, 1.62 times as long. So ratios are low for such runs, most of "
    "all where attention is nearly all of the arithmetic."
)
"""Explains the ratios of runs with another kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anchor:
    """A published run beside its plan."""

    name: str
    source: str
    checked: str
    measured: tuple[float, ...]
    unit: str
    kernel: str
    is_same_kernel: bool
    measured_s: tuple[float, ...]
    estimate: float
    """In the unit of the measurement."""
    estimate_s: float
    ratios: tuple[float, ...]
    """Estimated over measured seconds, for the longest measurement first."""
    fits: bool
    device_gib: float
    mfu_estimate: float | None
    seconds_estimate: Mapping[str, float]
    note: str


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    today = datetime.datetime.now(datetime.UTC).date()
    parser.set_defaults(out=pathlib.Path(f"scripts/bench/results/{today}-anchors.json"))
    args = parser.parse_args(arguments)
    configs.prepare_to_plan()
    anchors = []
    for run in RUNS:
        anchors.append(compare(run, make_plan(run)))
        print(f"planned: {run.name}", flush=True)
    print(format_table(anchors))
    print(summarize(anchors))
    versions = machine.read_cpu_versions("jax", "jaxlib", "jax-cuda12-plugin")
    contents = results.open_results(MODULE, arguments, **versions, summary=summarize(anchors))
    contents["runs"] = [dataclasses.asdict(run) for run in RUNS]
    contents["cases"] = [dataclasses.asdict(anchor) for anchor in anchors]
    results.write(args.out, contents)
    print(f"written: {args.out}")
    return 0


def make_plan(run: Run) -> Plan:
    """Plans the work of a run."""
    config = configs.make_config(
        run.model,
        mesh={"data": run.data, "seq": run.seq},
        data={"row_tokens": run.row_tokens, "max_segments_per_row": 1},
        batch={
            "rows_per_step": run.rows_per_step,
            "rows_per_microbatch": run.rows_per_microbatch,
        },
        memory=run.memory,
    )
    return configs.plan_config(config, device=run.device, num_devices=run.num_devices)


def compare(run: Run, plan: Plan) -> Anchor:
    """Compares a run with its plan."""
    estimate_s = plan.step_s_estimate
    tokens_per_s = plan.tokens_per_s_estimate
    assert estimate_s is not None, f"{run.name}: a plan in bfloat16 with cuDNN has an estimate"
    assert tokens_per_s is not None, "both or none"
    return Anchor(
        name=run.name,
        source=run.source,
        checked=run.checked,
        measured=run.measured,
        unit=run.unit,
        kernel=run.kernel,
        is_same_kernel=run.is_same_kernel,
        measured_s=run.measured_s,
        estimate=estimate_s if run.unit == SECONDS else tokens_per_s / run.num_devices,
        estimate_s=estimate_s,
        ratios=tuple(estimate_s / seconds for seconds in reversed(run.measured_s)),
        fits=plan.fits,
        device_gib=plan.device_gib,
        mfu_estimate=plan.mfu_estimate,
        seconds_estimate=plan.seconds_estimate,
        note=run.note,
    )


def format_table(anchors: Sequence[Anchor]) -> str:
    """Formats runs as a table, with notes below."""
    head = ["", "run", "measured", "estimate", "unit", "estimate/measured s", "kernel", "source"]
    rows = []
    notes = []
    for number, anchor in enumerate(anchors, 1):
        kernel = "same" if anchor.is_same_kernel else f"other: {anchor.kernel}"
        row = [
            f"[{number}]",
            anchor.name,
            format_range(anchor.measured),
            format_figure(anchor.estimate),
        ]
        row += [anchor.unit, format_range(anchor.ratios), kernel, anchor.checked]
        rows.append(row)
        fits = "" if anchor.fits else ". The plan does not fit its GPUs"
        notes.append(f"[{number}] {anchor.source}: {anchor.note}{fits}")
    return "\n".join([tables.format_table(head, rows), OTHER_KERNELS, *notes])


def summarize(anchors: Sequence[Anchor]) -> str:
    """Ranges of measured over estimated time, in one line."""
    words = []
    for text, is_same_kernel in (("same kernel", True), ("other kernels", False)):
        group = [anchor for anchor in anchors if anchor.is_same_kernel == is_same_kernel]
        if group:
            ratios = [1 / ratio for anchor in group for ratio in anchor.ratios]
            words.append(f"{text} {format_range(ratios)}")
    return f"measured over estimated time: {'; '.join(words)}"


def format_range(values: Sequence[float]) -> str:
    """Formats the lowest and the highest of some values."""
    low = format_figure(min(values))
    high = format_figure(max(values))
    return low if low == high else f"{low} to {high}"


def format_figure(value: float) -> str:
    """Formats a number with three significant digits, or whole if it is larger."""
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
