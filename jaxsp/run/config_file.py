"""Config of a run: all sections, and loading them from YAML."""

import pathlib
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

import pydantic

from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.config import config_file, fields, yaml_io
from jaxsp.config.config_errors import Schema
from jaxsp.config.config_file import read, save
from jaxsp.config.fields import (
    HERE,
    ConfigSection,
    Duration,
    NonNegativeCount,
    NonNegativeFloat,
    PositiveCount,
    PositiveDuration,
    PositiveNumber,
    for_training,
    with_examples,
)
from jaxsp.core import errors, files
from jaxsp.data.data_config import BatchConfig, DataConfig
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.objectives.distill import Distill
from jaxsp.objectives.objective import Objective, Sft
from jaxsp.objectives.registry import OBJECTIVE, OBJECTIVES
from jaxsp.optimizers.registry import OPTIMIZER, Optimizer
from jaxsp.run.trackers import LoggingConfig
from jaxsp.system.device_mesh import MeshConfig
from jaxsp.tasks.tasks import EvalConfig
from jaxsp.training.step_config import MemoryConfig, StepConfig

__all__ = ["SCHEMA", "Config", "RunConfig", "apply_override", "load", "parse", "read", "save"]


class RunConfig(ConfigSection):
    """Run directory, length of training, and behavior on signals, hangs and NaN losses."""

    directory: str = for_training("runs/first", min_length=1)
    """Folder that the run writes: config.yaml, banner.txt, starts.jsonl, metrics.jsonl, eval.jsonl,
    tasks.jsonl, samples.jsonl, needle.png, tensorboard/, model/, checkpoints/,
    last_checkpoint.json, heartbeat.json and lock. It may also contain wandb/, mlflow.db,
    trackers.json, nonfinite_steps.jsonl, damaged/ and files that end in .damaged, which are safe to
    delete. Or a URL: s3://bucket/path or gs://bucket/path. The run then works in a local copy,
    and uploads each checkpoint while training continues. No two runs may use a URL at a time."""
    staging: Annotated[str | None, with_examples("/scratch/jaxsp", min_length=1)] = None
    """Folder of the local copies if directory is a URL; each process has its own. Its disk must
    hold the checkpoints that the run keeps, and one more. null: ~/.cache/jaxsp/runs, or below
    XDG_CACHE_HOME."""
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    """Seed of the random weights and of the order of rows."""
    steps: Annotated[PositiveCount | None, with_examples(1000)] = None
    """Number of optimizer updates. Set this or epochs. Steps before a resume count, and a
    checkpoint is written after the last step."""
    epochs: Annotated[PositiveNumber | None, with_examples(1, le=10**6)] = None
    """Number of passes over the training data. Set this or steps. A fraction ends within an epoch:
    0.5 trains on half of its rows, rounded up to whole steps."""
    log_every: PositiveCount = 1
    """Steps between two lines of metrics.jsonl."""
    save_every: Annotated[
        PositiveCount | Duration | Literal["epoch"] | None, with_examples("100", "30m")
    ] = timedelta(minutes=30)
    """Interval between checkpoints. A number of steps, a duration such as 30m, or epoch: at the end
    of each epoch of run.epochs. null: only after the last step."""
    eval_every: Annotated[PositiveCount | Literal["epoch"] | None, with_examples(100)] = None
    """Interval between evaluations of the eval sets. A number of steps, or epoch: at the end of
    each epoch of run.epochs. They are also evaluated after the last step. null: only then."""
    eval_at_start: bool = False
    """Also evaluate before the first step. The results have step 0 in eval.jsonl and the trackers.
    A resumed run does not repeat this evaluation."""
    generate_samples: NonNegativeCount = 0
    """Number of documents of each eval set that each evaluation also answers, to read: greedily, in
    at most 64 tokens, from the text before the document's first loss token. Prompts, answers and
    references are in samples.jsonl."""
    early_stopping_patience: Annotated[PositiveCount | None, with_examples(3)] = None
    """Number of evaluations in a row without improvement after which the run stops. An improvement
    is a lower loss on the eval set of checkpoint.best_eval (or another early_stopping_metric). The
    run then writes a checkpoint and exits with 0, as after the last step. An evaluation at the
    start counts, and a resumed run keeps the count. null: never."""
    early_stopping_metric: Literal["loss", "token_accuracy", "reward_accuracy", "reward_margin"] = (
        "loss"
    )
    """Number of eval.jsonl that must improve: fall for loss, rise for the others. Rewards are those
    of preference training."""
    early_stopping_min_delta: Annotated[NonNegativeFloat, with_examples(0.01)] = 0.0
    """Threshold of an improvement: the number must be better than the best so far by more than
    this."""
    resume: Annotated[str, with_examples("auto", min_length=1)] = "auto"
    """Checkpoint to resume from. auto: the latest one in run.directory, if there is one. never:
    none; run.directory must be new or empty. Otherwise the path or URL of a run directory or of a
    checkpoint; run.directory must be new or empty."""
    on_data_change: Literal["error", "restart", "continue"] = "error"
    """Action when the data, seed or row length changed since the checkpoint. error: refuse to
    resume. restart: start at the first of the new rows. continue: skip as many new rows as were
    already consumed; row_tokens must be unchanged."""
    shutdown_grace: Annotated[Duration, with_examples("25s")] = timedelta(seconds=25)
    """Time that a run may take to stop after SIGTERM, SIGINT or SIGHUP (a closed terminal, unless
    nohup is used). The run finishes the current step and writes a checkpoint if it expects both to
    fit. Otherwise it exits immediately and prints what is lost. A second SIGTERM or SIGINT always
    exits immediately. SLURM and Kubernetes kill a process 30 s after the signal by default."""
    stop_after: Annotated[PositiveDuration | None, with_examples("110m")] = None
    """Time from the start of the process after which the run stops, for queues with a time limit.
    It stops as after a signal, but always finishes the step and writes a checkpoint. A restart by
    the launcher resets the time. null: never."""
    step_timeout: Annotated[PositiveDuration | None, with_examples("30m")] = None
    """Time without progress after which the run exits with code 75. It applies to a step, an
    evaluation batch and a checkpoint write; the same command resumes the run. null: ten times the
    usual duration, and at least 10 minutes. For the first step, that is ten times its duration at
    1 % MFU, or one day on devices of unknown speed."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action after a step whose loss or gradient norm is not finite. Such a step changes neither
    weights nor optimizer state, and its documents are listed in nonfinite_steps.jsonl. stop: write
    a checkpoint and end the run; the same command resumes after that step. skip: continue with the
    next step."""
    max_nonfinite_steps: NonNegativeCount = 10
    """Maximum number of steps that on_nonfinite: skip skips after the process started. One more
    stops the run."""
    deterministic: bool = False
    """Make GPU runs reproducible bit for bit, with the same devices, mesh and versions. cuDNN
    attention and XLA then use only kernels that add in a fixed order, some of which are slower. CPU
    runs are always reproducible. Not covered: the order in which NCCL adds over devices, which
    depends on its version and on the number of devices. On Hopper, cuDNN then needs memory
    quadratic in the row length: 4 GiB per head for rows of 32,768 tokens with several documents. If
    that does not fit, attention.kernel=auto selects blockwise, which is much slower."""
    xla_options: Annotated[
        dict[str, bool | int | float | str], with_examples("{xla_gpu_memory_limit_slop_factor: 90}")
    ] = {}  # noqa: RUF012 - pydantic copies it
    """XLA options for compiling the step. They are added to those in the banner or replace them,
    and take precedence over XLA_FLAGS. Names are as in XLA_FLAGS, without the dashes."""

    compilation_cache: Annotated[str | None, with_examples("/scratch/programs", min_length=1)] = (
        "auto"
    )
    """Folder of compiled programs that later runs reuse, up to 5 GiB. auto:
    ~/.cache/jaxsp/programs, or below XDG_CACHE_HOME, for a single process on GPUs, or on CPUs with
    jax 0.12. Earlier releases print long lines about the processor when they read a program for
    CPUs. Several processes need a folder that all nodes share; process 0 writes it. More than 128
    on GPUs, each of which times kernels for itself, also have that of auto. null: none."""

    _expand_home = pydantic.field_validator("directory", "staging", "resume")(fields.expand_home)

    def find_problems(self) -> Iterator[str]:
        for name in ("save_every", "eval_every"):
            if self.epochs is None and getattr(self, name) == "epoch":
                yield (
                    f"{HERE}.{name} = epoch: needs {HERE}.epochs. "
                    f"Use {HERE}.epochs=1 instead of {HERE}.steps, or {HERE}.{name}=100."
                )
        if self.early_stopping_patience is None:
            for name, unset in (("early_stopping_min_delta", 0), ("early_stopping_metric", "loss")):
                if getattr(self, name) != unset:
                    yield (
                        f"{self.show(name)}: has no effect without {HERE}.early_stopping_patience. "
                        f"Set {HERE}.early_stopping_patience=3, or {HERE}.{name}={unset}."
                    )

    @pydantic.field_validator("save_every", "eval_every", mode="before")
    @classmethod
    def _check_interval(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if value is None or value == "epoch" or fields.is_count(value):
            return value
        if info.field_name == "eval_every":
            raise ValueError("must be a number of steps, epoch, or null")
        try:
            return fields.parse_positive_duration(value)
        except ValueError:
            rule = "must be a number of steps, a duration such as 30m, epoch, or null"
            raise ValueError(rule) from None

    @pydantic.field_validator("xla_options", mode="before")
    @classmethod
    def _check_xla_options(cls, value: Any) -> Any:
        options = value if isinstance(value, dict) else {}
        for name, option in options.items():
            if not str(name).startswith("xla_"):
                raise ValueError(f"{name} must begin with xla_")
            if not isinstance(option, bool | int | float | str):
                raise ValueError(f"{name} must be true, false, a number, or text")
        return value

    @property
    def local_dir(self) -> pathlib.Path:
        """Folder of the run on this machine: directory, or this process's copy if that is a URL."""
        if not files.is_url(self.directory):
            return pathlib.Path(self.directory)
        from jaxsp.checkpoint import run_paths
        from jaxsp.system import distributed

        parent = pathlib.Path(self.staging) if self.staging else files.cache_dir() / "runs"
        index = distributed.this_process.index
        return parent / f"{run_paths.name_local(self.directory)}{f'-{index}' if index else ''}"

    @property
    def is_writer(self) -> bool:
        """True if this process makes folders and metadata of the run directory: process 0, or each
        in its own copy if directory is a URL."""
        import jax

        return jax.process_index() == 0 or files.is_url(self.directory)


def is_due(every: int | str | timedelta | None, step: int) -> bool:
    """True if an action with an interval in steps is due; never with epochs or times."""
    return isinstance(every, int) and step % every == 0


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
