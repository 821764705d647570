"""Benchmark: times a few real steps of a config on the devices of this machine."""

import dataclasses
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from jaxsp.config.schema import Config
from jaxsp.core import axes, units
from jaxsp.core.errors import UserError
from jaxsp.memory import memory_compile
from jaxsp.memory.memory_fit import CompiledStep
from jaxsp.planner.compile import gpus
from jaxsp.planner.compile.compiled import CompilerDump, PlannedStep
from jaxsp.planner.cost import comms, roofline
from jaxsp.reporting import metrics
from jaxsp.setup import build
from jaxsp.training import train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """Times, memory and losses of a few steps on the devices of this machine."""

    device_kind: str
    """JAX's name of the device."""
    num_devices: int
    mesh: dict[str, int]
    num_steps: int
    """Timed steps; one more, before them, is not timed."""
    losses: list[float]
    """Loss of each step, including the one that is not timed."""
    num_loss_tokens: list[int]
    step_s: float
    """Median time of a step; each is waited for."""
    tokens_per_s: float
    peak_gib: float | None
    """Peak memory use of a device; None if the devices do not report it."""
    device_gib: float
    """Memory of a device that the compiled step needs, including cuDNN's workspace."""
    host_gib: float
    """Host memory that the compiled step needs, for all devices."""
    remat: str
    kernel: str
    step_s_estimate: float | None
    """The planner's estimate; None for devices that it does not know, and dtypes other than
    bfloat16."""
    compile_s: float
    published_sizes: str | None = None
    """Source of published model sizes; None if the model's own config.json was used."""


def benchmark_steps(config: Config, *, num_steps: int) -> BenchmarkResult:
    """Times steps of a config from its initial weights.

    Raises: UserError for a config that cannot train here, and for a loss that is not finite.
    """
    with tempfile.TemporaryDirectory(prefix="jaxsp-benchmark-") as folder:
        run_config = _benchmark_config(config, pathlib.Path(folder) / "run", num_steps=num_steps)
        spec, inputs = build.build_training(run_config, devices=jax.devices())
    began = time.perf_counter()
    step = memory_compile.compile_fitting_step(spec)
    memory_compile.reserve_host_memory(spec, step.memory_use.host)
    compile_s = time.perf_counter() - began
    state = train_state.init_state(spec, inputs.make_weights())
    loader = inputs.train_set.make_loader(spec.config, inputs.schedule, spec.placement)
    seconds = []
    results = []
    segment_lengths = np.zeros(0, np.int64)
    for batch, counts in loader.batches():
        began = time.perf_counter()
        state, step_results = jax.block_until_ready(step.executable(state, batch))
        seconds.append(time.perf_counter() - began)
        results.append(jax.device_get(step_results))
        segment_lengths = counts.segment_lengths
    losses = [float(step_results["loss"]) for step_results in results]
    if not np.isfinite(losses).all():
        first = int(np.argmin(np.isfinite(losses))) + 1
        raise UserError(f"the loss is not finite after step {first}: {losses}")
    step_s = statistics.median(seconds[1:])
    num_tokens = [int(step_results["num_tokens"]) for step_results in results[1:]]
    return BenchmarkResult(
        device_kind=jax.devices()[0].device_kind,
        num_devices=spec.mesh.size,
        mesh={axis: spec.mesh.shape[axis] for axis in axes.ALL},
        num_steps=num_steps,
        losses=losses,
        num_loss_tokens=[int(step_results["num_loss_tokens"]) for step_results in results],
        step_s=step_s,
        tokens_per_s=statistics.mean(num_tokens) / step_s,
        peak_gib=metrics.peak_gib(jax.local_devices()),
        device_gib=step.memory_use.device_total / units.GIB,
        host_gib=step.memory_use.host * spec.mesh.size / units.GIB,
        remat=step.spec.remat_policy.remat,
        kernel=spec.attention.kernel.name,
        step_s_estimate=_estimate_step_s(step, segment_lengths),
        compile_s=compile_s,
    )


def _benchmark_config(config: Config, directory: pathlib.Path, *, num_steps: int) -> Config:
    """Config of a run of 1 + num_steps steps, without evaluation and profiling."""
    run = {
        "directory": str(directory),
        "steps": 1 + num_steps,
        "epochs": None,
        "resume": "never",
    }
    checkpoint = {"keep_best": 0, "best_eval": None}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update=run),
            "data": config.data.model_copy(update={"eval": ()}),
            "eval": config.eval.model_copy(update={"tasks": ()}),
            "checkpoint": config.checkpoint.model_copy(update=checkpoint),
            "logging": config.logging.model_copy(update={"profile_steps": None}),
        }
    )


def _estimate_step_s(step: CompiledStep, segment_lengths: np.ndarray) -> float | None:
    """The planner's estimate of the step time; None for unknown devices."""
    gpu = gpus.find_by_device_kind(jax.devices()[0].device_kind)
    if gpu is None:
        return None
    hlo_text = step.executable.as_text() or ""
    planned = PlannedStep(
        spec=step.spec,
        executable=step.executable,
        dump=CompilerDump(hlo_text=hlo_text, buffer_assignment="", live_ranges=""),
    )
    estimate = roofline.estimate_step(
        planned,
        comms.parse_collectives(hlo_text),
        ceilings=gpu.ceilings,
        node_devices=step.spec.mesh.size,
        segment_lengths=segment_lengths,
    )
    return None if estimate is None else estimate.step_s
