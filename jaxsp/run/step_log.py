"""Records each step after it ends: its line, progress, totals, and non-finite steps."""

import collections
import contextlib
import dataclasses
import importlib.util
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxsp.core import files, units
from jaxsp.core.batch import Batch
from jaxsp.core.units import format_count
from jaxsp.data.loader import StepCounts
from jaxsp.model import flops
from jaxsp.run import metrics
from jaxsp.run.build import Run
from jaxsp.run.metrics import NonfiniteStep, StepFields
from jaxsp.run.run_directory import RunDirectory
from jaxsp.system.watchdog import RunStatus
from jaxsp.training import metric_table
from jaxsp.training.metric_table import Line
from jaxsp.training.train_step import StepResults

SLOW_MFU = 0.01
"""MFU of a slow step, for an upper estimate of a step's duration: in float32, without cuDNN."""

Step = tuple[Batch, StepCounts]


@dataclasses.dataclass
class DispatchedStep:
    """A step that the devices are running. Times are those of time.perf_counter.

    A thread waits for its results: the loop may read them only after the next step's end.
    """

    results: StepResults
    counts: StepCounts
    batch_requested_at: float
    batch_ready_at: float

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        # The loop raises the same error when it reads the results
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(self.results)
        self._ended_at = time.perf_counter()

    def wait_for_end(self) -> float:
        """Returns the time at which the results were ready."""
        self._thread.join()
        return self._ended_at

    @property
    def is_over(self) -> bool:
        """True if the results are ready; the thread may not have noticed it yet."""
        return all(array.is_ready() for array in jax.tree.leaves(self.results))


def split_time(began: float, ended: float, *, next_ended: float) -> float:
    """Returns the time at which a step ended, once the next one has ended too.

    A busy host notices both ends late and together: the first step would take all of the time, and
    the next one microseconds. So they share it if the second end follows within a tenth of it.
    """
    ended = max(began, ended)
    next_ended = max(ended, next_ended)
    if next_ended - ended < 0.1 * (next_ended - began):
        return (began + next_ended) / 2
    return ended


