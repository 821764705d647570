"""Early stopping: ends a run whose loss on an eval set no longer improves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.config.run_schema import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStoppingState:
    """Evaluations so far; a checkpoint stores it as JSON."""

    data: str
    """Name of the eval set."""
    digest: str
    """Digest of its tokens. Losses on other tokens are not compared; a new name alone changes nothing."""
    best_loss: float | None = None
    """None before the first finite loss."""
    best_step: int | None = None
    num_since_best: int = 0
    """Evaluations since the best."""
    is_due: bool = False
    """The next evaluation counts. Others, such as that of a checkpoint that a stop wrote, do not:
    otherwise a run that was stopped more often would end earlier."""


class EarlyStopping:
    """Counts evaluations without improvement on one eval set.

    An improvement is a loss that is lower than the best by more than run.early_stopping_min_delta.
    A loss that is not finite is no improvement.

    Args:
        loss_set: name and digest of the eval set, as `evaluator.identity` gives them.
        before: `state` of the checkpoint that the run resumes from. It is ignored if it is about
            another eval set or other tokens.
    """

    def __init__(
        self,
        config: RunConfig,
        eval_set: Mapping[str, str] | None,
        *,
        resumed_state: Mapping[str, Any] | None = None,
    ):
        self._patience = config.early_stopping_patience
        self._min_delta = config.early_stopping_min_delta
        self._state: EarlyStoppingState | None = None
        if self._patience is None:
            return
        assert eval_set is not None, "config asks for an eval set"
        self._state = EarlyStoppingState(data=eval_set["name"], digest=eval_set["digest"])
        if (
            resumed_state is not None
            and EarlyStoppingState(**resumed_state).digest == self._state.digest
        ):
            self._state = dataclasses.replace(
                EarlyStoppingState(**resumed_state), data=self._state.data
            )

    @property
    def state(self) -> dict[str, Any] | None:
        """State for a checkpoint; None without early stopping."""
        return None if self._state is None else dataclasses.asdict(self._state)

    def expect_evaluation(self) -> None:
        """Marks the next evaluation as one that counts."""
        if self._state is not None:
            self._state = dataclasses.replace(self._state, is_due=True)

    def record(self, step: int, losses: Mapping[str, float | None]) -> None:
        """Records an evaluation if it counts. Args: losses: by eval set."""
        if self._state is None or not self._state.is_due:
            return
        self._state = dataclasses.replace(self._state, is_due=False)
        loss, best = losses[self._state.data], self._state.best_loss
        if loss is not None and (best is None or loss < best - self._min_delta):
            self._state = dataclasses.replace(
                self._state, best_loss=loss, best_step=step, num_since_best=0
            )
        else:
            self._state = dataclasses.replace(
                self._state, num_since_best=self._state.num_since_best + 1
            )

    def should_stop(self) -> bool:
        """True if the run must stop. Process 0 decides; all processes must call this together."""
        if self._state is None or self._patience is None:
            return False
        is_over = self._state.num_since_best >= self._patience
        if jax.process_count() == 1:
            return is_over
        return bool(multihost_utils.broadcast_one_to_all(np.int32(is_over)))

    @property
    def reason(self) -> str:
        """Why the run stops, for people."""
        assert self._state is not None, "asked only after is_over"
        best = "it was never finite"
        if self._state.best_loss is not None:
            best = f"the best was {self._state.best_loss:.4f} at step {self._state.best_step}"
        margin = f" by more than {self._min_delta:g}" if self._min_delta else ""
        return (
            f"the loss on {self._state.data} has not improved{margin} for {self._state.num_since_best} "
            f"evaluation{'s' * (self._state.num_since_best > 1)} (run.early_stopping_patience = {self._patience}); {best}"
        )
