"""Inputs of a run besides its steps: data, weights, and the point to start from."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxsp.blocks import layers
from jaxsp.core.units import format_count
from jaxsp.data.packing import summary
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.mixing import RowSchedule
from jaxsp.run.config_file import Config
from jaxsp.run.early_stopping import EarlyStoppingState
from jaxsp.runtime.run_paths import CHECKPOINTS_DIR
from jaxsp.tasks.task import Sample
from jaxsp.training.specs import StepSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Step and state of the data that a run starts from."""

    checkpoint: pathlib.Path | None = None
    """Checkpoint to resume from; None for a new run."""
    step: int = 0
    """Number of steps before the start."""
    rows_consumed: int = 0
    """Number of rows consumed before the start."""
    num_tokens: int = 0
    """Number of tokens in the steps before the start."""
    has_pending_evaluation: bool = False
    """True if a stop skipped an evaluation that was due at `step`."""
    early_stopping: EarlyStoppingState | None = None
    config_changes: tuple[str, ...] = ()
    """Config fields that differ from the checkpoint's."""

    def is_resume_in(self, directory: pathlib.Path) -> bool:
        """True if the run resumes from a checkpoint of its own, in `directory`."""
        return (
            self.checkpoint is not None
            and self.checkpoint.parent.resolve() == (directory / CHECKPOINTS_DIR).resolve()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Data, weights, and the point to start from."""

    config: Config
    """The whole config; mesh.seq and batch.rows_per_microbatch are numbers."""
    train_set: PackedDataset
    eval_sets: tuple[PackedDataset, ...]
    task_samples: Mapping[str, Sequence[Sample]]
    """Samples of retrieval tasks, by the name of the task."""
    tokenizer: Any
    """Tokenizer of the model; None if nothing needs one."""
    stop_ids: Sequence[int]
    """Tokens at which generation stops."""
    start: StartPoint
    schedule: RowSchedule
    """Rows of the remaining steps."""
    hf_config: dict[str, Any]
    """Fields of the model's config.json."""
    weights_origin: str
    """Description of the source of the weights."""
    stop_tokens: str
    """Description of the tokens that end the turns of chats; empty without chats."""
    missing_parts: str
    """Description of the parts that an export needs; empty if the run's model has them."""
    automatic_fields: frozenset[str]
    """Fields that are `auto` in the config, of mesh.seq and batch.rows_per_microbatch."""
    make_weights: Callable[[], layers.Weights]
    """Creates the weights of step 0, sharded over the mesh."""
    make_reference_weights: Callable[[], layers.Weights]
    """Creates the weights of the reference model: those of step 0, also of a resumed run."""
    reference_identity: Callable[[], str]
    """Returns a fingerprint of the weights of the reference model."""
    make_frozen_weights: Callable[[], layers.Weights]
    """Creates the frozen weights only, in the structure of `trainable.select_frozen`."""
    write_model: Callable[[pathlib.Path], None]
    """Writes the small files of the model's Hugging Face folder: config and tokenizer."""

    def describe_steps(self, spec: StepSpec) -> str:
        """Describes the length of the run, with the learning rate: what a user checks first."""
        config = self.config
        num_tokens = config.batch.rows_per_step * config.data.row_tokens
        text = format_count(spec.num_steps, "step")
        if self.start.step:
            text += f" ({len(self.schedule):,} remaining)"
        text += f" of {format_count(num_tokens, 'token')}"
        if epochs := summary.describe_epochs(self.train_set, self.schedule, config.run.epochs):
            text += f"; {epochs}"
        return f"{text}; learning rate {config.optimizer.learning_rate:g}"
