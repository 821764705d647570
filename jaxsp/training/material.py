"""What a program works on: documents packed into rows, and how they come to the devices."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

from jaxsp import attention
from jaxsp.core import config
from jaxsp.data import packing, pipeline, rows
from jaxsp.model import layers
from jaxsp.training.step import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """Documents and the rows they are packed into."""

    name: str
    documents: rows.Documents
    epochs: packing.Epochs

    def feed(self, program: Program, *, total_rows: int, first_row: int = 0) -> pipeline.Pipeline:
        """The steps of a program over the rows from `first_row` to `total_rows`."""
        settings = program.config
        return pipeline.Pipeline(
            self.documents,
            self.epochs,
            mesh=program.mesh,
            rows_per_step=settings.batch.rows_per_step,
            rows_at_once=settings.batch.rows_at_once,
            row_tokens=settings.data.row_tokens,
            max_pieces=settings.data.max_documents_per_row,
            total_rows=total_rows,
            first_row=first_row,
        )

    def fingerprint(self, settings: config.Config) -> str:
        """Changes with everything that decides which documents lie in which row, and in which order the rows come."""
        data = settings.data
        decides = (data.row_tokens, data.max_documents_per_row, settings.run.seed, self.documents.num_loss_tokens)
        return hashlib.sha256(repr(decides).encode() + self.documents.lengths.tobytes()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    checkpoint: pathlib.Path | None = None
    """None: before the first step."""
    step: int = 0
    rows: int = 0
    """Rows consumed before."""
    num_tokens: int = 0
    """Tokens learned from before."""
    changed: tuple[str, ...] = ()
    """Fields of the config that are not those of the checkpoint, for people."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """What a run is given besides its program."""

    train: DataSet
    evals: tuple[DataSet, ...]
    start: Start
    total_rows: int
    """Rows that the run consumes, those before a resume counted."""
    fields: dict[str, Any]
    """Of the model's config.json."""
    origin: str
    """Where the weights come from, for people."""
    choice: attention.Choice
    """How the program attends."""
    weights: Callable[[], layers.Weights]
    """Makes the weights of step 0, each on its devices."""
    keep_model: Callable[[pathlib.Path], None]
    """Writes the small files of the model's Hugging Face folder: config, tokenizer."""
