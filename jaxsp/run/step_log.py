"""Records each step after it ends: metrics.jsonl, progress, totals, and non-finite steps."""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxsp.data.packing.loader import StepCounts
from jaxsp.evaluation import evaluator
from jaxsp.model import flops
from jaxsp.run import metrics
from jaxsp.run.metrics import MetricsWriter, StepFields
from jaxsp.run.nonfinite import NonfiniteTracker
from jaxsp.run.progress import Progress
from jaxsp.run.run import Run
from jaxsp.system.run_status import RunStatus
from jaxsp.training import metric_table
from jaxsp.training.metric_table import Line
from jaxsp.training.train_step import StepResults

SLOW_MFU = 0.01
"""MFU of a slow step, for an upper estimate of a step's duration: in float32, without cuDNN."""

_SEEN_TOGETHER = 0.1
"""Two ends count as seen together if the second follows within this fraction of the time of both
steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchedStep:
    """A step that the devices are running."""

    results: StepResults
    counts: StepCounts
    batch_requested_at: float
    """Time at which the loop requested the step's batch (time.perf_counter)."""
    batch_ready_at: float
    """Time at which the batch was ready (time.perf_counter)."""
    end_time: "EndTime"


class EndTime:
    """Time at which the results of a step were ready.

    A thread waits for them, because the loop may read them only after the next step has ended.
    """

    def __init__(self, results: Any):
        self._results = results
        self._time = 0.0
        self._thread = threading.Thread(target=self._wait, args=(results,), daemon=True)
        self._thread.start()

    def _wait(self, results: Any) -> None:
        # The loop raises the same error when it reads the results
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(results)
        self._time = time.perf_counter()

    def get(self) -> float:
        """Waits for the results, and returns the time (time.perf_counter)."""
        self._thread.join()
        return self._time

    @property
    def is_over(self) -> bool:
        """True if the results are ready; the thread may not have noticed it yet."""
        return all(array.is_ready() for array in jax.tree.leaves(self._results))


def split_time(began: float, ended: float, *, next_ended: float) -> float:
    """Returns the time at which a step ended, after which the next one has ended already.

    A busy host notices both ends late and together. The steps then share the time equally, because
    the first would take all of it and the next one microseconds.
    """
    ended = max(began, ended)
    next_ended = max(ended, next_ended)
    if next_ended - ended < _SEEN_TOGETHER * (next_ended - began):
        return (began + next_ended) / 2
    return ended


