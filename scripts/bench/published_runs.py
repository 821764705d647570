"""Published measurements of other systems, with their sources, and jaxsp's estimates beside them.

    python -m scripts.bench.published_runs

Plans each run as `jaxsp plan` does: same model, GPUs, row length and rows per step, one
document per row, and the memory options that recompute about as much as the run did. Nothing of
jaxsp is measured here. Only runs with the kernel that estimates assume (cuDNN) test the estimate:
on an H100, FlashAttention-2 took the step of TRL's Qwen3-8B from 373 to 606 s. Takes about five
minutes, with the plan extra and without a GPU.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsp.hf import published
from jaxsp.planning.planner import Plan
from scripts.bench import configs, machine, results

MODULE = "scripts.bench.published_runs"

CUDNN = "cuDNN"
FLASH2 = "FlashAttention-2"
"""Attention kernels. Estimates assume cuDNN."""

TRL = "https://github.com/huggingface/trl/pull"
DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob"


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
    """Devices along the mesh axis `data`."""
    seq: int
    """Devices along the mesh axis `seq`."""
    row_tokens: int
    rows_per_step: int
    rows_per_microbatch: int = 1
    """Rows that a sequence-parallel group works on at one time."""
    memory: Mapping[str, Any]
    """Fields of the config's group `memory`."""
    measured_s: tuple[float, ...]
    """Seconds per step: one or more measurements of this run, the shortest first."""
    kernel: str
    """Attention kernel of the run."""
    source: str
    """URL."""
    note: str
    """Differences between the run and the plan, and what was inferred."""


MILLION_TOKENS: dict[str, Any] = {
    "device": "h100-80gb",
    "num_devices": 8,
    "data": 1,
    "seq": 8,
    "row_tokens": 1048576,
    "rows_per_step": 1,
}

OFFLOADED = {"remat": "full", "offload_activations": "layer_inputs"}

RUNS = (
    Run(
        name="TRL Qwen3-8B 1M",
        model="Qwen/Qwen3-8B",
        **MILLION_TOKENS,
        memory=OFFLOADED,
        measured_s=(364, 373, 380),
        kernel=CUDNN,
        source=f"{TRL}/6846",
        note="364 s: pull 6845; 373 s: huggingface/transformers pull 48324; 380 s: pull 6846. "
        "FSDP2, context parallelism over 8 GPUs, gradient checkpointing with offload",
    ),
    Run(
        name="TRL Qwen3-32B 1M",
        model="Qwen/Qwen3-32B",
        **MILLION_TOKENS,
        memory={**OFFLOADED, "offload_optimizer": "state"},
        measured_s=(1295,),
        kernel=CUDNN,
        source=f"{TRL}/6845",
        note="The kernel is inferred: in the same table Qwen3-8B takes 364 s, which it does with "
        "cuDNN only. The plan has its optimizer state on the host, without which it does not fit",
    ),
    Run(
        name="MaxText Llama-2-70B 4K",
        model="meta-llama/Llama-2-70b-hf",
        device="h100-80gb",
        num_devices=64,
        data=64,
        seq=1,
        row_tokens=4096,
        rows_per_step=128,
        rows_per_microbatch=2,
        memory={"remat": "save_attention"},
        measured_s=(6.999, 7.908),
        kernel=CUDNN,
        source=f"{DGXC}/v24.11.1/maxtext/README_70b.md",
        note="Table (6.999 s) and sample log (7.908 s) of the same page differ. Its remat policy "
        "keeps more than `save_attention`: Q, K, V and output projections (configure.sh)",
    ),
    Run(
        name="MaxText Llama-3-70B 8K",
        model="meta-llama/Meta-Llama-3-70B",
        device="h100-80gb",
        num_devices=128,
        data=128,
        seq=1,
        row_tokens=8192,
        rows_per_step=256,
        rows_per_microbatch=2,
        memory={"remat": "full"},
        measured_s=(15.563, 15.570),
        kernel=CUDNN,
        source=f"{DGXC}/v25.02/maxtext/README_70b.md",
        note="Its remat policy keeps the Q, K and V projections (configure.sh)",
    ),
    Run(
        name="Transformers Qwen3-8B 1M",
        model="Qwen/Qwen3-8B",
        **MILLION_TOKENS,
        memory=OFFLOADED,
        measured_s=(606,),
        kernel=FLASH2,
        source="https://github.com/huggingface/transformers/pull/48324",
        note="The TRL run where torch did not select cuDNN; with cuDNN it took 373 s",
    ),
    Run(
        name="ALST Llama-3.1-8B 3.7M",
        model="meta-llama/Llama-3.1-8B",
        **{**MILLION_TOKENS, "row_tokens": 3702784},
        memory={**OFFLOADED, "offload_optimizer": "state"},
        measured_s=(6455,),
        kernel=FLASH2,
        source="https://arxiv.org/abs/2506.13996",
        note="1:47:35 an iteration, quoted from the paper's table, which was not read again. The "
        "kernel is that of ArcticTraining's recipe run-h100-sp8-llama-8b.yml, which was read. The "
        "row is 3.7M to the nearest multiple of 8 x 4,096",
    ),
)
"""Runs with the kernel that estimates assume come first."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    args = results.make_parser(MODULE, __doc__).parse_args(arguments)
    configs.prepare_to_plan()
    versions = machine.read_cpu_versions("jax", "jaxlib", "jax-cuda12-plugin")
    contents = results.open_results(MODULE, arguments, **versions)
    for run in RUNS:
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
