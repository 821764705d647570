"""Config of a run: all sections, and loading them from YAML."""

import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any

from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.config import config_file, yaml_io
from jaxsp.config.config_errors import Schema
from jaxsp.config.config_file import read, save
from jaxsp.config.fields import ConfigSection
from jaxsp.core import errors
from jaxsp.data.data_config import BatchConfig, DataConfig
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.objectives.distill import Distill
from jaxsp.objectives.objective import Objective, Sft
from jaxsp.objectives.registry import OBJECTIVE, OBJECTIVES
from jaxsp.optimizers.registry import OPTIMIZER, Optimizer
from jaxsp.run.run_config import RunConfig
from jaxsp.run.trackers.logging_config import LoggingConfig
from jaxsp.system.mesh_config import MeshConfig
from jaxsp.tasks.eval_config import EvalConfig
from jaxsp.training.step_config import MemoryConfig, StepConfig

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
            delta_net_kernel=self.model.delta_net_kernel,
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


_EVAL_SUGGESTION = (
    "Name a data set: data.eval='[{source: held-out/*.txt, format: text}]', "
    "or hold out training documents: data.eval_fraction=0.05."
)


def _check_length(run: RunConfig) -> Iterator[str]:
    if run.steps is None and run.epochs is None:
        yield (
            "run.steps, run.epochs: missing. Set one of them for the length of training, for "
            "example run.epochs=1."
        )
    elif run.steps is not None and run.epochs is not None:
        yield (
            f"run.steps = {run.steps}, run.epochs = {run.epochs}: only one of them may be set. "
            "Write run.steps=null or run.epochs=null."
        )


def _check_sections(
    data: DataConfig, objective: Objective, adapter: AdapterConfig, eval: EvalConfig
) -> Iterator[str]:
    for name in ("train", "eval"):
        for number, source in enumerate(getattr(data, name)):
            field = f"data.{name}.{number}.format = {source.format}"
            fitting = [
                f"objective.type={own.model_fields['type'].default}"
                for own in OBJECTIVES
                if own.format == source.format
            ]
            if objective.format is None and fitting:
                problem = f"has advantages, and objective.type = {objective.type} reads none"
                instead = "learn their tokens: format: tokens"
                if source.num_documents > 1:
                    problem = "has two documents in each record, and objective.type = "
                    problem += f"{objective.type} compares none"
                    instead = "train on the chosen answers: format: prompt_completion, "
                    instead += "fields: {completion: chosen}"
                yield (f"{field}: {problem}. Set {errors.format_choices(fitting)}, or {instead}.")
            if objective.format not in (None, source.format):
                yield (
                    f"{field}: objective.type = {objective.type} needs records of format "
                    f"{objective.format}. Use format: {objective.format}, or objective.type=sft."
                )
    if objective.has_pairs and data.max_segments_per_row < 2:
        yield (
            f"data.max_segments_per_row = {data.max_segments_per_row}: must be at least 2 "
            f"with objective.type = {objective.type}, so that a row holds a pair of documents. "
            "Use 2 or more."
        )
    if objective.type == "reward" and "lm_head" in adapter.modules_to_save:
        saved = yaml_io.format_value(list(adapter.modules_to_save))
        yield (
            f"adapter.modules_to_save = {saved}: a reward model has no "
            "lm_head; its head, score, is always trained. Leave lm_head out."
        )
    if (
        isinstance(objective, Distill)
        and objective.teacher is None
        and not objective.sft_weight
        and adapter.source is None
    ):
        yield (
            "objective.sft_weight = 0.0: without objective.teacher, the teacher is the model "
            "before training, which already predicts the same. Set "
            "objective.sft_weight=1, or objective.teacher."
        )
    if eval.long_ppl and not data.eval_names:
        yield f"eval.long_ppl = true: needs an eval set. {_EVAL_SUGGESTION}"
    if eval.long_ppl and objective.has_pairs:
        yield (
            "eval.long_ppl = true: is the perplexity of texts, and objective.type = "
            f"{objective.type} compares answers. Use eval.long_ppl=false."
        )


def _check_training(
    run: RunConfig,
    data: DataConfig,
    objective: Objective,
    eval: EvalConfig,
    checkpoint: CheckpointConfig,
) -> Iterator[str]:
    if run.epochs is not None and any(source.weight is not None for source in data.train):
        yield (
            "data.train.0.weight: must not be set with run.epochs, because weighted sources end at "
            "different times and are repeated. Set run.steps, or leave the weights out."
        )
    names = data.eval_names
    patience = run.early_stopping_patience
    best_eval = checkpoint.best_eval
    if best_eval and not checkpoint.keep_best and patience is None:
        yield (
            f"checkpoint.best_eval = {best_eval}: has no effect, because checkpoint.keep_best is 0 "
            "and run.early_stopping_patience is null. "
            "Set checkpoint.keep_best=1, or checkpoint.best_eval=null."
        )
    elif checkpoint.keep_best and not names:
        yield (
            f"checkpoint.keep_best = {checkpoint.keep_best}: needs an eval set, whose loss ranks "
            f"the checkpoints. {_EVAL_SUGGESTION}"
        )
    elif best_eval is not None and best_eval not in names:
        yield (
            f"checkpoint.best_eval = {best_eval}: must be the name of an eval set. "
            f"Use {errors.format_choices([*names, 'null'])}."
        )
    if run.eval_at_start and not (names or eval.tasks):
        yield f"run.eval_at_start = true: needs an eval set or eval.tasks. {_EVAL_SUGGESTION}"
    samples = f"run.generate_samples = {run.generate_samples}"
    if run.generate_samples and not names:
        yield f"{samples}: needs an eval set. {_EVAL_SUGGESTION}"
    if run.generate_samples and objective.type == "reward":
        yield (
            f"{samples}: objective.type = reward trains a model that generates no text. Use "
            "run.generate_samples=0."
        )
    if patience is None:
        return
    is_missing = {
        "reward_accuracy": objective.format != "preference",
        "reward_margin": not objective.has_pairs,
        "token_accuracy": objective.type == "reward",
    }
    metric = run.early_stopping_metric
    if is_missing.get(metric):
        yield (
            f"run.early_stopping_metric = {metric}: objective.type = {objective.type} does not "
            "have it. Use run.early_stopping_metric=loss."
        )
    setting = f"run.early_stopping_patience = {patience}"
    evaluates_checkpoints = checkpoint.keep_best and run.save_every is not None
    if not names:
        yield f"{setting}: needs an eval set. {_EVAL_SUGGESTION}"
    elif run.eval_every is None and not evaluates_checkpoints:
        yield f"{setting}: needs an evaluation before the last step. Set run.eval_every=100."


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
    # between sections, called if these sections are valid
    rules = (_check_sections, *((_check_length, _check_training) if trains else ()))
    return config_file.parse(
        SCHEMA, fields, changes, rules=rules, name=name, trains=trains, unneeded=unneeded
    )


def apply_override(fields: dict[str, Any], override: str) -> str | None:
    """Sets a field: see `config.config_file.apply_override`."""
    return config_file.apply_override(SCHEMA, fields, override)
