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

from jaxsp.data.packing.pipeline import StepCounts
from jaxsp.model import flops
from jaxsp.reporting import metrics
from jaxsp.reporting.banner import Progress
from jaxsp.reporting.metrics import MetricsLine, MetricsWriter
from jaxsp.reporting.nonfinite import NonfiniteTracker
from jaxsp.runtime.run_status import RunStatus
from jaxsp.training import evaluator
from jaxsp.training.inputs import RunInputs
from jaxsp.training.train_step import Program, StepMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchedStep:
    """A step on its way through the devices."""

    metrics: StepMetrics
    counts: StepCounts
    batch_requested_at: float
    """When the loop asked for its rows, a time of time.perf_counter."""
    batch_ready_at: float
    end_time: "EndTime"


class EndTime:
    """Time at which the results of a step were ready.

    A thread notes it. The loop may read the results later, when the next step has ended too.
    """

    def __init__(self, results: Any):
        self._time = 0.0
        self._thread = threading.Thread(target=self._wait, args=(results,), daemon=True)
        self._thread.start()

    def _wait(self, results: Any) -> None:
        # the loop raises the same error when it reads the results
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(results)
        self._time = time.perf_counter()

    def get(self) -> float:
        """Waits for the results. Returns a time of time.perf_counter."""
        self._thread.join()
        return self._time


