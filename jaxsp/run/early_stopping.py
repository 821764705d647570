"""Early stopping: ends a run whose loss, or another metric, on an eval set no longer improves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from jaxsp.checkpoint.reader import EarlyStoppingState
from jaxsp.core.units import format_count
from jaxsp.run.run_config import RunConfig


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
        is_over = np.int32(self.state.num_since_best >= patience)
        return bool(multihost_utils.broadcast_one_to_all(is_over))

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
