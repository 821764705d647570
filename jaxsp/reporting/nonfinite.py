"""Steps whose loss or gradient norm was not finite: what they had, and whether the run goes on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxsp.config import schema
from jaxsp.data.packing import pipeline
from jaxsp.reporting import metrics
from jaxsp.training import train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of bad_steps.jsonl."""

    step: int
    loss: float | str
    """nan, inf and -inf are words: JSON has no such numbers."""
    grad_norm: float | str
    learning_rate: float
    row_tokens: int
    """Length of the step's rows."""
    rows: list[int]
    """By their numbers in the sequence of rows of this length, from 0."""
    documents: list[dict[str, Any]]
    """All pieces in these rows: `row`, `source`, `document` (which of the source's records, from 0), `place` (file, and line or
    row), `first_token` of the document in the piece, and `tokens` of the piece."""


class BadSteps:
    """Notes the bad steps of a run, and knows when it has to end."""

    def __init__(self, settings: schema.Run, writer: metrics.Writer):
        self._settings, self._writer = settings, writer
        self._steps: list[int] = []

    @property
    def end_the_run(self) -> bool:
        return len(self._steps) > self._most

    @property
    def _most(self) -> int:
        return 0 if self._settings.on_nan == "stop" else self._settings.max_bad_steps

    def add(self, number: int, numbers: train_step.Metrics, feed: pipeline.Pipeline, index: int) -> None:
        """Notes a step. Args: index: of the step in the feed."""
        self._steps.append(number)
        if jax.process_index() > 0:  # what follows takes its time
            return
        line = Line(
            step=number,
            loss=_number(numbers.loss),
            grad_norm=_number(numbers.grad_norm),
            learning_rate=float(numbers.learning_rate),
            row_tokens=feed.row_tokens(index),
            **_documents(feed.pieces(index)),
        )
        self._writer.write_bad_step(line)

    def why(self, *, saved: int) -> str:
        """Why the run has to end, and what to do. Args: saved: the step of the checkpoint that was written then."""
        # one more was under way when this was known
        many, folder = "", self._settings.directory
        more = "run.on_nan=skip leaves such steps out."
        if self._settings.on_nan == "skip":
            many = f", more often since the process began than run.max_bad_steps = {self._most}"
            more = "run.max_bad_steps lets more pass."
        return (
            f"step {self._steps[self._most]}: the loss or the gradient norm is not finite{many}. The step changed no weight; "
            f"{folder}/checkpoints/{saved} has the weights after {saved} steps, those that were not finite left out, and "
            f"{folder}/{metrics.BAD_STEPS} names its documents. The same command goes on behind it. A lower "
            f"optimizer.learning_rate or more optimizer.warmup_steps usually help; {more}"
        )


def _documents(pieces: Sequence[pipeline.Piece]) -> dict[str, Any]:
    """The fields `rows` and `documents` of a line."""
    documents = [
        {"row": one.row, **dataclasses.asdict(one.origin), "first_token": one.first, "tokens": one.num_tokens} for one in pieces
    ]
    return {"rows": sorted({one.row for one in pieces}), "documents": documents}


def _number(value: Any) -> float | str:
    return float(value) if np.isfinite(value) else str(float(value))
