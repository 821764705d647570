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
from jax.experimental import multihost_utils

from jaxsp.core import config, errors
from jaxsp.data import pipeline
from jaxsp.training import banner, checkpoint, evaluator, metrics, step
from jaxsp.training.material import Material
from jaxsp.training.step import Program


def train(program: Program, material: Material, console: rich.console.Console) -> None:
    """Trains from where the material begins to the last step, and writes the run directory.

    With several processes, all of them train and save together; process 0 alone writes the rest. A step whose loss or
    gradients are not finite ends the run: a checkpoint is written, and errors.Stopped raised.
    """
    settings, start = program.config, material.start
    directory = pathlib.Path(settings.run.directory)
    if start.step >= program.num_steps:
        console.print(f"{directory}: has all its {program.num_steps} steps. Raise run.steps or run.epochs to train longer.")
        return

    # What will happen, in words
    lines = banner.before(program, material)
    banner.show(console, lines)

    # Weights, rows and program
    if start.checkpoint is None:
        state = step.with_weights(program, material.weights())
    else:
        state = checkpoint.restore(start.checkpoint, step.shapes(program)[0], num_steps=start.step)
    steps = material.train.feed(program, total_rows=material.total_rows, first_row=start.rows).batches()
    began = time.perf_counter()
    with console.status("compiling the step"):
        run_step = step.compile(program)
    console.print(f"the step was compiled in {time.perf_counter() - began:.1f} s")
    evaluate = evaluator.Evaluator(program, material.evals)

    # From here on there is a run
    if jax.process_index() == 0:
        _begin(directory, settings, material, banner.text(lines))

    # Steps; the numbers of one are fetched when the next is under way
    with (
        metrics.Writer(directory, from_step=start.step, tensorboard=settings.logging.tensorboard) as writer,
        checkpoint.Store(directory / "checkpoints", keep=settings.checkpoint.keep_latest) as store,
        banner.Progress(console, first_step=start.step, num_steps=program.num_steps) as progress,
        metrics.Trace(directory / "profile", settings.logging.profile_steps) as trace,
        contextlib.closing(steps),
    ):
        log, save = Log(program, material, writer, progress), Saving(store, settings.run)
        following = next(steps, None)
        while following is not None and log.finite:
            rows, counts = following
            number = log.num_sent + 1
            if trace.begins(number):
                log.catch_up()
                trace.begin()
            state, numbers = run_step(state, rows)
            log.catch_up()
            # the step just sent off is running: its time holds this wait, and the rows travel meanwhile
            asked = time.perf_counter()
            following = next(steps, None)
            log.sent(Running(numbers=numbers, counts=counts, data_wait_s=time.perf_counter() - asked))
            last = following is None
            if trace.ends(number):
                log.catch_up()
                trace.end()
            if save.due(number) or last:
                log.catch_up()
                save(state, log.meta())
            if material.evals and (_due(settings.run.eval_every, number) or last):
                log.catch_up()
                for result in evaluate.run(state.master, num_steps=number) if log.finite else ():
                    writer.write_result(result)
                    progress.say(banner.result(result))
            log.go_on()
        log.catch_up()
        if not log.finite and save.last_step < log.num_sent:
            save(state, log.meta())
        store.finish()

    # What is left behind
    if not log.finite:
        saved = save.last_step
        raise errors.Stopped(
            f"step {log.broken}: the loss or the gradient norm is not finite. The step changed no weight; "
            f"{directory}/checkpoints/{saved} has the weights after {saved} steps, those that were not finite left out. "
            "A lower optimizer.learning_rate or more optimizer.warmup_steps usually help."
        )
    banner.show(console, banner.after(program, log.first, log.last, recent_losses=log.recent_losses, seconds=log.seconds))


