"""Weak scaling of Llama-3.1-8B from 8 to 1,024 H100s, by compiling its training step without GPUs.

    python -m scripts.bench.weak_scaling --out scripts/bench/results/today-weak-scaling-plan.json
    python -m scripts.bench.weak_scaling --devices 8 64 --series packed

Each device always has 32,768 tokens, in nodes of 8. In the series `document` and `packed`, all
devices share one row, which grows with them: Ulysses up to the 32 query heads, then Ulysses inside
nodes and a ring between them. The row is one document, or full of documents of 262,144 tokens. In
the series `groups`, rows have 262,144 tokens, each node shares one (Ulysses of 8), and each node is
a replica (HSDP). Nothing was measured on a GPU. `python -m
scripts.bench.weak_scaling_plot RESULTS.json FILE.svg` draws the results. It needs the plan extra.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError
from jaxsp.memory import memory_causes
from scripts.bench import configs, isolation, machine, report, results

MODULE = "scripts.bench.weak_scaling"

DEVICE = "h100-80gb"
NODE_DEVICES = 8
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS_PER_DEVICE = 32768
SERIES = ("document", "packed", "groups")

DOCUMENT_TOKENS = 262144
"""Length of documents in the series `packed` and `groups`."""

MODEL_STATE = (memory_causes.WEIGHTS, memory_causes.OPTIMIZER, memory_causes.GRADIENTS)
"""Causes of memory that more shards make smaller."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step to compile."""

    series: str
    """One of SERIES."""
    num_devices: int
    requested_strategy: str = "auto"
    """attention.strategy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Plan of a step; None if there is none. Sizes and bytes are those of one device."""

    status: str
    message: str | None = None
    strategy: str | None = None
    row_tokens: int | None = None
    device_gib: float | None = None
    state_gib: float | None = None
    """Part of device_gib: weights, optimizer state and gradients, which are sharded."""
    memory: dict[str, float] | None = None
    """GiB by cause at the peak."""
    collectives: list[dict[str, Any]] | None = None
    """Bytes of the program, bytes by formula, bytes that leave a node, and estimated seconds, by
    operation."""
    ratio: float | None = None
    """Sent bytes over those by formula."""
    step_s: float | None = None
    """Estimated seconds of a step."""
    tokens_per_s_per_device: float | None = None
    """Estimate."""
    mfu: float | None = None
    seconds: dict[str, float] | None = None
    """Estimated seconds by cause."""
    compile_s: float | None = None


def main(arguments: list[str]) -> int:
    """Runs the command. Returns: 1 if a case failed or took too long."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=DEVICES)
    parser.add_argument("--series", nargs="+", choices=SERIES, default=SERIES)
    parser.add_argument("--case-seconds", type=float, default=900, help="limit of a case")
    args = parser.parse_args(arguments)
    contents = results.open_results(
        MODULE,
        arguments,
        **machine.read_cpu_versions("jax", "jaxlib", "jax-cuda12-plugin"),
        device=DEVICE,
        node_devices=NODE_DEVICES,
        tokens_per_device=TOKENS_PER_DEVICE,
        document_tokens=DOCUMENT_TOKENS,
        model=configs.LLAMA_8B,
    )
    for case in list_cases(args.series, args.devices):
        result = isolation.run_isolated(MODULE, case, Result, seconds=args.case_seconds)
        contents["cases"].append(dataclasses.asdict(case) | dataclasses.asdict(result))
        print(format_case(case, result), flush=True)
        results.write(args.out, contents)
    return int(any(case["status"] in report.FAILURES for case in contents["cases"]))


def list_cases(series: Sequence[str], devices: Sequence[int]) -> list[Case]:
    """Lists the cases. Where Ulysses spans nodes, a ring between nodes is a case too."""
    cases = []
    for name in series:
        for num_devices in devices:
            cases.append(Case(series=name, num_devices=num_devices))
            heads = configs.LLAMA_8B["num_attention_heads"]
            if name != "groups" and NODE_DEVICES < num_devices <= heads:
                cases.append(Case(series=name, num_devices=num_devices, requested_strategy="ring"))
    return cases


def format_case(case: Case, result: Result) -> str:
    """Formats a case as a line of text."""
    text = f"{case.series:<8} {case.num_devices:>5} x {DEVICE}"
    if result.device_gib is None:
        return f"{text}  {result.status}: {result.message}"
    assert result.row_tokens is not None
    assert result.step_s is not None
    return (
        f"{text}  {result.row_tokens:>10,} tokens  {result.strategy:<24}"
        f"{result.device_gib:7.2f} GiB ({result.state_gib:.2f} of them model state), bytes x "
        f"{result.ratio:.4f} of the formula, about {result.step_s:,.1f} s per step, "
        f"{result.tokens_per_s_per_device:,.0f} tokens/s/device, MFU {result.mfu:.3f}, compiled in "
        f"{result.compile_s:.0f} s"
    )


def document_tokens(case: Case) -> int:
    """Length of a case's documents."""
    return TOKENS_PER_DEVICE * case.num_devices if case.series == "document" else DOCUMENT_TOKENS


def make_config(case: Case) -> Config:
    """The config of a case."""
    num_nodes = case.num_devices // NODE_DEVICES
    has_groups = case.series == "groups"
    seq = NODE_DEVICES if has_groups else case.num_devices
    row_tokens = TOKENS_PER_DEVICE * seq
    attention = {"strategy": case.requested_strategy}
    if case.requested_strategy == "ring":
        attention |= {"ulysses_degree": NODE_DEVICES}
    return configs.make_config(
        configs.LLAMA_8B,
        mesh={"replica": num_nodes if has_groups else 1, "data": 1, "seq": seq},
        attention=attention,
        data={
            "row_tokens": row_tokens,
            "max_segments_per_row": row_tokens // document_tokens(case),
        },
        batch={"rows_per_step": num_nodes if has_groups else 1},
        # the same tiles for all, so that memory can be compared
        memory={
            "remat": "full",
            "mlp_tile_tokens": TOKENS_PER_DEVICE,
            "loss_tile_tokens": TOKENS_PER_DEVICE // 8,
        },
    )


def measure(case: Case, folder: pathlib.Path) -> Result:
    """Compiles a case in this process. Args: folder: not needed."""
    configs.prepare_to_plan()
    try:
        plan = configs.plan_config(
            make_config(case),
            device=DEVICE,
            num_devices=case.num_devices,
            document_tokens=document_tokens(case),
        )
    except (UserError, jax.errors.JaxRuntimeError) as error:
        return Result(status=report.REFUSED, message=str(error).splitlines()[0])
    assert plan.tokens_per_s_estimate is not None
    return Result(
        status=report.OK,
        strategy=plan.strategy,
        row_tokens=plan.row_tokens,
        device_gib=plan.device_gib,
        state_gib=sum(plan.memory.get(name, 0.0) for name in MODEL_STATE),
        memory=dict(plan.memory),
        collectives=[dataclasses.asdict(collective) for collective in plan.collectives],
        ratio=plan.sent_bytes / plan.formula_bytes,
        step_s=plan.step_s_estimate,
        tokens_per_s_per_device=plan.tokens_per_s_estimate / case.num_devices,
        mfu=plan.mfu_estimate,
        seconds=dict(plan.seconds_estimate),
        compile_s=plan.plan_s,
    )


if __name__ == "__main__":
    isolation.start(main, Case, measure)
