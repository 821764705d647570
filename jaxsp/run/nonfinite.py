"""Steps with a non-finite loss or gradient norm: their documents, and the limit on their number."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxsp.data.packing.loader import BatchLoader
from jaxsp.run import metrics
from jaxsp.run.metrics import MetricsWriter
from jaxsp.run.run_config import RunConfig
from jaxsp.training.train_step import StepResults


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonfiniteStep:
    """One line of nonfinite_steps.jsonl: a step whose loss or gradient norm was not finite."""

    step: int
    """Number of steps so far, including this one."""
    loss: float | str
    """Mean loss. nan, inf and -inf are text, because JSON has no such numbers."""
    grad_norm: float | str
    """Global norm of the gradient before clipping, as for loss."""
    learning_rate: float
    """Learning rate of this update, which was not applied."""
    rows: list[int]
    """Indices of the step's rows in the sequence of rows, from 0."""
    documents: list[dict[str, Any]]
    """All segments of these rows. Each has row (index of its row, as in rows), source (name),
    record_index (index of the record in its source, from 0), location (file, and line or row),
    first_token (offset of the segment in its document) and tokens (length of the segment)."""


class NonfiniteTracker:
    """Records the non-finite steps of a run, and decides when the run must stop."""

    def __init__(self, config: RunConfig, writer: MetricsWriter):
        self._config = config
        self._writer = writer
        self._steps: list[int] = []
        self._max_steps = 0 if config.on_nonfinite == "stop" else config.max_nonfinite_steps

    @property
    def is_over_limit(self) -> bool:
        return len(self._steps) > self._max_steps

    def record_step(
        self, step: int, results: StepResults, loader: BatchLoader, step_index: int
    ) -> None:
        """Records a step. Args: step_index: index of the step in the loader."""
        self._steps.append(step)
        if jax.process_index() > 0:  # finding the documents takes time
            return
        segments = loader.list_segments(step_index)
        line = NonfiniteStep(
            step=step,
            loss=_json_number(results["loss"]),
            grad_norm=_json_number(results["grad_norm"]),
            learning_rate=float(results["learning_rate"]),
            rows=sorted({segment["row"] for segment in segments}),
            documents=segments,
        )
        self._writer.write(metrics.NONFINITE_FILE, dataclasses.asdict(line))

    def stop_message(self, *, saved_step: int) -> str:
        """Returns the reason for the stop, with suggestions.

        Args:
            saved_step: step of the checkpoint that was written at the stop. One more step was
                already running when the limit was exceeded.
        """
        directory = self._config.directory
        reason = "the loss or the gradient norm is not finite"
        suggestion = "run.on_nonfinite=skip to skip such steps"
        if self._config.on_nonfinite == "skip":
            reason += (
                f", in more steps since the process started than run.max_nonfinite_steps = "
                f"{self._max_steps}"
            )
            suggestion = "a larger run.max_nonfinite_steps"
        return (
            f"step {self._steps[self._max_steps]}: {reason}. The step changed no weight. Its "
            f"documents are in {directory}/{metrics.NONFINITE_FILE}; the weights of step "
            f"{saved_step} are in {directory}/checkpoints/{saved_step}. The same command continues "
            f"after that step. Use a lower optimizer.learning_rate, more optimizer.warmup_steps, "
            f"or {suggestion}."
        )


def _json_number(value: Any) -> float | str:
    return float(value) if np.isfinite(value) else str(float(value))