def _begin(directory: pathlib.Path, settings: config.Config, material: Material, banner_text: str) -> None:
    """Makes the run's directory, with what can be written before the first step."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.UserError(f"run.directory = {directory}: cannot be made: {error.strerror}. Name another.") from None
    config.save(settings, directory / "config.yaml")
    (directory / "banner.txt").write_text(banner_text, encoding="utf-8")
    material.keep_model(directory / "model")


def _due(every: int | None, number: int) -> bool:
    return every is not None and number % every == 0


class Saving:
    """Writes checkpoints, and knows when the next is due."""

    def __init__(self, store: checkpoint.Store, settings: config.Run):
        self._store, self._settings = store, settings
        self._saved_at = time.monotonic()
        self.last_step = 0
        """Of the last checkpoint; 0 before the first."""

    def due(self, number: int) -> bool:
        """Whether a checkpoint is to follow a step; the same in all processes."""
        minutes = self._settings.save_minutes
        if minutes is None:
            return _due(self._settings.save_steps, number)
        due = time.monotonic() - self._saved_at >= 60 * minutes
        # clocks differ: process 0 has the word
        return due if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.bool_(due)))

    def __call__(self, state: step.State, meta: checkpoint.Meta) -> None:
        self._store.save(state, meta)
        self._saved_at, self.last_step = time.monotonic(), meta.step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """A step on its way through the devices."""

    numbers: step.Metrics
    counts: pipeline.Counts
    data_wait_s: float


class Log:
    """Turns finished steps into lines of metrics.jsonl and into progress."""

    def __init__(self, program: Program, material: Material, writer: metrics.Writer, progress: banner.Progress):
        self._program, self._material, self._writer, self._progress = program, material, writer, progress
        self._began = self._ended = time.perf_counter()
        self._running: Running | None = None
        self._num_steps, self._num_tokens = material.start.step, material.start.num_tokens
        self.recent_losses: collections.deque[float] = collections.deque(maxlen=20)
        self.broken: int | None = None
        """The first step that was not finite."""
        self.first: metrics.Line
        self.last: metrics.Line

    @property
    def num_sent(self) -> int:
        """Steps sent to the devices since step 0."""
        return self._num_steps + (self._running is not None)

    @property
    def finite(self) -> bool:
        return self.broken is None

    @property
    def seconds(self) -> float:
        """From before the first step to the end of the last."""
        return self._ended - self._began

    def sent(self, running: Running) -> None:
        """Notes the step that was sent to the devices."""
        assert self._running is None, "one at a time"
        self._running = running

    def catch_up(self) -> None:
        """Waits for the step that is running, if there is one, and records it."""
        if self._running is None:
            return
        running, self._running = self._running, None
        numbers = jax.device_get(running.numbers)
        now = time.perf_counter()
        step_s, self._ended = now - self._ended, now
        self._num_steps += 1
        self._num_tokens += int(numbers.num_tokens)
        if not numbers.finite and self.broken is None:
            self.broken = self._num_steps
        self.last = self._line(running, numbers, step_s)
        if self._num_steps == self._material.start.step + 1:
            self.first = self.last
        if self.last.loss is not None:
            self.recent_losses.append(self.last.loss)
        due = _due(self._program.config.run.log_every, self._num_steps)
        if due or not self.finite or self._num_steps == self._program.num_steps:
            self._writer.write(self.last)
        self._progress.show(self.last)

    def go_on(self) -> None:
        """Leaves out of the next step's time what was done while no step was running."""
        if self._running is None:
            self._ended = time.perf_counter()

    def meta(self) -> checkpoint.Meta:
        """What a checkpoint made now says of itself; all steps have to be recorded."""
        assert self._running is None, "the tokens of the running step are not counted yet"
        settings, start = self._program.config, self._material.start
        rows = start.rows + (self._num_steps - start.step) * settings.batch.rows_per_step
        return checkpoint.Meta(
            config=settings.model_dump(mode="json"),
            model=self._material.fields,
            data=self._material.train.fingerprint(settings),
            step=self._num_steps,
            rows=min(rows, self._material.total_rows),
            num_tokens_total=self._num_tokens,
        )

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
