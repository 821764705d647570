"""Steps whose loss or gradient norm was not finite: what they had, and whether the run goes on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxsp.config.schema import RunConfig
from jaxsp.data.packing.pipeline import BatchLoader, StepSegment
from jaxsp.reporting import metrics
from jaxsp.reporting.metrics import MetricsWriter
from jaxsp.training.train_step import StepMetrics


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
    row_tokens: int
    """Row length of the step, in tokens."""
    rows: list[int]
    """Indices of the step's rows in the sequence of rows of this length, from 0."""
    documents: list[dict[str, Any]]
    """All segments of these rows. Each has row, source, document (index of the record in its
    source, from 0), place (file and line or row), first_token (offset of the segment in its
    document) and tokens (length of the segment)."""


class NonfiniteTracker:
    """Notes the bad steps of a run, and knows when it has to end."""

    def __init__(self, config: RunConfig, writer: MetricsWriter):
        self._config, self._writer = config, writer
        self._steps: list[int] = []

    @property
    def is_over_limit(self) -> bool:
        return len(self._steps) > self._max_steps

    @property
    def _max_steps(self) -> int:
        return 0 if self._config.on_nonfinite == "stop" else self._config.max_nonfinite_steps

    def record_step(
        self, step: int, metrics: StepMetrics, pipeline: BatchLoader, step_index: int
    ) -> None:
        """Notes a step. Args: index: of the step in the feed."""
        self._steps.append(step)
        if jax.process_index() > 0:  # what follows takes its time
            return
        line = NonfiniteStep(
            step=step,
            loss=_json_number(metrics.loss),
            grad_norm=_json_number(metrics.grad_norm),
            learning_rate=float(metrics.learning_rate),
            row_tokens=pipeline.row_tokens(step_index),
            **_document_fields(pipeline.list_segments(step_index)),
        )
        self._writer.write_nonfinite_step(line)

    def stop_message(self, *, saved_step: int) -> str:
        """Why the run has to end, and what to do. Args: saved: the step of the checkpoint that was written then."""
        # one more was under way when this was known
        many, folder = "", self._config.directory
        more = "run.on_nonfinite=skip leaves such steps out."
        if self._config.on_nonfinite == "skip":
            many = f", more often since the process began than run.max_nonfinite_steps = {self._max_steps}"
            more = "run.max_nonfinite_steps lets more pass."
        return (
            f"step {self._steps[self._max_steps]}: the loss or the gradient norm is not finite{many}. The step changed no weight; "
            f"{folder}/checkpoints/{saved_step} has the weights after {saved_step} steps, those that were not finite left out, and "
            f"{folder}/{metrics.NONFINITE_FILE} names its documents. The same command goes on behind it. A lower "
            f"optimizer.learning_rate or more optimizer.warmup_steps usually help; {more}"
        )


def _document_fields(segments: Sequence[StepSegment]) -> dict[str, Any]:
    """The fields `rows` and `documents` of a line."""
    documents = [
        {
            "row": one.row_index,
            **dataclasses.asdict(one.origin),
            "first_token": one.offset,
            "tokens": one.num_tokens,
        }
        for one in segments
    ]
    return {"rows": sorted({one.row_index for one in segments}), "documents": documents}


def _json_number(value: Any) -> float | str:
    return float(value) if np.isfinite(value) else str(float(value))
