"""What a run is given besides its program."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxsp import attention
from jaxsp.data.packing import mixing
from jaxsp.data.packing.dataset import DataSet
from jaxsp.model import layers
from jaxsp.runtime.run_paths import CHECKPOINTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    checkpoint: pathlib.Path | None = None
    """None: before the first step."""
    step: int = 0
    rows: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Rows consumed before, by their length."""
    num_tokens: int = 0
    """Tokens learned from before."""
    owes_evaluation: bool = False
    """Whether one was due at that step and was not done."""
    early_stopping: Mapping[str, Any] | None = None
    """Fields of `early_stopping.State`."""
    changed: tuple[str, ...] = ()
    """Fields of the config that are not those of the checkpoint, for people."""

    def is_in(self, directory: pathlib.Path) -> bool:
        """True if the run resumes from a checkpoint of its own, in `directory`."""
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == (directory / CHECKPOINTS).resolve()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """Data, weights, and where to begin."""

    train: DataSet
    evals: tuple[DataSet, ...]
    start: Start
    schedule: mixing.Schedule
    """Which rows the steps to come consume."""
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
