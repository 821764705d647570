"""Compares estimated step times with published measurements of other systems; needs no GPU.

    python -m scripts.bench.anchors

Plans each run of RUNS as `python -m jaxsp.plan` does: same model, GPUs, row length and rows per
step, one document per row, and the memory options of jaxsp that recompute about as much as the
run did. Nothing of jaxsp is measured here. A ratio says how far the estimate is from what another
program needed for the same work, so it contains the differences between the programs: only runs
with the attention kernel that the estimate assumes (cuDNN) test the estimate itself.
"""

import argparse
import dataclasses
import datetime
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxsp.config import config_file
from jaxsp.hf import families
from jaxsp.planner import planning, tables
from jaxsp.planner.compile import compiled
from jaxsp.planner.planning import Plan
from scripts.bench import machine, memory

SECONDS = "s a step"
TOKENS_PER_S = "tokens/s/GPU"
"""Units of measurements."""

CUDNN = "cuDNN"
FLASH2 = "FlashAttention-2"
"""Attention kernels. Estimates assume cuDNN."""

READ = "read at the source"
SECOND_HAND = "second hand"
"""Origin of a measurement."""

OTHER_KERNELS = (
    "On an H100, FlashAttention-2 is slower than cuDNN, which the estimates assume: it took the "
    "step of [1] from 373 to 606 s, 1.62 times as long. So ratios are low for such runs, most of "
    "all where attention is nearly all of the arithmetic."
)
"""Explains the ratios of runs with another kernel."""

LLAMA3_8B: dict[str, Any] = memory.MODEL

LLAMA3_70B: dict[str, Any] = {
    **LLAMA3_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}

LLAMA2_70B: dict[str, Any] = {**LLAMA3_70B, "vocab_size": 32000, "rope_theta": 10000.0}

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

QWEN3_32B: dict[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
}

TRL = "https://github.com/huggingface/trl/pull"
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob"
PERFORMANCE_A100 = f"{TORCHTITAN}/3278a52f5e08/docs/performance.md"
DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A published training run and the config that plans the same work."""

    name: str
    model: Mapping[str, Any]
    """Fields of the model's config.json."""
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
    measured: tuple[float, ...]
    """One or more measurements of this run."""
    unit: str
    """SECONDS or TOKENS_PER_S."""
    kernel: str
    """Attention kernel of the run."""
    source: str
    """URL."""
    checked: str
    """READ or SECOND_HAND."""
    note: str
    """Differences between the run and the plan, and what was inferred."""

    @property
    def measured_s(self) -> tuple[float, ...]:
        """Measured seconds per step, the shortest first."""
        if self.unit == SECONDS:
            return tuple(sorted(self.measured))
        tokens = self.rows_per_step * self.row_tokens / self.num_devices
        return tuple(sorted(tokens / value for value in self.measured))

    @property
    def is_same_kernel(self) -> bool:
        """True if the run has the attention kernel that the estimate assumes."""
        return self.kernel == CUDNN


