"""The whole config: its choices, and its YAML file."""

import pathlib
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.config import config_file, schema
from jaxsp.config.config_errors import Schema
from jaxsp.config.config_file import read, save
from jaxsp.data.data_config import BatchConfig, DataConfig
from jaxsp.objectives.objective import Objective, Sft
from jaxsp.objectives.registry import OBJECTIVE
from jaxsp.optimizers.registry import OPTIMIZER, Optimizer
from jaxsp.reporting.trackers.logging_config import LoggingConfig
from jaxsp.setup import check
from jaxsp.tasks.eval_config import EvalConfig

__all__ = ["SCHEMA", "Config", "apply_override", "load", "parse", "read", "save"]


class Config(schema.Config):
    """The config of a run."""

    data: DataConfig
    batch: BatchConfig
    objective: Annotated[Objective, OBJECTIVE] = Sft()
    optimizer: Annotated[Optimizer, OPTIMIZER]
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()


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


def apply_override(fields: dict[str, Any], override: str, *, example_override: str) -> str | None:
    """Sets a field: see `config.config_file.apply_override`."""
    return config_file.apply_override(SCHEMA, fields, override, example_override=example_override)