class StepLog:
    """Turns finished steps into lines of metrics.jsonl and into progress."""

    def __init__(
        self,
        program: Program,
        inputs: RunInputs,
        writer: MetricsWriter,
        progress: Progress,
        status: RunStatus,
    ):
        self._status = status
        self._program, self._inputs, self._writer, self._progress = (
            program,
            inputs,
            writer,
            progress,
        )
        self._began = self._ended = time.perf_counter()
        self._batch_requested_at = self._batch_ready_at = self._began
        self._previous_step: DispatchedStep | None = None
        self._num_finished, self._num_tokens = inputs.start.step, inputs.start.num_tokens
        self._source_names = [source.name for source in inputs.train_set.documents.sources]
        self.recent_losses: collections.deque[float] = collections.deque(maxlen=20)
        run = program.config.run
        self.nonfinite = NonfiniteTracker(run, writer)
        self.checkpoint_wait_s: float | None = None
        """Seconds that checkpoints kept steps from beginning since the line before."""
        self.first_line: MetricsLine
        self.last_line: MetricsLine

    @property
    def num_dispatched(self) -> int:
        """Steps sent to the devices since step 0."""
        return self._num_finished + (self._previous_step is not None)

    @property
    def can_continue(self) -> bool:
        """Whether no step has ended the run because its numbers are not finite."""
        return not self.nonfinite.is_over_limit

    @property
    def elapsed_s(self) -> float:
        """From before the first step to the end of the last."""
        return self._ended - self._began

    @contextlib.contextmanager
    def measure_batch_wait(self) -> Iterator[None]:
        """Measures how long the rows of the next step take."""
        self._batch_requested_at = time.perf_counter()
        yield
        self._batch_ready_at = time.perf_counter()

    def record_dispatch(self, metrics: StepMetrics, counts: StepCounts) -> None:
        """Records the step that was running, then notes the one that was sent to the devices."""
        running = DispatchedStep(
            metrics=metrics,
            counts=counts,
            batch_requested_at=self._batch_requested_at,
            batch_ready_at=self._batch_ready_at,
            end_time=EndTime(metrics),
        )
        self.record_previous_step()
        self._previous_step = running

    def record_previous_step(self) -> None:
        """Waits for the step that is running, if there is one, and records it."""
        if self._previous_step is None:
            return
        running, self._previous_step = self._previous_step, None
        numbers = jax.device_get(running.metrics)
        # threads may note the ends of two steps in either order
        ended = max(running.end_time.get(), self._ended + 1e-6)
        step_s = ended - self._ended
        # rows that arrive while the step before runs cost nothing
        data_wait_s = max(
            0.0, running.batch_ready_at - max(running.batch_requested_at, self._ended)
        )
        self._ended = ended
        self._num_finished += 1
        self._status.finished(self._num_finished, step_s)
        self._num_tokens += int(numbers.num_tokens)
        if not numbers.is_finite:
            config, material = self._program.config, self._inputs
            feed = material.train_set.make_loader(
                config,
                self._program.mesh,
                material.schedule,
                layout_degree=self._program.attend.layout_degree,
            )
            self.nonfinite.record_step(
                self._num_finished, numbers, feed, self._num_finished - material.start.step - 1
            )
            if self.can_continue:
                self._progress.print_line(
                    f"step {self._num_finished}  IS LEFT OUT: not finite; {metrics.NONFINITE_FILE} names its documents"
                )
        self.last_line = self._build_line(running, numbers, step_s=step_s, data_wait_s=data_wait_s)
        if self._num_finished == self._inputs.start.step + 1:
            self.first_line = self.last_line
        if self.last_line.loss is not None:
            self.recent_losses.append(self.last_line.loss)
        due = evaluator.is_due(self._program.config.run.log_every, self._num_finished)
        if due or not numbers.is_finite or self._num_finished == self._program.num_steps:
            self._writer.write_step(self.last_line)
            self.checkpoint_wait_s = None
        self._progress.show_step(self.last_line)

    def restart_clock(self) -> None:
        """Leaves out of the next step's time what was done while no step was running."""
        if self._previous_step is None:
            self._ended = time.perf_counter()
            self._status.waiting_for_step(self._num_finished)

    @property
    def num_steps(self) -> int:
        """Steps recorded so far."""
        assert self._previous_step is None, "the tokens of the running step are not counted yet"
        return self._num_finished

    @property
    def num_tokens(self) -> int:
        """Tokens of the recorded steps."""
        return self._num_tokens

    def _build_line(
        self, running: DispatchedStep, numbers: StepMetrics, *, step_s: float, data_wait_s: float
    ) -> MetricsLine:
        config, mesh, counts = self._program.config, self._program.mesh, running.counts
        num_devices, num_tokens = mesh.devices.size, int(numbers.num_tokens)
        assert num_tokens == counts.segment_lengths.sum(), "the devices' count and the plan's"
        tflops = (
            flops.step_flops(self._program.model, counts.segment_lengths)
            / step_s
            / num_devices
            / 1e12
        )
        peak = flops.peak_tflops(mesh.devices.flat[0].device_kind)
        return MetricsLine(
            step=self._num_finished,
            epoch=None if counts.epoch is None else counts.epoch + 1,
            loss=_finite_or_none(numbers.loss) if numbers.num_loss_tokens else None,
            token_accuracy=float(numbers.token_accuracy)
            if numbers.num_loss_tokens and numbers.is_finite
            else None,
            grad_norm=_finite_or_none(numbers.grad_norm),
            learning_rate=float(numbers.learning_rate),
            num_rows=int(numbers.num_rows),
            num_tokens=num_tokens,
            num_loss_tokens=int(numbers.num_loss_tokens),
            num_tokens_total=self._num_tokens,
            num_tokens_by_source=dict(
                zip(self._source_names, counts.tokens_per_source, strict=True)
            ),
            row_tokens=counts.row_tokens,
            padding_fraction=1
            - num_tokens / (config.batch.rows_per_step * config.data.max_row_tokens),
            attention_imbalance=counts.imbalance,
            step_s=step_s,
            data_wait_s=data_wait_s,
            checkpoint_wait_s=self.checkpoint_wait_s,
            tokens_per_s=num_tokens / step_s,
            tokens_per_s_per_device=num_tokens / step_s / num_devices,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            device_peak_gib=metrics.peak_gib(mesh.local_devices),
        )


def _finite_or_none(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if np.isfinite(value) else None