RUNS = (
    Run(
        name="TRL Qwen3-8B 1M",
        model=QWEN3_8B,
        device="h100-80gb",
        num_devices=8,
        data=1,
        seq=8,
        row_tokens=1048576,
        rows_per_step=1,
        memory={"remat": "full", "offload_activations": "layer_inputs"},
        measured=(364, 373, 380),
        unit=SECONDS,
        kernel=CUDNN,
        source=f"{TRL}/6846",
        checked=READ,
        note="364 s: pull 6845; 373 s: huggingface/transformers pull 48324; 380 s: pull 6846. "
        "FSDP2, context parallelism over 8 GPUs, gradient checkpointing with offload",
    ),
    Run(
        name="TRL Qwen3-32B 1M",
        model=QWEN3_32B,
        device="h100-80gb",
        num_devices=8,
        data=1,
        seq=8,
        row_tokens=1048576,
        rows_per_step=1,
        memory={
            "remat": "full",
            "offload_activations": "layer_inputs",
            "offload_optimizer": "state",
        },
        measured=(1295,),
        unit=SECONDS,
        kernel=CUDNN,
        source=f"{TRL}/6845",
        checked=READ,
        note="The kernel is inferred: in the same table Qwen3-8B takes 364 s, which it does with "
        "cuDNN only. The plan has its optimizer state on the host, without which it does not fit",
    ),
    Run(
        name="MaxText Llama-2-70B 4K",
        model=LLAMA2_70B,
        device="h100-80gb",
        num_devices=64,
        data=64,
        seq=1,
        row_tokens=4096,
        rows_per_step=128,
        rows_per_microbatch=2,
        memory={"remat": "save_attention"},
        measured=(6.999, 7.908),
        unit=SECONDS,
        kernel=CUDNN,
        source=f"{DGXC}/v24.11.1/maxtext/README_70b.md",
        checked=READ,
        note="Table (6.999 s) and sample log (7.908 s) of the same page differ. Its remat policy "
        "keeps more than `attention`: Q, K, V and output projections (configure.sh)",
    ),
    Run(
        name="MaxText Llama-3-70B 8K",
        model=LLAMA3_70B,
        device="h100-80gb",
        num_devices=128,
        data=128,
        seq=1,
        row_tokens=8192,
        rows_per_step=256,
        rows_per_microbatch=2,
        memory={"remat": "full"},
        measured=(15.563, 15.570),
        unit=SECONDS,
        kernel=CUDNN,
        source=f"{DGXC}/v25.02/maxtext/README_70b.md",
        checked=READ,
        note="Its remat policy keeps the Q, K and V projections (configure.sh)",
    ),
    Run(
        name="torchtitan Llama-3-8B 8K",
        model=LLAMA3_8B,
        device="a100-80gb",
        num_devices=64,
        data=64,
        seq=1,
        row_tokens=8192,
        rows_per_step=64,
        memory={"remat": "save_attention"},
        measured=(2904, 2973),
        unit=TOKENS_PER_S,
        kernel=FLASH2,
        source=PERFORMANCE_A100,
        checked=READ,
        note="FSDP2, selective checkpointing of every other layer (2904) or of operations (2973), "
        "which recomputes less than `attention`. The kernel is faster than cuDNN on an A100 "
        "(planner/compile/gpus.py)",
    ),
    Run(
        name="torchtitan Llama-3-70B 8K",
        model=LLAMA3_70B,
        device="a100-80gb",
        num_devices=64,
        data=64,
        seq=1,
        row_tokens=8192,
        rows_per_step=64,
        memory={"remat": "full"},
        measured=(331,),
        unit=TOKENS_PER_S,
        kernel=FLASH2,
        source=PERFORMANCE_A100,
        checked=READ,
        note="FSDP2, full checkpointing. The kernel is faster than cuDNN on an A100",
    ),
    Run(
        name="torchtitan Llama-3.1-8B 8K",
        model=LLAMA3_8B,
        device="h100-80gb",
        num_devices=8,
        data=8,
        seq=1,
        row_tokens=8192,
        rows_per_step=16,
        rows_per_microbatch=2,
        memory={"remat": "save_attention"},
        measured=(6667,),
        unit=TOKENS_PER_S,
        kernel=FLASH2,
        source=f"{TORCHTITAN}/b5bcd76c66d0/benchmarks/llama3_h100_202412_torchtitan.md",
        checked=READ,
        note="H100s limited to 500 W, with 96 GB of memory at 2.4 TB/s instead of 80 GB at 3.35; "
        "torch.compile. The kernel is inferred: torch's default in December 2024 "
        "(pytorch/pytorch issue 142132)",
    ),
    Run(
        name="Transformers Qwen3-8B 1M",
        model=QWEN3_8B,
        device="h100-80gb",
        num_devices=8,
        data=1,
        seq=8,
        row_tokens=1048576,
        rows_per_step=1,
        memory={"remat": "full", "offload_activations": "layer_inputs"},
        measured=(606,),
        unit=SECONDS,
        kernel=FLASH2,
        source="https://github.com/huggingface/transformers/pull/48324",
        checked=READ,
        note="The TRL run where torch did not select cuDNN; with cuDNN it took 373 s",
    ),
    Run(
        name="ALST Llama-3.1-8B 3.7M",
        model=LLAMA3_8B,
        device="h100-80gb",
        num_devices=8,
        data=1,
        seq=8,
        row_tokens=3702784,
        rows_per_step=1,
        memory={
            "remat": "full",
            "offload_activations": "layer_inputs",
            "offload_optimizer": "state",
        },
        measured=(6455,),
        unit=SECONDS,
        kernel=FLASH2,
        source="https://arxiv.org/abs/2506.13996",
        checked=SECOND_HAND,
        note="1:47:35 an iteration, quoted from the paper's table, which was not read again. The "
        "kernel was: ArcticTraining's recipe run-h100-sp8-llama-8b.yml. The row is 3.7M to the "
        "nearest multiple of 8 x 4,096",
    ),
)
"""Runs with the kernel that estimates assume come first."""


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
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.anchors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    today = datetime.datetime.now(datetime.UTC).date()
    default = pathlib.Path("scripts/bench/results") / f"{today}-anchors.json"
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json", default=default)
    given = parser.parse_args(arguments)
    # planning must not take the memory of a GPU that is here
    jax.config.update("jax_platforms", "cpu")
    # planning reads files that XLA writes while it compiles: a program from the cache has none
    jax.config.update("jax_enable_compilation_cache", False)
    anchors = []
    for run in RUNS:
        anchors.append(compare(run, plan(run)))
        print(f"planned: {run.name}", flush=True)
    print(table(anchors))
    print(summary(anchors))
    machine.write(
        given.out,
        "scripts.bench.anchors",
        arguments,
        ["jax", "jaxlib", "jax-cuda12-plugin"],
        summary=summary(anchors),
        runs=[dataclasses.asdict(run) for run in RUNS],
        anchors=[dataclasses.asdict(anchor) for anchor in anchors],
    )
    print(f"written: {given.out}")
    return 0


