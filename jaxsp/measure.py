"""python -m jaxsp.measure CONFIG.yaml --steps N [key.path=value ...]: times some steps, and keeps nothing of them."""

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
import rich.console

from jaxsp import cli
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.hf import published
from jaxsp.planner.compile import gpus
from jaxsp.planner.compile.compiled import CompilerDump, PlannedStep
from jaxsp.planner.cost import comms, roofline
from jaxsp.reporting import metrics
from jaxsp.run import build
from jaxsp.runtime import jax_platform
from jaxsp.training import memory_fit, memory_options, train_step
from jaxsp.training.memory_fit import CompiledStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """What some steps on the devices that are here took."""

    device_kind: str
    """JAX's name of its kind."""
    num_devices: int
    mesh: dict[str, int]
    num_steps: int
    """That were timed; one before them was not."""
    losses: list[float]
    """Of each step, that one too."""
    num_loss_tokens: list[int]
    step_s: float
    """Median of steps that were each waited for."""
    tokens_per_s: float
    peak_gib: float | None
    """The most memory that a device had in use; None where devices do not say."""
    device_gib: float
    """What the compiled step says that it takes of a device, cuDNN's allowance included."""
    host_gib: float
    """What it says that it takes of the host, for all devices."""
    remat: str
    kernel: str
    step_s_estimate: float | None
    """As a plan estimates it; None for devices that planner.gpus does not know, and other dtypes than bfloat16."""
    compile_s: float
    published_sizes: str | None = None
    """Why and from where published sizes were used; None: the model's own config.json."""


def main(arguments: list[str]) -> None:
    """The command."""
    parser = cli.make_parser(
        "measure",
        "Times steps of a run on the devices that are here; writes no run directory, and trains nothing further.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument(
        "changes",
        metavar="key.path=value",
        nargs="*",
        default=[],
        help="changes a field of the config",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=5,
        help="to time, after one that is not; default: 5",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=pathlib.Path, help="writes what was measured there too"
    )
    given = parser.parse_intermixed_args(arguments)
    if given.steps < 1:
        raise UserError(f"--steps = {given.steps}: there is nothing to time. Use 1 or more.")
    config = config_file.load(given.config, given.changes)
    if given.json:
        cli.check_file(given.json, flag="--json")
    console = rich.console.Console(markup=False)
    sizes = published.read_sizes(config.model)
    if sizes.note:
        console.print(f"{sizes.note}; random weights", soft_wrap=True, highlight=False)
        config = config_file.load(given.config, [*given.changes, *sizes.overrides])
    jax_platform.choose_platform(virtual_cpu_devices=config.mesh.virtual_cpu_devices)
    found = dataclasses.replace(
        benchmark_steps(config, num_steps=given.steps), published_sizes=sizes.note or None
    )
    peak = "" if found.peak_gib is None else f", {found.peak_gib:.2f} GiB at most"
    console.print(
        f"{found.num_devices} x {found.device_kind}, mesh {' x '.join(f'{axis} {size}' for axis, size in found.mesh.items())}: "
        f"{found.step_s:.4g} s a step, {found.tokens_per_s:,.0f} tokens/s{peak}; planned {found.device_gib:.2f} GiB; losses "
        f"{found.losses[0]:.4f} to {found.losses[-1]:.4f}",
        soft_wrap=True,
        highlight=False,
    )
    if given.json:
        given.json.write_text(
            json.dumps(dataclasses.asdict(found), indent=1, allow_nan=False) + "\n",
            encoding="utf-8",
        )


def benchmark_steps(config: Config, *, num_steps: int) -> BenchmarkResult:
    """Times so many steps of a config from its first weights on.

    Raises: what `prepare.training` and `levers.ready` raise.
    """
    with tempfile.TemporaryDirectory(prefix="jaxsp-measure-") as folder:
        run = {
            "directory": str(pathlib.Path(folder) / "run"),
            "steps": 1 + num_steps,
            "epochs": None,
            "resume": "never",
        }
        changed = config.model_copy(
            update={
                "run": config.run.model_copy(update=run),
                "data": config.data.model_copy(update={"eval": ()}),
                "checkpoint": config.checkpoint.model_copy(
                    update={"keep_best": 0, "best_eval": None}
                ),
                "logging": config.logging.model_copy(update={"profile_steps": None}),
            }
        )
        program, material = build.build_training(changed, devices=jax.devices())
    config = program.config
    began, ready = time.perf_counter(), {}
    for row_tokens in reversed(config.data.row_lengths):
        of_length = dataclasses.replace(program, config=config.with_row_tokens(row_tokens))
        ready[row_tokens] = memory_options.compile_fitting_step(
            of_length, workspace_bytes=material.attention_choice.workspace_bytes
        )
    longest = ready[config.data.max_row_tokens]
    memory_options.reserve_host_memory(program, longest.memory_use.host)
    compile_s = time.perf_counter() - began
    state = train_step.init_state(program, material.make_weights())
    feed = material.train_set.make_loader(
        config, program.mesh, material.schedule, layout_degree=program.attend.layout_degree
    )
    seconds, numbers, lengths = [], [], []
    for rows, counts in feed.batches():
        began = time.perf_counter()
        state, found = jax.block_until_ready(ready[counts.row_tokens].executable(state, rows))
        seconds.append(time.perf_counter() - began)
        numbers.append(jax.device_get(found))
        lengths.append(counts.segment_lengths)
    losses = [float(one.loss) for one in numbers]
    if not np.isfinite(losses).all():
        raise UserError(
            f"the loss is not finite after step {int(np.argmin(np.isfinite(losses))) + 1}: {losses}"
        )
    device, step_s = jax.devices()[0], statistics.median(seconds[1:])
    tokens = statistics.mean(int(one.num_tokens) for one in numbers[1:])
    return BenchmarkResult(
        device_kind=device.device_kind,
        num_devices=program.mesh.size,
        mesh={axis: program.mesh.shape[axis] for axis in axes.ALL},
        num_steps=num_steps,
        losses=losses,
        num_loss_tokens=[int(one.num_loss_tokens) for one in numbers],
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        peak_gib=metrics.peak_gib(jax.local_devices()),
        device_gib=longest.memory_use.device_total / memory_fit.GIB,
        host_gib=longest.memory_use.host * program.mesh.size / memory_fit.GIB,
        remat=longest.program.remat_policy.remat,
        kernel=material.attention_choice.kernel,
        step_s_estimate=_estimate_step_s(longest, material.attention_choice, lengths[-1]),
        compile_s=compile_s,
    )


def _estimate_step_s(ready: CompiledStep, choice: Any, piece_lengths: np.ndarray) -> float | None:
    """Seconds of a step, as a plan estimates them."""
    gpu = gpus.find_by_device_kind(jax.devices()[0].device_kind)
    if gpu is None:
        return None
    written = CompilerDump(
        hlo_text=ready.executable.as_text() or "", buffer_assignment="", live_ranges=""
    )
    here = PlannedStep(
        program=ready.program, choice=choice, executable=ready.executable, dump=written
    )
    expected = roofline.estimate_step(
        here,
        comms.parse_collectives(written.hlo_text),
        ceilings=gpu.ceilings,
        node_devices=ready.program.mesh.size,
        segment_lengths=piece_lengths,
    )
    return None if expected is None else expected.step_s


if __name__ == "__main__":
    cli.run_command(main)
