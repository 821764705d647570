"""Published measurements of other systems, with their sources, and jaxsp's estimates beside them.

    python -m scripts.bench.published_runs

Plans each run as `jaxsp plan` does: same model, GPUs, row length and rows per step, one
document per row, and the memory options that recompute about as much as the run did. Nothing of
jaxsp is measured here. Only runs with the kernel that estimates assume (cuDNN) test the estimate:
on an H100, FlashAttention-2 took the step of TRL's Qwen3-8B from 373 to 606 s. Takes about five
minutes, with the plan extra and without a GPU.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from jaxsp.hf import published
from jaxsp.planning.planner import Plan
from scripts.bench import configs, machine, results

MODULE = "scripts.bench.published_runs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A published training run and the config that plans the same work."""

    name: str
    model: str
    """Name of the model, from hf/published.yaml."""
    device: str
    """From gpus.GPUS."""
    num_devices: int
    data: int
    seq: int
    row_tokens: int
    rows_per_step: int
    rows_per_microbatch: int
    memory: Mapping[str, Any]
    measured_s: Sequence[float]
    kernel: str
    source: str
    note: str


def read_runs() -> list[Run]:
    """The runs of published_runs.yaml."""
    text = pathlib.Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return [Run(**fields) for fields in yaml.safe_load(text)]


def main(arguments: list[str]) -> int:
    """Runs the command."""
    args = results.make_parser(MODULE, __doc__).parse_args(arguments)
    configs.prepare_to_plan()
    versions = machine.read_cpu_versions("jax", "jaxlib", "jax-cuda12-plugin")
    contents = results.open_results(MODULE, arguments, **versions)
    for run in read_runs():
        plan = make_plan(run)
        assert plan.step_s_estimate is not None, f"{run.name}: in bfloat16 there is an estimate"
        ratios = [seconds / plan.step_s_estimate for seconds in run.measured_s]
        contents["cases"].append(
            {
                **dataclasses.asdict(run),
                "estimate_s": plan.step_s_estimate,
                "measured_over_estimate": ratios,
                "fits": plan.fits,
                "device_gib": plan.device_gib,
                "seconds_estimate": dict(plan.seconds_estimate),
            }
        )
        print(
            f"{run.name}, {run.kernel}: measured {_format_range(run.measured_s)} s, estimated "
            f"{plan.step_s_estimate:.3g} s: {_format_range(ratios)} times the estimate",
            flush=True,
        )
        results.write(args.out, contents)
    return 0


def make_plan(run: Run) -> Plan:
    """Plans the work of a run."""
    config = configs.make_config(
        published.read_models()[run.model].fields,
        mesh={"data": run.data, "seq": run.seq},
        data={"row_tokens": run.row_tokens, "max_segments_per_row": 1},
        batch={
            "rows_per_step": run.rows_per_step,
            "rows_per_microbatch": run.rows_per_microbatch,
        },
        memory=run.memory,
    )
    return configs.plan_config(config, device=run.device, num_devices=run.num_devices)


def _format_range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
