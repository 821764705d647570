"""A run that is ready to start: everything is checked and read, and nothing is computed.

`build.py` makes it, and raises all problems.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxsp.checkpoint.reader import EarlyStoppingState
from jaxsp.data import tokenizers
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.packing import RowSchedule
from jaxsp.evaluation.retrieval import Samples
from jaxsp.hf import folder
from jaxsp.hf.folder import ModelFolder
from jaxsp.run.config_file import Config
from jaxsp.run.model_files import InitialWeights
from jaxsp.run.references import Reference
from jaxsp.run.stop_tokens import StopTokens
from jaxsp.training.specs import StepSpec

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Step and state of the data that a run starts from."""

    checkpoint: pathlib.Path | None = None
    """Checkpoint to resume from; None for a new run."""
    step: int = 0
    """Number of steps before the start."""
    rows_consumed: int = 0
    num_tokens: int = 0
    """Number of tokens in these steps."""
    has_pending_evaluation: bool = False
    """True if a stop skipped an evaluation that was due at `step`."""
    early_stopping: EarlyStoppingState | None = None
    config_changes: tuple[str, ...] = ()
    """Config fields that differ from the checkpoint's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A model on a mesh, with its tokenizer and data sets; its weights are not read."""

    config: Config
    """The whole config; mesh.seq and batch.rows_per_microbatch are numbers."""
    spec: StepSpec
    hf_config: dict[str, Any]
    """Fields of the model's config.json."""
    model_folder: ModelFolder | None
    """Folder of model.source; None if the config or a checkpoint describes the model."""
    adapter_folder: ModelFolder | None
    model_dir: pathlib.Path | None
    """A run's own copy of the model's small files."""
    small_files: pathlib.Path | None
    """Folder with the model's small files (config, tokenizer): model_dir, or that of model_folder.
    """
    tokenizer: "transformers.PreTrainedTokenizerBase | None"
    """None if nothing needs one."""
    stop_tokens: StopTokens
    train_set: PackedDataset | None
    """None unless it was prepared for training."""
    eval_sets: tuple[PackedDataset, ...]
    task_samples: Samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(PreparedModel):
    """A run that is ready to start."""

    train_set: PackedDataset
    schedule: RowSchedule
    """Rows of the remaining steps."""
    start: StartPoint
    weights: InitialWeights
    """Weights of step 0, or only the frozen ones of a resumed run."""
    stop_ids: Sequence[int]
    """Tokens at which generation stops; none if the run neither generates nor has chats."""
    automatic_fields: frozenset[str]
    """Fields that were `auto` in the config: mesh.seq, batch.rows_per_microbatch, or both."""
    directory: pathlib.Path
    """The run directory, or the local copy of a URL's."""
    is_resume: bool
    """True if the run resumes from a checkpoint of its own."""
    ranking_eval_set: dict[str, str] | None
    """Name and digest of the eval set whose loss ranks checkpoints; None without eval sets."""

    @property
    def reference(self) -> Reference:
        """Reference model of the objective."""
        return Reference(
            spec=self.spec,
            source=self.config.model.source,
            adapter_source=self.config.adapter.source,
            run_dir=self.directory,
            is_resume=self.is_resume,
        )

    def write_model(self, directory: pathlib.Path) -> None:
        """Writes the model's small files: those of the run that is resumed, else of model.source;
        with model.tokenizer, or without a source, only the tokenizer."""
        directory.mkdir(exist_ok=True)
        if self.model_dir is not None:
            if not self.model_dir.samefile(directory):
                shutil.copytree(self.model_dir, directory, dirs_exist_ok=True)
        elif self.model_folder is not None and self.config.model.tokenizer is None:
            folder.copy_small_files(self.model_folder.path, directory)
            tokenizers.correct_file(directory)
        elif self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)
        self.stop_tokens.add_to_file(directory, default=self.hf_config["eos_token_id"])
