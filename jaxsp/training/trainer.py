"""The training loop."""

import collections
import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np
import rich.console

from jaxsp.core import config, errors
from jaxsp.data import pipeline
from jaxsp.training import banner, checkpoint, metrics, step
from jaxsp.training.banner import Material
from jaxsp.training.step import Program


def train(program: Program, material: Material, console: rich.console.Console) -> None:
    """Trains from random weights to the last step, and writes the run directory.

    The weights are saved at the end, and when loss or gradients stop being finite, which raises errors.Stopped.
    """
    settings = program.config
    directory = pathlib.Path(settings.run.directory)

    # What will happen, in words
    lines = banner.before(program, material)
    banner.show(console, lines)

    # Weights, rows and program
    state = step.start(program, seed=settings.run.seed)
    steps = pipeline.Pipeline(
        material.documents,
        material.epochs,
        mesh=program.mesh,
        rows_per_step=settings.batch.rows_per_step,
        rows_at_once=settings.batch.rows_at_once,
        row_tokens=settings.data.row_tokens,
        max_pieces=settings.data.max_documents_per_row,
        total_rows=material.total_rows,
    ).batches()
    began = time.perf_counter()
    with console.status("compiling the step"):
        run_step = step.compile(program)
    console.print(f"the step was compiled in {time.perf_counter() - began:.1f} s")

    # From here on there is a run
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.UserError(f"run.directory = {directory}: cannot be made: {error.strerror}. Name another.") from None
    config.save(settings, directory / "config.yaml")
    (directory / "banner.txt").write_text(banner.text(lines), encoding="utf-8")

    # Steps; the numbers of one are fetched when the next is under way
    with (
        metrics.Writer(directory / "metrics.jsonl") as writer,
        banner.Progress(console, num_steps=program.num_steps) as progress,
        contextlib.closing(steps),
    ):
        following = next(steps, None)
        log = Log(program, writer, progress)
        running: Running | None = None
        while following is not None and log.finite:
            rows, counts = following
            state, numbers = run_step(state, rows)
            if running is not None:
                log.end(running)
            # the step just sent off is running: its time holds this wait, and the rows travel meanwhile
            asked = time.perf_counter()
            following = next(steps, None)
            running = Running(numbers=numbers, counts=counts, data_wait_s=time.perf_counter() - asked)
        assert running is not None, "a run has a step"
        log.end(running)

    # What is left behind
    saved = int(state.step)
    meta = {"config": settings.model_dump(mode="json"), "step": saved, "num_tokens_total": log.last.num_tokens_total}
    checkpoint.save(directory / "checkpoints", saved, master=state.master, meta=meta)
    if not log.finite:
        raise errors.Stopped(
            f"step {log.broken}: the loss or the gradient norm is not finite. The step changed no weight; "
            f"{directory}/checkpoints/{saved} has the weights after {saved} steps, those that were not finite left out. "
            "A lower optimizer.learning_rate or more optimizer.warmup_steps usually help."
        )
    banner.show(console, banner.after(program, log.first, log.last, recent_losses=log.recent_losses, seconds=log.seconds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """A step on its way through the devices."""

    numbers: step.Metrics
    counts: pipeline.Counts
    data_wait_s: float


class Log:
    """Turns finished steps into lines of metrics.jsonl and into progress."""

    def __init__(self, program: Program, writer: metrics.Writer, progress: banner.Progress):
        self._program, self._writer, self._progress = program, writer, progress
        self._began = self._ended = time.perf_counter()
        self._num_steps = self._num_tokens = 0
        self.recent_losses: collections.deque[float] = collections.deque(maxlen=20)
        self.broken: int | None = None
        """The first step that was not finite."""
        self.first: metrics.Line
        self.last: metrics.Line

    @property
    def finite(self) -> bool:
        return self.broken is None

    @property
    def seconds(self) -> float:
        """From before the first step to the end of the last."""
        return self._ended - self._began

    def end(self, running: Running) -> None:
        """Waits for the step to end and records it."""
        numbers = jax.device_get(running.numbers)
        now = time.perf_counter()
        step_s, self._ended = now - self._ended, now
        self._num_steps += 1
        self._num_tokens += int(numbers.num_tokens)
        if not numbers.finite and self.broken is None:
            self.broken = self._num_steps
        self.last = self._line(running, numbers, step_s)
        if self._num_steps == 1:
            self.first = self.last
        if self.last.loss is not None:
            self.recent_losses.append(self.last.loss)
        due = self._num_steps % self._program.config.run.log_every == 0
        if due or not self.finite or self._num_steps == self._program.num_steps:
            self._writer.write(self.last)
        self._progress.show(self.last)

    def _line(self, running: Running, numbers: step.Metrics, step_s: float) -> metrics.Line:
        config, mesh = self._program.config, self._program.mesh
        num_devices, num_tokens = mesh.devices.size, int(numbers.num_tokens)
        assert num_tokens == running.counts.piece_lengths.sum(), "the devices' count and the plan's"
        tflops = metrics.step_flops(self._program.model, running.counts.piece_lengths) / step_s / num_devices / 1e12
        peak = metrics.peak_tflops(mesh.devices.flat[0].device_kind)
        return metrics.Line(
            step=self._num_steps,
            epoch=running.counts.epoch + 1,
            loss=_finite(numbers.loss) if numbers.num_loss_tokens else None,
            token_accuracy=_finite(numbers.token_accuracy) if numbers.num_loss_tokens else None,
            grad_norm=_finite(numbers.grad_norm),
            learning_rate=float(numbers.learning_rate),
            num_rows=int(numbers.num_rows),
            num_tokens=num_tokens,
            num_loss_tokens=int(numbers.num_loss_tokens),
            num_tokens_total=self._num_tokens,
            padding_share=1 - num_tokens / (config.batch.rows_per_step * config.data.row_tokens),
            step_s=step_s,
            data_wait_s=running.data_wait_s,
            tokens_per_s=num_tokens / step_s,
            tokens_per_s_per_device=num_tokens / step_s / num_devices,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            device_peak_gib=metrics.peak_gib(mesh.local_devices),
        )


def _finite(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if np.isfinite(value) else None
