"""Benchmark: times a few real steps of a config on this machine, on one mesh or on all."""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxsp.attention.workload import HasHeads
from jaxsp.core import units
from jaxsp.core.errors import UserError
from jaxsp.planning import fit, gpus, report, searches, step_time
from jaxsp.run import build, config_file, metrics, selfcheck
from jaxsp.run.config_file import Config
from jaxsp.system import hardware
from jaxsp.training import train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """Times, memory and losses of a few steps."""

    mesh: str
    losses: list[float]
    """Loss of each step, and of one before them that is not timed."""
    num_loss_tokens: list[int]
    step_s: float
    """Median time of a step; each is waited for."""
    tokens_per_s: float
    peak_gib: float | None
    """Peak memory of a device; None if it is not reported."""
    device_gib: float
    """Memory of a device that the compiled step needs."""
    remat: str
    step_s_estimate: float | None


Results = Mapping[str, BenchmarkResult | str]  # by mesh; a text tells why one cannot run


def benchmark_steps(config: Config, *, num_steps: int) -> BenchmarkResult:
    """Times steps of a config from its initial weights. Raises: UserError"""
    with tempfile.TemporaryDirectory(prefix="jaxsp-benchmark-") as folder:
        fields = {"steps": 1 + num_steps, "epochs": None, "resume": "never"}
        config = config.with_fields(
            run=fields | {"directory": f"{folder}/run"},
            data={"eval": ()},
            eval={"tasks": ()},
            checkpoint={"keep_best": 0, "best_eval": None},
            logging={"profile_steps": None},
        )
        run = build.build_training(config, devices=jax.devices())
    selfcheck.check_device(run.spec)
    step = fit.compile_fitting_step(run.spec)
    fit.reserve_host_memory(run.spec, step.memory_use.host)
    state = train_state.init_state(run.spec, run.weights.make())
    seconds = []
    results = []
    for batch, counts in run.train_set.make_loader(run.schedule, run.spec.placement).batches():
        began = time.perf_counter()
        state, step_results = jax.block_until_ready(step.executable(state, batch))
        seconds.append(time.perf_counter() - began)
        results.append(jax.device_get(step_results))
        segment_lengths = counts.segment_lengths
    losses = [float(x["loss"]) for x in results]
    if not np.isfinite(losses).all():
        raise UserError(f"the loss is not finite: {losses}")
    step_s = statistics.median(seconds[1:])
    estimate = None
    if (gpu := gpus.find_by_device_kind(jax.devices()[0].device_kind)) is not None:
        estimate = step_time.estimate_step(
            step.spec,
            step.executable.as_text() or "",
            ceilings=gpu.ceilings,
            node_devices=step.spec.mesh.size,
            segment_lengths=segment_lengths,
        )
    return BenchmarkResult(
        mesh=report.format_mesh(run.spec.mesh.shape),
        losses=losses,
        num_loss_tokens=[int(x["num_loss_tokens"]) for x in results],
        step_s=step_s,
        tokens_per_s=statistics.mean(int(x["num_tokens"]) for x in results[1:]) / step_s,
        peak_gib=metrics.peak_gib(jax.local_devices()),
        device_gib=step.memory_use.device_total / units.GIB,
        remat=step.spec.remat_policy.remat,
        step_s_estimate=None if estimate is None else estimate.step_s,
    )


def benchmark_meshes(
    path: str, overrides: Sequence[str], num_steps: int, model: HasHeads, show: Callable[[str], Any]
) -> Results:
    """Runs every mesh and strategy that `auto` may choose, each in a process of its own, for its
    peak memory. Raises: UserError if none can run."""
    config = config_file.load(path, list(overrides))
    num_devices = config.mesh.virtual_cpu_devices or hardware.count_gpus(os.environ) or 1
    results: dict[str, BenchmarkResult | str] = {}
    for mesh, option in searches.list_combinations(config.step, model, num_devices=num_devices):
        label = f"{report.format_mesh(mesh)}, {option.label}"
        changes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
        changes += [f"attention.{x}={json.dumps(y)}" for x, y in option.config_fields.items()]
        results[label] = result = _run_process(path, [*overrides, *changes], num_steps)
        outcome = result if isinstance(result, str) else units.format_seconds(result.step_s)
        show(f"  {label}: {outcome}")
    label, problem = next(iter(results.items()))
    if all(isinstance(result, str) for result in results.values()):
        raise UserError(f"none of the {len(results)} meshes can run. The first, {label}: {problem}")
    return dict(sorted(results.items(), key=lambda x: getattr(x[1], "step_s", float("inf"))))


def _run_process(path: str, overrides: Sequence[str], num_steps: int) -> BenchmarkResult | str:
    """Result of `jaxsp.benchmark` in a process of its own, or the reason why there is none."""
    with tempfile.TemporaryDirectory(prefix="jaxsp-benchmark-") as folder:
        file = pathlib.Path(folder) / "result.json"
        command = [sys.executable, "-m", "jaxsp.benchmark", path, *overrides]
        command += ["--steps", str(num_steps), "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            (result,) = json.loads(file.read_text(encoding="utf-8"))["meshes"].values()
            return BenchmarkResult(**result)
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {done.returncode} and no message"


def format_table(results: Results) -> str:
    head = ["step s", "estimate s", "tokens/s", "peak GiB", "planned GiB", "loss", "remat", "mesh"]
    rows = []
    for label, result in results.items():
        if isinstance(result, str):
            rows.append([f"{label}: {result}"])
            continue
        numbers = [result.step_s, result.step_s_estimate, result.tokens_per_s, result.peak_gib]
        numbers += [result.device_gib, result.losses[-1]]
        cells = [report.format_number(number, "{:,.5g}") for number in numbers]
        rows.append([*cells, result.remat, label])
    return report.format_table(head, rows)


def check_losses(results: Results, *, dtype: str) -> str:
    """Checks that the meshes have the same losses and counts, and describes how equal they are.

    Raises: RuntimeError if they differ by more than rounding in this dtype explains.
    """
    ran = {label: x for label, x in results.items() if not isinstance(x, str)}
    base, first = next(iter(ran.items()))
    largest = 0.0
    for label, result in ran.items():
        errors = np.abs(np.divide(result.losses, first.losses) - 1)
        largest = max(largest, errors.max())
        # In step n, rounding has changed the weights n times
        tolerance = (1e-5 if dtype == "float32" else 1e-2) * np.arange(1, 1 + len(errors))
        if not all(errors <= tolerance) or first.num_loss_tokens != result.num_loss_tokens:
            found, expected = (f"losses {x.losses} of {x.num_loss_tokens}" for x in (result, first))
            raise RuntimeError(f"a bug: {label} has {found} tokens, and {base} {expected}")
    return f"losses and counts agree on {len(ran)} meshes (losses to {largest:.1e}, relative)"
