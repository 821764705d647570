"""When checkpoints are written, and what is done when one cannot be."""

import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.core import config, errors
from jaxsp.training import checkpoint, evaluator, step
from jaxsp.training.store import Outcome, Store


class Saving:
    """Writes checkpoints, and knows when the next is due; the same in all processes.

    A checkpoint that cannot be written does not end the run: it is said, and the next is tried RETRY_S later, or when it is
    due in any case.

    Args: say: prints a line for people.
    """

    RETRY_S = 60.0
    LAST_TRIES_S = (5.0, 10.0, 20.0, 25.0)
    """At the end of a run: seconds before the last checkpoint is tried again."""

    def __init__(self, store: Store, settings: config.Run, *, first_step: int, say: Callable[[str], None]):
        self._store, self._settings, self._say = store, settings, say
        self._saved_at, self._from_step = time.monotonic(), first_step
        self._ask_at = first_step + 1
        self._failed: Outcome | None = None
        self._meta: checkpoint.Meta | None = None
        self._failed_at = 0.0
        self.last_step = first_step
        """Of the newest checkpoint that is whole; 0 before the first."""

    def check(self) -> None:
        """Notices how the write that is under way has ended, if it has. To be called after every step."""
        self._note(self._store.poll())

    def due(self, number: int) -> bool:
        """Whether a checkpoint is to follow a step.

        Clocks of processes differ: process 0 has the word. To hear it all wait for the step that is running, so it is asked
        half way to when the time should be up, then half way of what is left: a few times for each checkpoint.
        """
        if self._failed is not None and _of_first_process(time.monotonic() - self._failed_at) >= self.RETRY_S:
            return True
        if self._settings.save_minutes is None:
            return evaluator.due(self._settings.save_steps, number)
        if number < self._ask_at:
            return False
        seconds = _of_first_process(time.monotonic() - self._saved_at)
        left = 60 * self._settings.save_minutes - seconds
        seconds_per_step = seconds / (number - self._from_step)
        self._ask_at = number + max(1, int(left / seconds_per_step / 2))
        return left <= 0

    def __call__(self, state: step.State, meta: checkpoint.Meta) -> float:
        """Begins to write a checkpoint, and returns the seconds that this took: the write before has to end first."""
        began = time.monotonic()
        self._note(self._store.poll(wait=True))
        self._meta = meta
        outcome = self._store.save(state, meta)
        self._note(outcome)
        self._from_step = meta.step
        self._saved_at, self._ask_at = time.monotonic(), meta.step + 1
        seconds = self._saved_at - began
        if outcome is None or outcome.failure is None:
            self._say(f"step {meta.step}  checkpoint: training waited {seconds:.1f} s")
        return seconds

    def settle(self) -> None:
        """Waits for the write that is under way."""
        self._note(self._store.poll(wait=True))

    def finish(self, state: step.State, meta: checkpoint.Meta) -> None:
        """Sees to it that the state is on the disk. Raises: Stopped where it was tried again and again, and could not be."""
        self.settle()
        if self._meta is None or self._meta.step < meta.step:
            self(state, meta)
            self.settle()
        for seconds in self.LAST_TRIES_S:
            if self._failed is None:
                return
            time.sleep(seconds)
            self(state, self._meta or meta)  # with the loss of its evaluation
            self.settle()
        if self._failed is not None:
            raise errors.Stopped(
                f"the checkpoint of the last step, {meta.step}, could not be written: {self._failed.failure}. "
                f"{self._newest()}. Make room, and give the same command again."
            )

    def _note(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        if outcome.failure is None:
            if self._failed is not None:
                self._say(f"checkpoint {outcome.step} is written, after one that failed")
            self._failed, self.last_step = None, outcome.step
            return
        self._failed, self._failed_at = outcome, time.monotonic()
        self._say(
            f"checkpoint {outcome.step} COULD NOT BE WRITTEN: {outcome.failure}. {self._newest()}. Training goes on; the next "
            f"is tried in {self.RETRY_S:g} s at the latest"
        )

    def _newest(self) -> str:
        newest = self._store.steps
        return f"The newest that is whole is that of step {newest[-1]}" if newest else "There is none yet that is whole"


def _of_first_process(value: float) -> float:
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))
