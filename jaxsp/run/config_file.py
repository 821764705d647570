"""Config of a run: all sections, and loading them from YAML."""

import pathlib
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from jaxsp.attention.strategies.attention_config import AttentionConfig
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.config import config_file
from jaxsp.config.config_errors import Schema
from jaxsp.config.config_file import read, save
from jaxsp.config.fields import ConfigSection
from jaxsp.data.data_config import BatchConfig, DataConfig
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.objectives.objective import Objective, Sft
from jaxsp.objectives.registry import OBJECTIVE
from jaxsp.optimizers.registry import OPTIMIZER, Optimizer
from jaxsp.run import check
from jaxsp.run.run_config import RunConfig
from jaxsp.run.trackers.logging_config import LoggingConfig
from jaxsp.system.mesh_config import MeshConfig
from jaxsp.tasks.eval_config import EvalConfig
from jaxsp.training.memory_config import MemoryConfig
from jaxsp.training.step_config import StepConfig

__all__ = ["SCHEMA", "Config", "apply_override", "load", "parse", "read", "save"]


class Config(ConfigSection):
    """The config of a run."""

    run: RunConfig
    model: ModelSourceConfig
    mesh: MeshConfig = MeshConfig()
    attention: AttentionConfig = AttentionConfig()
    data: DataConfig
    batch: BatchConfig
    objective: Annotated[Objective, OBJECTIVE] = Sft()
    optimizer: Annotated[Optimizer, OPTIMIZER]
    adapter: AdapterConfig = AdapterConfig()
    memory: MemoryConfig = MemoryConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def with_fields(self, **sections: dict[str, Any]) -> "Config":
        """Returns the config with other fields: `with_fields(data={"row_tokens": 1024})`."""
        return self.model_copy(
            update={
                name: getattr(self, name).model_copy(update=changes)
                for name, changes in sections.items()
            }
        )

    @property
    def step(self) -> StepConfig:
        """The values that determine the step."""
        return StepConfig(
            row_tokens=self.data.row_tokens,
            max_segments=self.data.max_segments_per_row,
            rows_per_step=self.batch.rows_per_step,
            rows_per_microbatch=self.batch.rows_per_microbatch,
            compute_dtype=self.model.compute_dtype,
            linear_dtype=self.model.linear_dtype,
            experts_kernel=self.model.experts_kernel,
            mesh=self.mesh,
            attention=self.attention,
            memory=self.memory,
            optimizer=self.optimizer,
            objective=self.objective,
            adapter=self.adapter,
            seed=self.run.seed,
            is_deterministic=self.run.deterministic,
            xla_options=self.run.xla_options,
        )


SCHEMA = Schema(Config)


def load(path: str | pathlib.Path, changes: Sequence[str]) -> Config:
    """Loads a YAML file, changed by `key.path=value` words. Raises: UserError with all problems."""
    return parse(read(path), changes, name=str(path))


def parse(
    fields: dict[str, Any],
    changes: Sequence[str] = (),
    *,
    name: str = "CONFIG.yaml",
    trains: bool = True,
    unneeded: Collection[str] = (),
) -> Config:
    """Checks nested fields: see `config.config_file.parse`."""
    rules = (*check.RULES, *(check.TRAINING_RULES if trains else ()))
    return config_file.parse(
        SCHEMA, fields, changes, rules=rules, name=name, trains=trains, unneeded=unneeded
    )


def apply_override(fields: dict[str, Any], override: str) -> str | None:
    """Sets a field: see `config.config_file.apply_override`."""
    return config_file.apply_override(SCHEMA, fields, override)
