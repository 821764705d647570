"""Config section of the run."""

import pathlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any, Literal

import pydantic

from jaxsp.config import fields
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
from jaxsp.core import files


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
