"""What is noted of each step when it has ended."""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxsp.data.packing import pipeline
from jaxsp.model import flops
from jaxsp.reporting import banner, metrics, nonfinite
from jaxsp.runtime import run_status
from jaxsp.training import evaluator, train_step
from jaxsp.training.inputs import Material
from jaxsp.training.train_step import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """A step on its way through the devices."""

    numbers: train_step.Metrics
    counts: pipeline.Counts
    rows_asked: float
    """When the loop asked for its rows, a time of time.perf_counter."""
    rows_there: float
    end: "EndTime"


class EndTime:
    """Time at which the results of a step were ready.

    A thread notes it. The loop may read the results later, when the next step has ended too.
    """

    def __init__(self, results: Any):
        self._at = 0.0
        self._thread = threading.Thread(target=self._note, args=(results,), daemon=True)
        self._thread.start()

    def _note(self, results: Any) -> None:
        # the loop raises the same error when it reads the results
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(results)
        self._at = time.perf_counter()

    def get(self) -> float:
        """Waits for the results. Returns a time of time.perf_counter."""
        self._thread.join()
        return self._at


class Log:
    """Turns finished steps into lines of metrics.jsonl and into progress."""

    def __init__(
        self, program: Program, material: Material, writer: metrics.Writer, progress: banner.Progress, pace: run_status.Pace
    ):
        self._pace = pace
        self._program, self._material, self._writer, self._progress = program, material, writer, progress
        self._began = self._ended = time.perf_counter()
        self._rows_asked = self._rows_there = self._began
        self._running: Running | None = None
        self._num_steps, self._num_tokens = material.start.step, material.start.num_tokens
        self._source_names = [source.name for source in material.train.documents.sources]
        self.recent_losses: collections.deque[float] = collections.deque(maxlen=20)
        run = program.config.run
        self.bad = nonfinite.BadSteps(run, writer)
        self.save_s: float | None = None
        """Seconds that checkpoints kept steps from beginning since the line before."""
        self.first: metrics.Line
        self.last: metrics.Line

    @property
    def num_sent(self) -> int:
        """Steps sent to the devices since step 0."""
        return self._num_steps + (self._running is not None)

    @property
    def goes_on(self) -> bool:
        """Whether no step has ended the run because its numbers are not finite."""
        return not self.bad.end_the_run

    @property
    def seconds(self) -> float:
        """From before the first step to the end of the last."""
        return self._ended - self._began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures how long the rows of the next step take."""
        self._rows_asked = time.perf_counter()
        yield
        self._rows_there = time.perf_counter()

    def sent(self, numbers: train_step.Metrics, counts: pipeline.Counts) -> None:
        """Records the step that was running, then notes the one that was sent to the devices."""
        running = Running(
            numbers=numbers,
            counts=counts,
            rows_asked=self._rows_asked,
            rows_there=self._rows_there,
            end=EndTime(numbers),
        )
        self.catch_up()
        self._running = running

    def catch_up(self) -> None:
        """Waits for the step that is running, if there is one, and records it."""
        if self._running is None:
            return
        running, self._running = self._running, None
        numbers = jax.device_get(running.numbers)
        # threads may note the ends of two steps in either order
        ended = max(running.end.get(), self._ended + 1e-6)
        step_s = ended - self._ended
        # rows that arrive while the step before runs cost nothing
        data_wait_s = max(0.0, running.rows_there - max(running.rows_asked, self._ended))
        self._ended = ended
        self._num_steps += 1
        self._pace.ended(self._num_steps, step_s)
        self._num_tokens += int(numbers.num_tokens)
        if not numbers.finite:
            settings, material = self._program.config, self._material
            feed = material.train.feed(settings, self._program.mesh, material.schedule, layout=self._program.attend.layout)
            self.bad.add(self._num_steps, numbers, feed, self._num_steps - material.start.step - 1)
            if self.goes_on:
                self._progress.say(f"step {self._num_steps}  IS LEFT OUT: not finite; {metrics.BAD_STEPS} names its documents")
        self.last = self._line(running, numbers, step_s=step_s, data_wait_s=data_wait_s)
        if self._num_steps == self._material.start.step + 1:
            self.first = self.last
        if self.last.loss is not None:
            self.recent_losses.append(self.last.loss)
        due = evaluator.due(self._program.config.run.log_every, self._num_steps)
        if due or not numbers.finite or self._num_steps == self._program.num_steps:
            self._writer.write(self.last)
            self.save_s = None
        self._progress.show(self.last)

    def go_on(self) -> None:
        """Leaves out of the next step's time what was done while no step was running."""
        if self._running is None:
            self._ended = time.perf_counter()
            self._pace.waits(self._num_steps)

    @property
    def num_steps(self) -> int:
        """Steps recorded so far."""
        assert self._running is None, "the tokens of the running step are not counted yet"
        return self._num_steps

    @property
    def num_tokens(self) -> int:
        """Tokens of the recorded steps."""
        return self._num_tokens

    def _line(self, running: Running, numbers: train_step.Metrics, *, step_s: float, data_wait_s: float) -> metrics.Line:
        config, mesh, counts = self._program.config, self._program.mesh, running.counts
        num_devices, num_tokens = mesh.devices.size, int(numbers.num_tokens)
        assert num_tokens == counts.piece_lengths.sum(), "the devices' count and the plan's"
        tflops = flops.step_flops(self._program.model, counts.piece_lengths) / step_s / num_devices / 1e12
        peak = flops.peak_tflops(mesh.devices.flat[0].device_kind)
        return metrics.Line(
            step=self._num_steps,
            epoch=None if counts.epoch is None else counts.epoch + 1,
            loss=_finite(numbers.loss) if numbers.num_loss_tokens else None,
            token_accuracy=float(numbers.token_accuracy) if numbers.num_loss_tokens and numbers.finite else None,
            grad_norm=_finite(numbers.grad_norm),
            learning_rate=float(numbers.learning_rate),
            num_rows=int(numbers.num_rows),
            num_tokens=num_tokens,
            num_loss_tokens=int(numbers.num_loss_tokens),
            num_tokens_total=self._num_tokens,
            num_tokens_by_source=dict(zip(self._source_names, counts.tokens_of_sources, strict=True)),
            row_tokens=counts.row_tokens,
            padding_share=1 - num_tokens / (config.batch.rows_per_step * config.data.longest_row),
            attention_imbalance=counts.imbalance,
            step_s=step_s,
            data_wait_s=data_wait_s,
            save_s=self.save_s,
            tokens_per_s=num_tokens / step_s,
            tokens_per_s_per_device=num_tokens / step_s / num_devices,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            device_peak_gib=metrics.peak_gib(mesh.local_devices),
        )


def _finite(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if np.isfinite(value) else None
