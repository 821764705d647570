"""Schedules of checkpoints and of early stopping, decided identically in all processes."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from jaxsp.checkpoint.reader import CheckpointMeta, EarlyStoppingState
from jaxsp.checkpoint.writer import CheckpointWriter, WriteOutcome
from jaxsp.core import units
from jaxsp.core.errors import NeedsAttentionError
from jaxsp.core.units import format_count
from jaxsp.run.config_file import RunConfig, is_due
from jaxsp.training.train_state import TrainState


class CheckpointSchedule:
    """Writes checkpoints when they are due, identically in all processes.

    After a failed write, training continues, and the next is due after RETRY_S or earlier by the
    schedule; after the last step, after FINAL_RETRY_WAITS_S.
    """

    RETRY_S = 60.0
    """Seconds from a failed write to the next."""
    FINAL_RETRY_WAITS_S = (5.0, 10.0, 20.0, 25.0)
    """Seconds before each retry of the last checkpoint."""

    def __init__(
        self,
        writer: CheckpointWriter,
        config: RunConfig,
        *,
        first_step: int,
        print_line: Callable[[str], None],
    ):
        self._writer = writer
        self._config = config
        self._print_line = print_line
        self.last_saved_step = first_step
        """Step of the latest complete checkpoint; at first, the step that the run starts from."""
        self._saved_at = time.monotonic()
        self._from_step = first_step
        """Step of the last attempt."""
        self._next_check_step = first_step + 1
        self._meta: CheckpointMeta | None = None
        self._waited_s = 0.0
        self._failure: str | None = None
        self._failed_at = 0.0
        self._upload_failure: str | None = None
        self._is_deferred = False
        self._retry_waits_s: list[float] | None = None
        """Seconds before each remaining attempt after the last step; None during training."""

    def poll(self) -> None:
        """Reports the end of a pending write. Called after every step."""
        self._report_outcome(self._writer.poll(), self._describe_next_attempt())

    def is_due(self, step: int) -> bool:
        """True if a checkpoint is due after this step.

        Clocks differ, so process 0 decides, and all wait for its decision and the running step.
        Therefore the time is checked only after half of the expected steps, then after half of the
        remaining ones: a few times for each checkpoint.
        """
        now = time.monotonic()
        every = self._config.save_every
        if self._writer.is_uploading:
            self._is_deferred |= is_due(every, step)
            return False
        if self._is_deferred:
            self._is_deferred = False
            return True
        if self._upload_failure is not None:
            return True  # the last one, before the run ends
        failed_s = now - self._failed_at
        if self._failure is not None and broadcast_from_first(failed_s) >= self.RETRY_S:
            return True
        if not isinstance(every, timedelta):
            return is_due(every, step)
        if step < self._next_check_step:
            return False
        elapsed_s = broadcast_from_first(time.monotonic() - self._saved_at)
        left_s = every.total_seconds() - elapsed_s
        step_s = elapsed_s / (step - self._from_step)
        self._next_check_step = step + max(1, int(left_s / step_s / 2))
        return left_s <= 0

    def save(self, state: TrainState, meta: CheckpointMeta, *, is_last: bool = False) -> float:
        """Waits for the previous write, starts the next, and returns the seconds that this took."""
        began = time.monotonic()
        self._report_outcome(self._writer.poll(wait=True))
        if is_last and self._retry_waits_s is None:
            self._retry_waits_s = [*self.FINAL_RETRY_WAITS_S]
        self._meta = meta
        outcome = self._writer.save(state, meta)
        self._saved_at = time.monotonic()
        self._from_step = meta.step
        self._next_check_step = meta.step + 1
        self._waited_s = self._saved_at - began
        self._report_outcome(outcome, self._describe_next_attempt())
        return self._waited_s

    def finish(self, state: TrainState, meta: CheckpointMeta) -> None:
        """Writes the last state if needed. Raises: NeedsAttentionError if all attempts fail."""
        if self._from_step < meta.step:
            self.save(state, meta, is_last=True)
        waits_s = self._retry_waits_s = self._retry_waits_s or [*self.FINAL_RETRY_WAITS_S]
        while True:
            self._report_outcome(self._writer.poll(wait=True), self._describe_next_attempt())
            if self._failure is None or not waits_s:
                break
            time.sleep(waits_s.pop(0))
            self.save(state, self._meta or meta)  # the stored metadata has the evaluation's loss
        if self._failure is not None:
            raise NeedsAttentionError(
                f"the checkpoint of the last step, {meta.step}, could not be written: "
                f"{self._failure}. {self._describe_latest()}. Free some disk space, and run "
                "the same command again."
            )
        if self._upload_failure is not None:
            raise NeedsAttentionError(self._upload_failure)

    def _report_outcome(self, outcome: WriteOutcome | None, next_attempt: str = "") -> None:
        """Prints the outcome of a write. Args: next_attempt: time of the retry; empty: now."""
        if outcome is None:
            return
        was_failing = self._failure is not None
        self._failure = outcome.failure
        if outcome.failure is not None:
            self._failed_at = time.monotonic()
            self._print_line(
                f"checkpoint {outcome.step} COULD NOT BE WRITTEN: {outcome.failure}. "
                f"{self._describe_latest()}{next_attempt}"
            )
            return
        if was_failing:
            self._print_line(f"checkpoint {outcome.step} is written, after a failed attempt")
        self.last_saved_step = outcome.step
        if self._upload_failure is not None:
            raise NeedsAttentionError(self._upload_failure)
        self._upload_failure = outcome.upload_failure
        waited = units.format_seconds(round(self._waited_s, 1))
        self._print_line(f"step {outcome.step}  checkpoint: training waited {waited}")

    def _describe_next_attempt(self) -> str:
        if self._retry_waits_s is None:
            return f". Training continues; the next attempt is in at most {self.RETRY_S:g} s"
        waits_s = self._retry_waits_s[:1]
        return "".join(f". The next attempt is in {wait_s:g} s" for wait_s in waits_s)

    def _describe_latest(self) -> str:
        if steps := self._writer.steps:
            return f"The latest complete checkpoint is step {steps[-1]}"
        return "There is no complete checkpoint yet"


class EarlyStopping:
    """Counts evaluations without improvement on one eval set. NaN and infinity are no improvement.

    Args:
        eval_set: see `evaluator.identify_eval_set`.
        resumed_state: of the checkpoint to resume from; ignored if it is of other tokens or another
            metric. The name of the eval set may differ.
    """

    def __init__(
        self,
        config: RunConfig,
        eval_set: Mapping[str, str] | None,
        *,
        resumed_state: EarlyStoppingState | None = None,
    ):
        self._config = config
        self.state: EarlyStoppingState | None = None
        """State for a checkpoint; None without early stopping."""
        if config.early_stopping_patience is None:
            return
        assert eval_set is not None, "the config requires an eval set"
        self.state = EarlyStoppingState(
            data=eval_set["name"], digest=eval_set["digest"], metric=config.early_stopping_metric
        )
        identity = (self.state.digest, self.state.metric)
        if resumed_state is not None and identity == (resumed_state.digest, resumed_state.metric):
            self.state = dataclasses.replace(resumed_state, data=self.state.data)

    def expect_evaluation(self) -> None:
        """Marks the next evaluation as one that counts."""
        if self.state is not None:
            self.state = dataclasses.replace(self.state, is_due=True)

    def record(self, step: int, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Records an evaluation if it counts. Args: lines: of eval.jsonl, by eval set."""
        state = self.state
        if state is None or not state.is_due:
            return
        value = lines[state.data].get(state.metric)
        best = state.best_value
        sign = -1 if state.metric == "loss" else 1
        min_delta = self._config.early_stopping_min_delta
        changes: dict[str, Any] = {"num_since_best": state.num_since_best + 1}
        if value is not None and (best is None or sign * (value - best) > min_delta):
            changes = {"best_value": value, "best_step": step, "num_since_best": 0}
        self.state = dataclasses.replace(state, is_due=False, **changes)

    def should_stop(self) -> bool:
        """True if the run must stop. Process 0 decides; all processes must call this together."""
        patience = self._config.early_stopping_patience
        if self.state is None or patience is None:
            return False
        return bool(broadcast_from_first(self.state.num_since_best >= patience))

    @property
    def reason(self) -> str:
        """Reason for the stop."""
        state = self.state
        assert state is not None, "only after should_stop"
        name = state.metric.replace("_", " ")
        best = f"no {name} was finite"
        if state.best_value is not None:
            best = f"the best was {state.best_value:.4f} at step {state.best_step}"
        min_delta = self._config.early_stopping_min_delta
        margin = f" by more than {min_delta:g}" if min_delta else ""
        evaluations = format_count(state.num_since_best, "evaluation")
        return (
            f"the {name} on {state.data} has not improved{margin} for {evaluations} "
            f"(run.early_stopping_patience = {self._config.early_stopping_patience}); {best}"
        )


def broadcast_from_first(value: float) -> float:
    """Returns process 0's value in all processes. Collective."""
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))
