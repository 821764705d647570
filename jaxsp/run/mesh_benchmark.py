"""Benchmark of all meshes of this machine's devices: times, memory, and equal losses."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from jaxsp.attention import HasHeads
from jaxsp.config import config_file
from jaxsp.core import axes, durations
from jaxsp.core.errors import UserError
from jaxsp.planner import mesh_sweep, report, tables
from jaxsp.planner.progress import Progress
from jaxsp.processes import hardware
from jaxsp.run.benchmark import BenchmarkResult

LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Maximum relative difference between the losses of two meshes in the first step. In step n it is n
times as much, because rounding has changed the weights by then."""

_MIN_LOSS = 1e-30
"""Smallest loss for relative differences."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshBenchmark:
    """One mesh and its result."""

    mesh: dict[str, int]
    strategy: str
    """Name of the strategy in tables, such as `ulysses 4 x ring`."""
    attention_fields: dict[str, Any]
    """Changed fields of the config's attention section."""
    result: BenchmarkResult | None
    """None if the mesh cannot run."""
    problem: str
    """Reason why it cannot run; empty otherwise."""
    loss_error: float
    """Maximum relative difference from the losses of the first mesh that ran."""
    difference: str
    """First loss or count that differs from those of that mesh; empty if all agree."""


def benchmark_meshes(
    path: str,
    overrides: Sequence[str],
    *,
    num_steps: int,
    model: HasHeads,
    print_line: Callable[[str], Any],
) -> list[MeshBenchmark]:
    """Runs every mesh, with every strategy that `auto` may choose there, for a few steps.

    Each runs in a process of its own, so that its peak memory is its own.

    Args: path: config file, changed by `overrides`.
    Returns: results, the fastest first; those that cannot run last.
    Raises: UserError if no mesh can run.
    """
    config = config_file.load(path, list(overrides))
    # JAX would take the memory of the devices that it counts
    num_devices = config.mesh.virtual_cpu_devices or hardware.count_gpus(os.environ) or 1
    combinations = mesh_sweep.list_combinations(config, model, num_devices=num_devices)
    print_line(f"{len(combinations)} combinations of mesh and strategy, one process each:")
    progress = Progress(len(combinations))
    benchmarks: list[MeshBenchmark] = []
    first: BenchmarkResult | None = None
    for mesh, option in combinations:
        result, problem = _run_process(
            path, [*overrides, *_overrides(mesh, option.config_fields)], num_steps=num_steps
        )
        first = first or result
        loss_error = 0.0
        difference = ""
        outcome = problem
        if result is not None and first is not None:
            tolerance = LOSS_TOLERANCE[config.model.compute_dtype]
            loss_error, difference = _compare_losses(first, result, tolerance=tolerance)
            outcome = f"{durations.describe(result.step_s)} per step"
        print_line(
            f"  [{progress.advance()}] {report.format_mesh(mesh)}, {option.label}: {outcome}"
        )
        benchmarks.append(
            MeshBenchmark(
                mesh=mesh,
                strategy=option.label,
                attention_fields=option.config_fields,
                result=result,
                problem=problem,
                loss_error=loss_error,
                difference=difference,
            )
        )
    if first is None:
        raise UserError(
            f"none of the {len(benchmarks)} meshes can run. The first, "
            f"{report.format_mesh(benchmarks[0].mesh)}: {benchmarks[0].problem}"
        )
    return sorted(
        benchmarks,
        key=lambda benchmark: benchmark.result.step_s if benchmark.result else math.inf,
    )


def _overrides(mesh: dict[str, int], attention_fields: dict[str, Any]) -> list[str]:
    """A mesh and a strategy as overrides of a config."""
    overrides = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    return overrides + [
        f"attention.{name}={json.dumps(value)}" for name, value in attention_fields.items()
    ]


def format_table(benchmarks: Sequence[MeshBenchmark]) -> str:
    """Formats a table of the results."""
    ran = [(benchmark, benchmark.result) for benchmark in benchmarks if benchmark.result]
    head = (
        *axes.ALL,
        "attention",
        "step s",
        "estimate s",
        "tokens/s",
        "peak GiB",
        "planned GiB",
        "remat",
        "last loss",
        "difference",
    )
    rows: list[tuple[str, ...]] = [
        (
            *_describe_mesh(benchmark),
            f"{result.step_s:.4g}",
            tables.format_number(result.step_s_estimate, "{:.4g}"),
            f"{result.tokens_per_s:,.0f}",
            tables.format_number(result.peak_gib, "{:.2f}"),
            f"{result.device_gib:.3g}",
            result.remat,
            f"{result.losses[-1]:.6f}",
            f"{benchmark.loss_error:.1e}",
        )
        for benchmark, result in ran
    ]
    rows += [
        (*_describe_mesh(benchmark), benchmark.problem)
        for benchmark in benchmarks
        if benchmark.result is None
    ]
    first = ran[0][1]
    title = (
        f"{first.num_devices} x {first.device_kind}: median of {first.num_steps} steps after one "
        "that is not timed"
    )
    return f"{title}\n{tables.format_table(head, rows)}"


def _describe_mesh(benchmark: MeshBenchmark) -> list[str]:
    sizes = [str(benchmark.mesh[axis]) for axis in axes.ALL]
    return [*sizes, benchmark.strategy]


def check_losses(benchmarks: Sequence[MeshBenchmark]) -> str:
    """Checks that the meshes have the same losses and counts, and describes how equal they are.

    Raises: RuntimeError if they differ.
    """
    differences = [
        f"{report.format_mesh(benchmark.mesh)}: {benchmark.difference}"
        for benchmark in benchmarks
        if benchmark.difference
    ]
    num_ran = sum(benchmark.result is not None for benchmark in benchmarks)
    if differences:
        raise RuntimeError(
            f"{len(differences)} of {num_ran} meshes differ from the first, which is a bug: "
            f"{'; '.join(differences)}"
        )
    largest = max(benchmark.loss_error for benchmark in benchmarks)
    return f"losses and counts agree on all {num_ran} lines (losses to {largest:.1e}, relative)"


def _run_process(
    path: str, overrides: Sequence[str], *, num_steps: int
) -> tuple[BenchmarkResult | None, str]:
    """Result of `jaxsp.benchmark` in a process of its own, or the reason why there is none."""
    with tempfile.TemporaryDirectory(prefix="jaxsp-benchmark-") as folder:
        file = pathlib.Path(folder) / "result.json"
        command = [sys.executable, "-m", "jaxsp.benchmark", path, *overrides]
        command += ["--steps", str(num_steps), "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return BenchmarkResult(**json.loads(file.read_text(encoding="utf-8"))), ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if lines:
        return None, lines[-1]
    return None, f"ended with exit code {done.returncode} and no message"


def _compare_losses(
    first: BenchmarkResult, other: BenchmarkResult, *, tolerance: float
) -> tuple[float, str]:
    """Maximum relative difference of two runs' losses, and the first that is too large, as text."""
    pairs = list(zip(first.losses, other.losses, strict=True))
    relative = [abs(a - b) / max(abs(a), _MIN_LOSS) for a, b in pairs]
    mesh = report.format_mesh(first.mesh)
    difference = ""
    if first.num_loss_tokens != other.num_loss_tokens:
        difference = (
            f"num_loss_tokens {other.num_loss_tokens}, but {first.num_loss_tokens} on {mesh}"
        )
    for step, (expected, loss) in enumerate(pairs, 1):
        if not difference and relative[step - 1] > tolerance * step:
            difference = f"loss {loss:.8g} in step {step}, but {expected:.8g} on {mesh}"
    return max(relative), difference
