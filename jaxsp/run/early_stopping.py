"""Early stopping: ends a run whose loss, or another metric, on an eval set no longer improves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from jaxsp.checkpoint.reader import EarlyStoppingState
from jaxsp.run.run_config import RunConfig


class EarlyStopping:
    """Counts evaluations without improvement on one eval set.

    An improvement is a value that is better than the best by more than
    run.early_stopping_min_delta: a lower loss, or a higher value of another metric. A value that is
    not finite is no improvement.

    Args:
        eval_set: name and digest of the eval set, as returned by evaluator.identify_eval_set.
        resumed_state: `state` of the checkpoint that the run resumes from. It is ignored if it
            belongs to other tokens or another metric; the name of the eval set may differ.
    """

    def __init__(
        self,
        config: RunConfig,
        eval_set: Mapping[str, str] | None,
        *,
        resumed_state: EarlyStoppingState | None = None,
    ):
        self._patience = config.early_stopping_patience
        self._min_delta = config.early_stopping_min_delta
        self.state: EarlyStoppingState | None = None
        """State for a checkpoint; None without early stopping."""
        if self._patience is None:
            return
        assert eval_set is not None, "the config requires an eval set"
        state = EarlyStoppingState(
            data=eval_set["name"], digest=eval_set["digest"], metric=config.early_stopping_metric
        )
        self.state = state
        if resumed_state is not None:
            resumed_state = dataclasses.replace(resumed_state, data=state.data)
            identity = (resumed_state.digest, resumed_state.metric)
            self.state = resumed_state if identity == (state.digest, state.metric) else state

    def expect_evaluation(self) -> None:
        """Marks the next evaluation as one that counts."""
        if self.state is not None:
            self.state = dataclasses.replace(self.state, is_due=True)

    def record(self, step: int, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Records an evaluation if it counts. Args: lines: of eval.jsonl, by eval set."""
        if self.state is None or not self.state.is_due:
            return
        value = lines[self.state.data].get(self.state.metric)
        changes: dict[str, Any] = {"num_since_best": self.state.num_since_best + 1}
        if value is not None and self._is_better(value, self.state):
            changes = {"best_value": value, "best_step": step, "num_since_best": 0}
        self.state = dataclasses.replace(self.state, is_due=False, **changes)

    def _is_better(self, value: float, state: EarlyStoppingState) -> bool:
        """True if a value is an improvement."""
        if state.best_value is None:
            return True
        gain = state.best_value - value if state.metric == "loss" else value - state.best_value
        return gain > self._min_delta

    def should_stop(self) -> bool:
        """True if the run must stop. Process 0 decides; all processes must call this together."""
        if self.state is None or self._patience is None:
            return False
        is_over = np.int32(self.state.num_since_best >= self._patience)
        return bool(multihost_utils.broadcast_one_to_all(is_over))

    @property
    def reason(self) -> str:
        """Reason for the stop."""
        assert self.state is not None, "only after should_stop"
        name = self.state.metric.replace("_", " ")
        best = f"no {name} was finite"
        if self.state.best_value is not None:
            best = f"the best was {self.state.best_value:.4f} at step {self.state.best_step}"
        margin = f" by more than {self._min_delta:g}" if self._min_delta else ""
        evaluations = "evaluation" if self.state.num_since_best == 1 else "evaluations"
        return (
            f"the {name} on {self.state.data} has not improved{margin} for "
            f"{self.state.num_since_best} {evaluations} "
            f"(run.early_stopping_patience = {self._patience}); {best}"
        )