class StepLog:
    """Turns finished steps into lines of metrics.jsonl and into progress."""

    def __init__(
        self,
        run: Run,
        writer: MetricsWriter,
        progress: Progress,
        status: RunStatus,
    ):
        self._run = run
        self._writer = writer
        self._progress = progress
        self._status = status
        self._began = time.perf_counter()
        self._ended = self._began
        self._batch_requested_at = self._began
        self._batch_ready_at = self._began
        self._previous_step: DispatchedStep | None = None
        self._num_finished = run.start.step
        self._num_tokens = run.start.num_tokens
        self._source_names = [source.name for source in run.train_set.documents.sources]
        self._checkpoint_wait_s = 0.0
        self.steps_s = 0.0
        """Seconds of the recorded steps, without evaluations, checkpoints and compilations."""
        self.recent_losses: collections.deque[float] = collections.deque(maxlen=20)
        self.nonfinite = NonfiniteTracker(run.config.run, writer)
        self.first_line: Line = {}
        """Line of the first recorded step; empty before it."""
        self.last_line: Line = {}

    @property
    def can_continue(self) -> bool:
        """True unless the run has too many non-finite steps."""
        return not self.nonfinite.is_over_limit

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of training to the end of the last recorded step."""
        return self._ended - self._began

    @contextlib.contextmanager
    def measure_batch_wait(self) -> Iterator[None]:
        """Measures the time until the next batch is ready."""
        self._batch_requested_at = time.perf_counter()
        yield
        self._batch_ready_at = time.perf_counter()

    def record_dispatch(self, results: StepResults, counts: StepCounts) -> None:
        """Records that a step was dispatched, and the results of the step before it."""
        dispatched = DispatchedStep(
            results=results,
            counts=counts,
            batch_requested_at=self._batch_requested_at,
            batch_ready_at=self._batch_ready_at,
            end_time=EndTime(results),
        )
        self.record_dispatched_step(following=dispatched)
        self._previous_step = dispatched

    def record_checkpoint_wait(self, seconds: float) -> None:
        """Adds to the time that the loop waited for checkpoints since the previous line."""
        self._checkpoint_wait_s += seconds

    def record_dispatched_step(self, following: DispatchedStep | None = None) -> None:
        """Waits for the step dispatched last, and records its results, unless they are recorded.

        Args: following: the step that was dispatched after it.
        """
        if self._previous_step is None:
            return
        step = self._previous_step
        self._previous_step = None
        results = jax.device_get(step.results)
        ended = step.end_time.get()
        if following is not None and following.end_time.is_over:
            ended = split_time(self._ended, ended, next_ended=following.end_time.get())
        ended = max(ended, self._ended + 1e-6)
        step_s = ended - self._ended
        self.steps_s += step_s
        # Waiting for a batch costs nothing while the previous step still runs
        wait_began = max(step.batch_requested_at, self._ended)
        data_wait_s = max(0.0, step.batch_ready_at - wait_began)
        self._ended = ended
        self._num_finished += 1
        self._status.finished(self._num_finished, step_s)
        self._num_tokens += int(results["num_tokens"])
        if not results["is_finite"]:
            loader = self._run.train_set.make_loader(self._run.schedule, self._run.spec.placement)
            step_index = self._num_finished - self._run.start.step - 1
            self.nonfinite.record_step(self._num_finished, results, loader, step_index)
            if self.can_continue:
                self._progress.print_line(
                    f"step {self._num_finished}  SKIPPED: the loss or the gradient norm is not "
                    f"finite; its documents are in {metrics.NONFINITE_FILE}"
                )
        self.last_line = self._build_line(step, results, step_s=step_s, data_wait_s=data_wait_s)
        self.first_line = self.first_line or self.last_line
        if self.last_line["loss"] is not None:
            self.recent_losses.append(self.last_line["loss"])
        is_due = evaluator.is_due(self._run.config.run.log_every, self._num_finished)
        if is_due or not results["is_finite"] or self._num_finished == self._run.spec.num_steps:
            self._writer.write_step(self.last_line)
            self._checkpoint_wait_s = 0.0
        self._progress.show_step(self.last_line)

    def restart_clock(self) -> None:
        """Excludes the time since the last step from the time of the next one.

        Does nothing if a step is running: the next one then follows it without a break.
        """
        if self._previous_step is None:
            self._ended = time.perf_counter()
            if not self.first_line:  # the first evaluation is not part of the training time
                self._began = self._ended
            self._status.waiting_for_step(self._num_finished)

    @property
    def num_steps(self) -> int:
        """Number of recorded steps since step 0."""
        assert self._previous_step is None, "the tokens of the running step are not counted yet"
        return self._num_finished

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the recorded steps since step 0."""
        return self._num_tokens

    def estimate_step_s(self, counts: StepCounts) -> float | None:
        """Upper estimate of a step's duration; None for devices of unknown speed."""
        peak = self._peak_tflops
        if peak is None:
            return None
        step_flops = self._count_flops(counts)
        return step_flops / (SLOW_MFU * peak * 1e12 * self._run.spec.mesh.size)

    def _count_flops(self, counts: StepCounts) -> float:
        return flops.step_flops(self._run.spec.model, counts.segment_lengths, self._run.spec.table)

    @property
    def _peak_tflops(self) -> float | None:
        return flops.peak_tflops(self._run.spec.mesh.devices.flat[0].device_kind)

    def _build_line(
        self, step: DispatchedStep, results: StepResults, *, step_s: float, data_wait_s: float
    ) -> Line:
        config = self._run.spec.config
        mesh = self._run.spec.mesh
        counts = step.counts
        num_devices = mesh.devices.size
        num_tokens = int(results["num_tokens"])
        tokens_per_s = num_tokens / step_s
        assert num_tokens == counts.segment_lengths.sum(), "the devices' count and the plan's"
        num_slots = config.rows_per_step * config.row_tokens
        tflops = self._count_flops(counts) / step_s / num_devices / 1e12
        peak = self._peak_tflops
        fields = StepFields(
            step=self._num_finished,
            epoch=None if counts.epoch is None else counts.epoch + 1,
            grad_norm=float(results["grad_norm"]) if np.isfinite(results["grad_norm"]) else None,
            learning_rate=float(results["learning_rate"]),
            num_tokens_total=self._num_tokens,
            num_tokens_by_source=dict(
                zip(self._source_names, counts.tokens_per_source, strict=True)
            ),
            padding_fraction=1 - num_tokens / num_slots,
            attention_imbalance=counts.imbalance,
            step_s=step_s,
            data_wait_s=data_wait_s,
            checkpoint_wait_s=self._checkpoint_wait_s or None,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=tokens_per_s / num_devices,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            device_peak_gib=metrics.peak_gib(mesh.local_devices),
        )
        return metric_table.make_line(fields, results, is_finite=bool(results["is_finite"]))
