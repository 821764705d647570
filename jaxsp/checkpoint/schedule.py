"""When checkpoints are written, and what is done when one cannot be."""

import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.writer import CheckpointWriter, WriteOutcome
from jaxsp.config.run_schema import RunConfig
from jaxsp.core import durations
from jaxsp.core.errors import NeedsAttentionError
from jaxsp.training import evaluator
from jaxsp.training.train_step import TrainState


class CheckpointSchedule:
    """Writes checkpoints, and knows when the next is due; the same in all processes.

    A checkpoint that cannot be written does not end the run: a line is printed, and the next is tried RETRY_S later, or
    earlier if it is due.

    Args: say: prints a line for people.
    """

    RETRY_S = 60.0
    FINAL_RETRY_WAITS_S = (5.0, 10.0, 20.0, 25.0)
    """At the end of a run: seconds before the last checkpoint is tried again."""

    def __init__(
        self,
        store: CheckpointWriter,
        config: RunConfig,
        *,
        first_step: int,
        print_line: Callable[[str], None],
    ):
        self._store, self._config, self._print_line = store, config, print_line
        self._saved_at, self._from_step = time.monotonic(), first_step
        self._next_check_step = first_step + 1
        self._failed: WriteOutcome | None = None
        self._meta: CheckpointMeta | None = None
        self._failed_at = 0.0
        self._waited_s = 0.0
        """Seconds that training waited for the write that was begun last."""
        self._compile_s = 0.0
        """Seconds of these that were spent compiling."""
        self._retry_waits_s: list[float] | None = None
        """At the end of the run: seconds before each attempt that is left. None during training."""
        self.last_saved_step = first_step
        """Of the newest checkpoint that is whole; 0 before the first."""

    def poll(self) -> None:
        """Notices how the write that is under way has ended, if it has. To be called after every step."""
        self._report_outcome(self._store.poll(), self._describe_next_attempt())

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to follow a step.

        Clocks of processes differ: process 0 has the word. To hear it all wait for the step that is running, so it is asked
        half way to when the time should be up, then half way of what is left: a few times for each checkpoint.
        """
        if (
            self._failed is not None
            and broadcast_from_first(time.monotonic() - self._failed_at) >= self.RETRY_S
        ):
            return True
        if self._config.save_interval is None:
            return evaluator.is_due(self._config.save_steps, step)
        if step < self._next_check_step:
            return False
        seconds = broadcast_from_first(time.monotonic() - self._saved_at)
        left = self._config.save_interval.total_seconds() - seconds
        seconds_per_step = seconds / (step - self._from_step)
        self._next_check_step = step + max(1, int(left / seconds_per_step / 2))
        return left <= 0

    def save(self, state: TrainState, meta: CheckpointMeta, *, is_last: bool = False) -> float:
        """Begins to write a checkpoint, and returns the seconds that this took: the write before has to end first.

        Args: is_last: no step follows.
        """
        began = time.monotonic()
        self._report_outcome(self._store.poll(wait=True))
        if is_last and self._retry_waits_s is None:
            self._retry_waits_s = [*self.FINAL_RETRY_WAITS_S]
        self._meta = meta
        outcome = self._store.save(state, meta)
        self._saved_at, self._next_check_step = time.monotonic(), meta.step + 1
        self._from_step = meta.step
        self._waited_s, self._compile_s = self._saved_at - began, self._store.compile_s
        self._report_outcome(outcome, self._describe_next_attempt())
        return self._waited_s

    def finish(self, state: TrainState, meta: CheckpointMeta) -> None:
        """Writes the last state if it is not on the disk yet. Raises: Stopped if every attempt fails."""
        if self._meta is None or self._meta.step < meta.step:
            self.save(state, meta, is_last=True)
        waits = self._retry_waits_s = self._retry_waits_s or [*self.FINAL_RETRY_WAITS_S]
        self._report_outcome(self._store.poll(wait=True), self._describe_next_attempt())
        while self._failed is not None and waits:
            time.sleep(waits.pop(0))
            self.save(state, self._meta or meta)  # with the loss of its evaluation
            self._report_outcome(self._store.poll(wait=True), self._describe_next_attempt())
        if self._failed is not None:
            raise NeedsAttentionError(
                f"the checkpoint of the last step, {meta.step}, could not be written: {self._failed.failure}. "
                f"{self._describe_latest()}. Make room, and give the same command again."
            )

    def _report_outcome(self, outcome: WriteOutcome | None, next_attempt: str = "") -> None:
        """Prints how a write ended, if it has. Args: next_attempt: when another follows a failure; empty: at once."""
        if outcome is None:
            return
        if outcome.failure is None:
            if self._failed is not None:
                self._print_line(f"checkpoint {outcome.step} is written, after one that failed")
            self._failed, self.last_saved_step = None, outcome.step
            compiled = ""
            if self._compile_s >= 0.1:
                spent = durations.describe(round(self._compile_s, 1))
                compiled = f" ({spent} of it to compile its checksums)"
            waited = durations.describe(round(self._waited_s, 1))
            self._print_line(f"step {outcome.step}  checkpoint: training waited {waited}{compiled}")
            return
        self._failed, self._failed_at = outcome, time.monotonic()
        self._print_line(
            f"checkpoint {outcome.step} COULD NOT BE WRITTEN: {outcome.failure}. {self._describe_latest()}{next_attempt}"
        )

    def _describe_next_attempt(self) -> str:
        if self._retry_waits_s is None:
            return f". Training continues; the next attempt is in at most {self.RETRY_S:g} s"
        return (
            f". The next attempt is in {self._retry_waits_s[0]:g} s" if self._retry_waits_s else ""
        )

    def _describe_latest(self) -> str:
        steps = self._store.steps
        return (
            f"The latest complete checkpoint is step {steps[-1]}"
            if steps
            else "There is no complete checkpoint yet"
        )


def broadcast_from_first(value: float) -> float:
    """Returns process 0's value in all processes."""
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))
