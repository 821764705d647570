"""When checkpoints are written."""

import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.core import config
from jaxsp.training import checkpoint, evaluator, step


class Saving:
    """Writes checkpoints, and knows when the next is due; the same in all processes."""

    def __init__(self, store: checkpoint.Store, settings: config.Run, *, first_step: int):
        self._store, self._settings = store, settings
        self._saved_at, self._from_step = time.monotonic(), first_step
        self._ask_at = first_step + 1
        self.last_step = first_step
        """Of the last checkpoint; 0 before the first."""

    def due(self, number: int) -> bool:
        """Whether a checkpoint is to follow a step.

        Clocks of processes differ: process 0 has the word. To hear it all wait for the step that is running, so it is asked
        half way to when the time should be up, then half way of what is left: a few times for each checkpoint.
        """
        if self._settings.save_minutes is None:
            return evaluator.due(self._settings.save_steps, number)
        if number < self._ask_at:
            return False
        seconds = _of_first_process(time.monotonic() - self._saved_at)
        left = 60 * self._settings.save_minutes - seconds
        seconds_per_step = seconds / (number - self._from_step)
        self._ask_at = number + max(1, int(left / seconds_per_step / 2))
        return left <= 0

    def __call__(self, state: step.State, meta: checkpoint.Meta) -> None:
        self._store.save(state, meta)
        self.last_step = self._from_step = meta.step
        self._saved_at, self._ask_at = time.monotonic(), meta.step + 1


def _of_first_process(value: float) -> float:
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))