def plan(run: Run) -> Plan:
    """Plans the work of a run."""
    config = config_file.parse(
        {
            "run": {"directory": "unused", "steps": 1},
            "model": {"config": dict(run.model)},
            "mesh": {"data": run.data, "seq": run.seq},
            "data": {
                "train": [{"source": "unused", "format": "tokens"}],
                "row_tokens": run.row_tokens,
                "max_segments_per_row": 1,
            },
            "batch": {
                "rows_per_step": run.rows_per_step,
                "rows_per_microbatch": run.rows_per_microbatch,
            },
            "optimizer": {"learning_rate": 1e-5},
            "memory": dict(run.memory),
        }
    )
    model = families.parse_model_config(dict(run.model), field=run.name)
    return planning.plan_step(
        config, model=model, cluster=compiled.make_cluster(run.device, run.num_devices)
    )


def compare(run: Run, planned: Plan) -> Anchor:
    """Compares a run with its plan."""
    estimate_s = planned.step_s_estimate
    tokens_per_s = planned.tokens_per_s_estimate
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
        fits=planned.fits,
        device_gib=planned.device_gib,
        mfu_estimate=planned.mfu_estimate,
        seconds_estimate=planned.seconds_estimate,
        note=run.note,
    )


def table(anchors: Sequence[Anchor]) -> str:
    """Formats runs as a table, with notes below."""
    head = ["", "run", "measured", "estimate", "unit", "estimate/measured s", "kernel", "source"]
    rows = []
    notes = []
    for number, anchor in enumerate(anchors, 1):
        kernel = "same" if anchor.is_same_kernel else f"other: {anchor.kernel}"
        row = [f"[{number}]", anchor.name, between(anchor.measured), figure(anchor.estimate)]
        row += [anchor.unit, between(anchor.ratios), kernel, anchor.checked]
        rows.append(row)
        fits = "" if anchor.fits else ". The plan does not fit its GPUs"
        notes.append(f"[{number}] {anchor.source}: {anchor.note}{fits}")
    return "\n".join([tables.format_table(head, rows), OTHER_KERNELS, *notes])


def summary(anchors: Sequence[Anchor]) -> str:
    """Ranges of measured over estimated time, in one line."""
    words = []
    for text, is_same_kernel in (("same kernel", True), ("other kernels", False)):
        group = [anchor for anchor in anchors if anchor.is_same_kernel == is_same_kernel]
        if group:
            ratios = [1 / ratio for anchor in group for ratio in anchor.ratios]
            words.append(f"{text} {between(ratios)}")
    return f"measured over estimated time: {'; '.join(words)}"


def between(values: Sequence[float]) -> str:
    """Formats the lowest and the highest of some values."""
    low = figure(min(values))
    high = figure(max(values))
    return low if low == high else f"{low} to {high}"


def figure(value: float) -> str:
    """Formats a number with three significant digits, or whole if it is larger."""
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
