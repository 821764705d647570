"""What a run is given besides its program."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxsp.attention import AttentionChoice
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.mixing import RowSchedule
from jaxsp.model import layers
from jaxsp.runtime.run_paths import CHECKPOINTS_DIR


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Where a run begins."""

    checkpoint: pathlib.Path | None = None
    """None: before the first step."""
    step: int = 0
    rows_consumed: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Rows consumed before, by their length."""
    num_tokens: int = 0
    """Tokens learned from before."""
    has_pending_evaluation: bool = False
    """Whether one was due at that step and was not done."""
    early_stopping: Mapping[str, Any] | None = None
    """Fields of `early_stopping.State`."""
    config_changes: tuple[str, ...] = ()
    """Fields of the config that are not those of the checkpoint, for people."""

    def is_resume_in(self, directory: pathlib.Path) -> bool:
        """True if the run resumes from a checkpoint of its own, in `directory`."""
        return (
            self.checkpoint is not None
            and self.checkpoint.parent.resolve() == (directory / CHECKPOINTS_DIR).resolve()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Data, weights, and where to begin."""

    train_set: PackedDataset
    eval_sets: tuple[PackedDataset, ...]
    start: StartPoint
    schedule: RowSchedule
    """Which rows the steps to come consume."""
    hf_config: dict[str, Any]
    """Of the model's config.json."""
    weights_origin: str
    """Where the weights come from, for people."""
    attention_choice: AttentionChoice
    """How the program attends."""
    make_weights: Callable[[], layers.Weights]
    """Makes the weights of step 0, each on its devices."""
    write_model: Callable[[pathlib.Path], None]
    """Writes the small files of the model's Hugging Face folder: config, tokenizer."""