class StepLog:
    """Turns finished steps into lines of metrics.jsonl and into progress."""

    def __init__(self, run: Run, out: RunDirectory, status: RunStatus):
        self._run = run
        self._out = out
        self._status = status
        self.loader = run.train_set.make_loader(run.schedule, run.spec.placement)
        self._began = self._ended = time.perf_counter()
        self._batch_requested_at = self._batch_ready_at = self._began
        self._previous_step: DispatchedStep | None = None
        self._num_finished = run.start.step
        self.checkpoint_wait_s = 0.0
        """Seconds that the loop waited for checkpoints since the previous line."""
        self._steps_s = 0.0
        """Seconds of the recorded steps, without evaluations, checkpoints and compilations."""
        self._recent_losses: collections.deque[float] = collections.deque(maxlen=20)
        config = run.config.run
        self._max_nonfinite = config.max_nonfinite_steps if config.on_nonfinite == "skip" else 0
        self._nonfinite_steps: list[int] = []
        self._peak_tflops = flops.peak_tflops(run.spec.mesh.devices.flat[0].device_kind)
        self._first_loss: float | None = None
        self.num_tokens = run.start.num_tokens
        """Number of tokens in the recorded steps since step 0."""

    @property
    def can_continue(self) -> bool:
        """True unless the run has too many non-finite steps."""
        return len(self._nonfinite_steps) <= self._max_nonfinite

    @property
    def num_steps(self) -> int:
        """Number of recorded steps since step 0."""
        assert self._previous_step is None, "the tokens of the running step are not counted yet"
        return self._num_finished

    def read_batch(self, rows: Iterator[Step]) -> Step | None:
        """Reads the next batch, and measures the time until it is ready; None after the last."""
        self._batch_requested_at = time.perf_counter()
        batch = next(rows, None)
        self._batch_ready_at = time.perf_counter()
        return batch

    def record_dispatch(self, results: StepResults, counts: StepCounts) -> None:
        """Records that a step was dispatched, and the results of the step before it."""
        times = (self._batch_requested_at, self._batch_ready_at)
        dispatched = DispatchedStep(results, counts, *times)
        self.record_dispatched_step(following=dispatched)
        self._previous_step = dispatched

    def record_dispatched_step(self, following: DispatchedStep | None = None) -> None:
        """Waits for the step dispatched last and records it; `following` is dispatched after it."""
        if self._previous_step is None:
            return
        step = self._previous_step
        self._previous_step = None
        results = jax.device_get(step.results)
        began = self._ended
        ended = step.wait_for_end()
        if following is not None and following.is_over:
            ended = split_time(began, ended, next_ended=following.wait_for_end())
        self._ended = max(ended, began + 1e-6)
        step_s = self._ended - began
        # Waiting for a batch costs nothing while the previous step still runs
        data_wait_s = max(0.0, step.batch_ready_at - max(step.batch_requested_at, began))
        self._steps_s += step_s
        self._num_finished += 1
        self._status.finished(self._num_finished, step_s)
        self.num_tokens += int(results["num_tokens"])
        if not results["is_finite"]:
            self._record_nonfinite(results)
        line = self._build_line(step.counts, results, step_s=step_s, data_wait_s=data_wait_s)
        if self._num_finished == self._run.start.step + 1:
            self._first_loss = line["loss"]
        if line["loss"] is not None:
            self._recent_losses.append(line["loss"])
        is_due = self._num_finished % self._run.config.run.log_every == 0
        if is_due or not results["is_finite"] or self._num_finished == self._run.spec.num_steps:
            self._out.metrics.write(metrics.METRICS_FILE, line)
            self.checkpoint_wait_s = 0.0
        self._out.progress.show_step(line)

    def restart_clock(self) -> None:
        """Excludes the time since the last step from that of the next one, unless one runs."""
        if self._previous_step is None:
            self._ended = time.perf_counter()
            if self._num_finished == self._run.start.step:
                self._began = self._ended  # training time has no first evaluation
            self._status.waiting_for_step(self._num_finished)

    def estimate_step_s(self, counts: StepCounts) -> float | None:
        """Upper estimate of a step's duration; None for devices of unknown speed."""
        if self._peak_tflops is None:
            return None
        rate = SLOW_MFU * self._peak_tflops * 1e12 * self._run.spec.mesh.size
        return self._count_flops(counts) / rate

    def _count_flops(self, counts: StepCounts) -> float:
        return self._run.spec.count_flops(counts.segment_lengths)

    def _build_line(
        self, counts: StepCounts, results: StepResults, *, step_s: float, data_wait_s: float
    ) -> Line:
        config = self._run.spec.config
        mesh = self._run.spec.mesh
        num_tokens = int(results["num_tokens"])
        assert num_tokens == counts.segment_lengths.sum(), "the devices' count and the plan's"
        tflops = self._count_flops(counts) / step_s / mesh.size / 1e12
        names = [source.name for source in self._run.train_set.documents.sources]
        fields = StepFields(
            step=self._num_finished,
            epoch=None if counts.epoch is None else counts.epoch + 1,
            grad_norm=float(results["grad_norm"]) if np.isfinite(results["grad_norm"]) else None,
            learning_rate=float(results["learning_rate"]),
            num_tokens_total=self.num_tokens,
            num_tokens_by_source=dict(zip(names, counts.tokens_per_source, strict=True)),
            padding_fraction=1 - num_tokens / (config.rows_per_step * config.row_tokens),
            attention_imbalance=counts.imbalance,
            step_s=step_s,
            data_wait_s=data_wait_s,
            checkpoint_wait_s=self.checkpoint_wait_s or None,
            tokens_per_s=num_tokens / step_s,
            tokens_per_s_per_device=num_tokens / step_s / mesh.size,
            tflops_per_device=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            device_peak_gib=metrics.peak_gib(mesh.local_devices),
        )
        return metric_table.make_line(fields, results, is_finite=bool(results["is_finite"]))

    def _record_nonfinite(self, results: StepResults) -> None:
        """Records a step whose loss or gradient norm is not finite, with its documents."""
        step = self._num_finished
        self._nonfinite_steps.append(step)
        if jax.process_index() == 0:  # finding the documents takes time
            segments = self.loader.list_segments(step - self._run.start.step - 1)
            line = NonfiniteStep(
                step=step,
                loss=_to_json_number(results["loss"]),
                grad_norm=_to_json_number(results["grad_norm"]),
                learning_rate=float(results["learning_rate"]),
                rows=sorted({segment["row"] for segment in segments}),
                documents=segments,
            )
            self._out.metrics.write(metrics.NONFINITE_FILE, dataclasses.asdict(line))
        if self.can_continue:
            self._out.progress.print_line(
                f"step {step}  SKIPPED: the loss or the gradient norm is not finite; its documents "
                f"are in {metrics.NONFINITE_FILE}"
            )

    def describe_stop(self, *, saved_step: int) -> str:
        """Describes why too many non-finite steps ended the run. One more step than that of the
        last checkpoint, `saved_step`, was running when the limit was exceeded."""
        config = self._run.config.run
        reason = "the loss or the gradient norm is not finite"
        suggestion = "run.on_nonfinite=skip to skip such steps"
        if config.on_nonfinite == "skip":
            reason += ", in more steps since the process started than run.max_nonfinite_steps = "
            reason += str(self._max_nonfinite)
            suggestion = "a larger run.max_nonfinite_steps"
        return (
            f"step {self._nonfinite_steps[self._max_nonfinite]}: {reason}. The step changed no "
            f"weight. Its documents are in {config.directory}/{metrics.NONFINITE_FILE}; the "
            f"weights of step {saved_step} are in {config.directory}/checkpoints/{saved_step}. The "
            f"same command continues after that step. Use a lower optimizer.learning_rate, more "
            f"optimizer.warmup_steps, or {suggestion}."
        )

    def summarize(self) -> list[tuple[str, str]]:
        """Returns the summary of a finished run, with the commands to run next."""
        directory = self._run.config.run.directory
        start = self._run.start
        num_steps = format_count(self._num_finished - start.step, "step")
        num_tokens = self.num_tokens - start.num_tokens
        first_loss = "none" if self._first_loss is None else f"{self._first_loss:.4f}"
        losses = self._recent_losses
        mean_loss = f"{statistics.mean(losses):.4f}" if losses else "none"
        recent_steps = format_count(len(losses), "step")
        duration = units.format_seconds(self._ended - self._began)
        out = "hf" if files.is_url(directory) else f"{directory}/hf"
        evaluate = [f"eval {directory}"] if self._run.eval_sets else []
        report = [f"report {directory}"] if importlib.util.find_spec("plotly") else []
        commands = [*report, *evaluate, f"export {directory} {out}"]
        loss = f"{first_loss} at step {start.step + 1}, mean of the last {recent_steps} {mean_loss}"
        return [
            ("trained", f"{num_steps}, {format_count(num_tokens, 'token')} in {duration}"),
            ("loss", loss),
            ("speed", f"{num_tokens / self._steps_s:,.0f} tokens/s, mean of the steps"),
            ("output", f"{directory}/metrics.jsonl, {directory}/checkpoints/{self._num_finished}"),
            *zip(("next", "", ""), (f"jaxsp {command}" for command in commands), strict=False),
        ]


def _to_json_number(value: Any) -> float | str:
    return float(value) if np.isfinite(value) else str(float(value))
