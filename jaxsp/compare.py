"""Every mesh of the devices that are here, run for some steps: times, memory, and losses, which have to be the same."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core import axes, durations, exit_codes
from jaxsp.core.errors import UserError
from jaxsp.measure import BenchmarkResult
from jaxsp.planner import mesh_sweep, report
from jaxsp.planner.progress import Progress

LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""How far the losses of two meshes may be apart in the first step, relative: float32 rounds, bfloat16 rounds more. In the n-th
step n times as far, because the weights differ by then too.
"""

_COUNT_DEVICES = """
import jax, sys
from jaxsp.runtime import jax_platform
jax_platform.choose_platform(virtual_cpu_devices=int(sys.argv[1]) or None)
print(len(jax.devices()))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshBenchmark:
    """A mesh, and what came of it."""

    mesh: dict[str, int]
    attention_fields: dict[str, Any]
    """Fields of the config's attention."""
    result: BenchmarkResult | None
    """None where it cannot run."""
    problem: str
    """Why not; empty otherwise."""
    loss_error: float
    """The most that a loss differs from that of the first mesh that ran, relative."""
    difference: str
    """What is not the same as there, in words; empty if all is."""


def benchmark_meshes(
    path: str,
    changes: Sequence[str],
    *,
    num_steps: int,
    num_heads: int,
    print_line: Callable[[str], Any],
) -> list[MeshBenchmark]:
    """Runs every mesh, with every kind of attention that `auto` may mean there, for so many steps.

    Each in a process of its own, so that its peak of memory is its own.

    Args:
        path: of a config, which `changes` change.
        num_heads: the model's query heads.
        say: is told of each.
    Raises: UserError where none can run.
    """
    config = config_file.load(path, list(changes))
    found: list[MeshBenchmark] = []
    first: BenchmarkResult | None = None
    all_of = mesh_sweep.list_combinations(
        config, num_devices=_count_devices(config), num_heads=num_heads
    )
    print_line(
        f"{len(all_of)} meshes with their kinds of attention, each run in a process of its own:"
    )
    counted = Progress(len(all_of))
    for mesh, kind in all_of:
        words = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
        words += [f"attention.{key}={json.dumps(value)}" for key, value in kind.items()]
        words = [*changes, *words]
        measured, why = _run_process(path, words, num_steps=num_steps)
        first = first or measured
        off, differs = (0.0, "")
        if measured is not None and first is not None:
            off, differs = _compare_losses(
                first, measured, within=LOSS_TOLERANCE[config.model.compute_dtype]
            )
        result = why if measured is None else f"{durations.describe(measured.step_s)} a step"
        print_line(
            f"  [{counted.advance()}] {report.format_mesh(mesh)}, {mesh_sweep.describe_strategy(kind)}: {result}"
        )
        found.append(
            MeshBenchmark(
                mesh=mesh,
                attention_fields=kind,
                result=measured,
                problem=why,
                loss_error=off,
                difference=differs,
            )
        )
    if first is None:
        raise UserError(
            f"none of the meshes of {len(found)} can run. The first, {report.format_mesh(found[0].mesh)}: {found[0].problem}"
        )
    return sorted(
        found, key=lambda one: (one.result is None, one.result.step_s if one.result else 0.0)
    )


def format_table(found: Sequence[MeshBenchmark]) -> str:
    """What `here` has found, for people."""
    ran = [(one, one.result) for one in found if one.result is not None]
    of_speed, of_memory = ("step s", "estimate s", "tokens/s"), ("peak GiB", "planned GiB", "remat")
    head = (*axes.ALL, "attention", *of_speed, *of_memory, "last loss", "off by")
    rows = [
        (
            *(str(one.mesh[axis]) for axis in axes.ALL),
            mesh_sweep.describe_strategy(one.attention_fields),
            f"{measured.step_s:.4g}",
            report.format_number(measured.step_s_estimate, "{:.4g}"),
            f"{measured.tokens_per_s:,.0f}",
            report.format_number(measured.peak_gib, "{:.2f}"),
            f"{measured.device_gib:.3g}",
            measured.remat,
            f"{measured.losses[-1]:.6f}",
            f"{one.loss_error:.1e}",
        )
        for one, measured in ran
    ]
    rows += [
        (
            *(str(one.mesh[axis]) for axis in axes.ALL),
            mesh_sweep.describe_strategy(one.attention_fields),
            one.problem,
        )
        for one in found
        if one.result is None
    ]
    first = ran[0][1]
    where = (
        f"{first.num_devices} x {first.device_kind}: median of {first.num_steps} steps after one"
    )
    differing = [one for one in found if one.difference]
    verdict = f"losses and counts are the same on all {len(ran)} lines, to {max(one.loss_error for one in found):.1e}, relative"
    if differing:
        verdict = f"NOT THE SAME on {len(differing)} of {len(ran)} lines"
    return "\n".join([where, report.format_table(head, rows), verdict])


def check_losses(found: Sequence[MeshBenchmark]) -> None:
    """Raises: RuntimeError where a loss or a count differs."""
    differing = [
        f"{report.format_mesh(one.mesh)}: {one.difference}" for one in found if one.difference
    ]
    if differing:
        raise RuntimeError(f"meshes differ, which is a bug: {'; '.join(differing)}")


def _count_devices(config: Config) -> int:
    """Devices that `jaxsp.measure` would see. JAX is not asked in this process: it would hold their memory."""
    command = [sys.executable, "-c", _COUNT_DEVICES, str(config.mesh.virtual_cpu_devices or 0)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"JAX does not start: {done.stderr.strip()}")
    return int(done.stdout.split()[-1])


def _run_process(
    path: str, words: Sequence[str], *, num_steps: int
) -> tuple[BenchmarkResult | None, str]:
    """What `jaxsp.measure` measures, in a process of its own; or why it does not."""
    with tempfile.TemporaryDirectory(prefix="jaxsp-compare-") as folder:
        written = pathlib.Path(folder) / "measured.json"
        command = [
            sys.executable,
            "-m",
            "jaxsp.measure",
            path,
            *words,
            "--steps",
            str(num_steps),
            "--json",
            str(written),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == exit_codes.OK:
            return BenchmarkResult(**json.loads(written.read_text(encoding="utf-8"))), ""
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [
        f"ended with {done.returncode}, without a word"
    ]
    return None, lines[-1]


def _compare_losses(
    first: BenchmarkResult, other: BenchmarkResult, *, within: float
) -> tuple[float, str]:
    """How far the losses of two runs are apart, relative, and what differs by more than it may, in words."""
    off = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(first.losses, other.losses, strict=True)]
    worst = max(off)
    if first.num_loss_tokens != other.num_loss_tokens:
        return (
            worst,
            f"num_loss_tokens {other.num_loss_tokens}, and {first.num_loss_tokens} on {report.format_mesh(first.mesh)}",
        )
    step = next((number for number, apart in enumerate(off, 1) if apart > within * number), None)
    if step is None:
        return worst, ""
    one, two = (run.losses[step - 1] for run in (other, first))
    return (
        worst,
        f"loss {one:.8g} in step {step}, and {two:.8g} on {report.format_mesh(first.mesh)}",
    )
