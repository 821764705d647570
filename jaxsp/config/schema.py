"""Everything a run can be told: a YAML file plus `key.path=value`, checked before anything happens."""

import copy
import math
import pathlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

import pydantic
import yaml

from jaxsp.config import config_errors, foreign_config, yaml_io
from jaxsp.config import overrides as given
from jaxsp.core import durations, paths
from jaxsp.core.errors import UserError


class ConfigSection(pydantic.BaseModel):
    """A group of fields: frozen, unknown keys forbidden, documented by the docstring under each field.

    A field without a default that works for everyone carries an example, for the end of an error's sentence.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


MAX_COUNT = 2**31 - 1
"""Largest count: arrays on the devices have 32-bit integers."""

PositiveCount = Annotated[int, pydantic.Field(ge=1, le=MAX_COUNT)]
NonNegativeCount = Annotated[int, pydantic.Field(ge=0, le=MAX_COUNT)]
NonNegativeFloat = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]


def _parse_positive_duration(value: object) -> timedelta:
    duration = durations.parse(value)
    if not duration:
        raise ValueError("must be longer than 0s")
    return duration


Duration = Annotated[
    timedelta,
    pydantic.BeforeValidator(durations.parse),
    pydantic.PlainSerializer(durations.to_text),
]
"""A number with a unit: 25s, 110m or 12h."""

PositiveDuration = Annotated[
    timedelta,
    pydantic.BeforeValidator(_parse_positive_duration),
    pydantic.PlainSerializer(durations.to_text),
]


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


def with_examples(*examples: Any, **rules: Any) -> Any:
    return pydantic.Field(examples=list(examples), **rules)


def expand_home(value: str | None) -> str | None:
    """Replaces a leading `~`. Raises: ValueError for a path that cannot exist."""
    if value is None:
        return None
    path = paths.expand_home(value)
    return str(path) if value.startswith("~") else value


class RunConfig(ConfigSection):
    """How long to train, and where to write."""

    directory: Annotated[str, with_examples("runs/first", min_length=1)]
    """Folder that the run writes: config.yaml, banner.txt, metrics.jsonl, eval.jsonl, tensorboard/, model/, checkpoints/,
    heartbeat.json, lock; perhaps nonfinite_steps.jsonl and damaged/, which nobody needs any more."""
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    """Decides the random weights and the order of the rows."""
    steps: Annotated[PositiveCount | None, with_examples(1000)] = None
    """Optimizer updates. Give this or epochs. Those before a resume count, and a checkpoint is written after the last."""
    epochs: Annotated[PositiveCount | None, with_examples(1)] = None
    """Passes over the training data. Give this or steps."""
    log_every: PositiveCount = 1
    """Steps between two lines of metrics.jsonl."""
    save_every: Annotated[
        PositiveCount | Duration | Literal["epoch"] | None, with_examples("100", "30m")
    ] = timedelta(minutes=30)
    """Steps between two checkpoints, or a duration such as 30m, or epoch: at the end of each epoch
    of run.epochs. null: only after the last step."""
    eval_every: Annotated[PositiveCount | Literal["epoch"] | None, with_examples(100)] = None
    """Steps between two evaluations of the eval sets, or epoch: at the end of each epoch of run.epochs. They are also evaluated
    after the last step; null: only then."""
    eval_at_start: bool = False
    """Also evaluate before the first step. The results are those of step 0 in eval.jsonl and
    TensorBoard. A resumed run does not repeat it."""
    early_stopping_patience: Annotated[PositiveCount | None, with_examples(3)] = None
    """Stop after this many evaluations in a row without improvement of the loss on the eval set of checkpoint.best_eval. A
    checkpoint is written and the exit code is 0, as after the last step. An evaluation at the start counts; resuming keeps the
    count. null: never."""
    early_stopping_min_delta: Annotated[NonNegativeFloat, with_examples(0.01)] = 0.0
    """A loss counts as an improvement if it is lower than the best so far by more than this."""
    resume: Annotated[str, with_examples("auto", min_length=1)] = "auto"
    """auto: go on from the newest checkpoint in run.directory, if it has one. never: run.directory must be new or empty.
    Or a run's directory or a checkpoint to go on from, in a run.directory that is new or empty."""
    on_data_change: Literal["error", "restart", "continue"] = "error"
    """When a run would go on with other rows than before, because data, row_tokens or seed changed. error: it does not.
    restart: with the first of the new rows. continue: behind as many of them as were consumed of the old, where row_tokens is
    as before."""
    shutdown_grace: Annotated[Duration, with_examples("25s")] = timedelta(seconds=25)
    """Time that the run may take to stop after SIGTERM or SIGINT. The run finishes the current step and writes a checkpoint if
    both are expected to fit; otherwise it exits immediately and prints what is lost. A second signal always exits
    immediately. SLURM and Kubernetes kill a process 30 s after the signal by default."""
    stop_after: Annotated[PositiveDuration | None, with_examples("110m")] = None
    """Time from the start of the process after which the run stops as after a signal, without the limit of shutdown_grace; for
    queues with a time limit. A restart by the launcher resets it. null: never."""
    step_timeout: Annotated[PositiveDuration | None, with_examples("30m")] = None
    """Time without progress in a step, an evaluation batch or a checkpoint write after which the run exits with code 75;
    jaxsp.launch then restarts it. null: ten times the usual duration, and at least 10 minutes; the first step has no limit."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """After a step whose loss or gradient norm is not finite. It changed neither weights nor optimizer, and nonfinite_steps.jsonl
    says which documents it had. stop: a checkpoint is written and the run ends; the same command goes on behind the step.
    skip: the run goes on at once."""
    max_nonfinite_steps: NonNegativeCount = 10
    """Steps that on_nonfinite: skip leaves out, since the process began; after one more the run stops."""
    deterministic: bool = False
    """The same numbers bit for bit each time on GPUs too, with the same devices, mesh and versions: cuDNN's attention and XLA
    choose only kernels that add in a fixed order, some of them slower. On CPUs it is so in any case. Not covered: the order in
    which NCCL adds over devices, which is NCCL's choice for a number of devices and its version.
    On Hopper, cuDNN needs memory for it that is quadratic in the row length: 4 GiB per head for rows of 32,768 tokens with
    several documents. Where that does not fit, attention.kernel=auto means blockwise, which is much slower."""

    xla_options: Annotated[
        dict[str, bool | int | float | str], with_examples("{xla_gpu_memory_limit_slop_factor: 90}")
    ] = {}
    """XLA's options for compiling the step, beside those that the banner names or in their place; they win over XLA_FLAGS.
    Names as in XLA_FLAGS, without the dashes."""

    _expand_home = pydantic.field_validator("directory", "resume")(expand_home)

    @pydantic.field_validator("save_every", mode="before")
    @classmethod
    def _check_save_every(cls, value: Any) -> Any:
        if value is None or value == "epoch" or is_count(value):
            return value
        try:
            return _parse_positive_duration(value)
        except ValueError:
            raise ValueError(
                "must be a number of steps, a duration such as 30m, epoch, or null"
            ) from None

    @pydantic.field_validator("eval_every", mode="before")
    @classmethod
    def _check_eval_every(cls, value: Any) -> Any:
        if value is not None and not is_count(value) and value != "epoch":
            raise ValueError("must be a number of steps, or epoch, or null")
        return value

    @pydantic.field_validator("xla_options", mode="before")
    @classmethod
    def _check_xla_options(cls, value: Any) -> Any:
        for name, option in value.items() if isinstance(value, dict) else ():
            if not str(name).startswith("xla_"):
                raise ValueError(f"{name} is no name that begins with xla_")
            if not isinstance(option, bool | int | float | str):
                raise ValueError(f"{name} must be true or false, a number, or text")
        return value

    @property
    def save_steps(self) -> int | None:
        """Steps between two checkpoints, where the field counts steps."""
        return self.save_every if isinstance(self.save_every, int) else None

    @property
    def save_interval(self) -> timedelta | None:
        """Time between two checkpoints, if the field is a duration."""
        return self.save_every if isinstance(self.save_every, timedelta) else None


class ModelSourceConfig(ConfigSection):
    """What is trained."""

    source: Annotated[str | None, with_examples("Qwen/Qwen3-0.6B", min_length=1)] = None
    """A Hugging Face folder, or a model's name on the hub: its config.json, safetensors weights and tokenizer. Give this
    or config."""
    config: Annotated[
        dict[str, Any] | None, with_examples("{model_type: llama, hidden_size: 256}")
    ] = None
    """Fields of a Hugging Face config.json, with model_type (llama, mistral, qwen2 or qwen3); the weights start random."""
    tokenizer: Annotated[str | None, with_examples("bytes")] = None
    """`bytes` (256 bytes and an end token), or a folder or hub name for AutoTokenizer; null: the source's own. `tokens`
    records need none."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations, of gathered weights and of weights on the wire. Master weights are float32."""

    _expand_home = pydantic.field_validator("source", "tokenizer")(expand_home)


class MeshConfig(ConfigSection):
    """How the devices are arranged: replica x data x seq of them."""

    replica: PositiveCount = 1
    """Copies of the whole arrangement; weights are repeated over it and sharded over data x seq."""
    data: Annotated[int, pydantic.Field(ge=-1, le=MAX_COUNT)] = -1
    """Groups of devices within a replica, each with rows of its own. -1: as many as the devices allow."""
    seq: Annotated[PositiveCount, with_examples(4)] = 1
    """Devices that share each row of a group (the degree of sequence parallelism)."""
    virtual_cpu_devices: Annotated[PositiveCount | None, with_examples(8)] = None
    """Split the CPU into so many devices, where there is no accelerator; for trying a mesh without GPUs."""

    @pydantic.field_validator("data")
    @classmethod
    def _check_data(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be -1 or at least 1")
        return value


class AttentionConfig(ConfigSection):
    """How attention is computed."""

    strategy: Literal["auto", "ulysses", "all_gather", "ring", "hybrid"] = "auto"
    """How the devices of a group share it. ulysses: each gets all tokens for a part of the heads; mesh.seq divides the query
    heads. ring: each keeps its queries, keys and values go round. gather: each keeps its queries, keys and values of all tokens
    are gathered, some heads at a time. hybrid: ulysses in neighbours, ring or gather between them. auto: ulysses where it can
    be, else what sends least."""
    ulysses_degree: Annotated[PositiveCount | None, with_examples(4)] = None
    """hybrid: how many neighbours share the heads; divides mesh.seq and the query heads. null: what sends least."""
    outer_strategy: Literal["ring", "all_gather"] = "ring"
    """hybrid and auto: how keys and values get from neighbours to neighbours."""
    kv_heads_per_gather: Annotated[PositiveCount | None, with_examples(2)] = None
    """gather: K/V heads that are gathered at a time, of those of a device; null: one."""
    kernel: Literal["auto", "cudnn", "blockwise", "reference"] = "auto"
    """cudnn: flash attention in bfloat16, on NVIDIA GPUs from Hopper on (A100: rows of one document). blockwise: online
    softmax over blocks, memory linear in length, on any device. reference: the whole score matrix, for tests. auto: cudnn
    where it runs, else blockwise."""
    head_chunks: Annotated[PositiveCount | None, with_examples(2)] = None
    """cudnn: a device's heads go through the kernel in so many parts, one after another; null: as few as keep within
    cuDNN's limits and its memory in bounds."""


class SourceConfig(ConfigSection):
    """One place that documents come from."""

    source: Annotated[str, with_examples("notes/*.txt", min_length=1)]
    """A file or a glob: .jsonl or .json (lines, or one array), .csv, .tsv or plain text (one document a file), also as .gz or
    .zst; .parquet or .arrow; a folder saved by `datasets`; or a data set's name on the hub. `{stdlib}` stands for the folder of
    Python's own library."""
    format: Annotated[
        Literal["text", "messages", "prompt_completion", "tokens"], with_examples("text")
    ]
    """What a record holds, as in TRL. text: `text`. messages: `messages`, each with `role` and `content`, perhaps with
    `tools`. prompt_completion: `prompt` and `completion`, both text or both messages. tokens: `input_ids` and perhaps `labels`
    (not shifted, -100: no loss). An assistant message with `weight: 0` or `train: false` has no
    loss."""
    name: Annotated[str | None, with_examples("books", min_length=1)] = None
    """What metrics and banner call it; null: the source as written."""
    weight: Annotated[float | None, with_examples(0.7, gt=0, allow_inf_nan=False)] = None
    """In data.train: share of the tokens learned from, beside the other sources' weights; the source is repeated as often as
    that takes. All sources have one, or none: then an epoch is all their documents once. Asks for run.steps."""
    split: Annotated[str | None, with_examples("train", min_length=1)] = None
    """Split of a hub data set or of a saved folder, or a part of one as in `datasets`: train[:95%], train[95%:],
    train[100:200]. Of files, the only split is train. null: the only split, or train."""
    subset: Annotated[str | None, with_examples("en", min_length=1)] = None
    """Which configuration of a hub data set, where it has several."""
    revision: Annotated[str | None, with_examples("main", min_length=1)] = None
    """Branch, tag or commit of a hub data set; null: the newest."""
    fields: Annotated[
        dict[str, str], with_examples("{messages: conversations, role: from, content: value}")
    ] = {}
    """What the records call the fields of the format (text; messages or prompt and completion, tools, chat_template_kwargs;
    input_ids, labels), and those of a message (role, content), where they have other names."""
    roles: Annotated[dict[str, str], with_examples("{human: user, gpt: assistant}")] = {}
    """What the template calls the roles of the messages, where they have other names."""


class DataConfig(ConfigSection):
    """What is learned from, and how it is cut into rows."""

    train: Annotated[
        tuple[SourceConfig, ...],
        with_examples("[{source: notes/*.txt, format: text}]", min_length=1, strict=False),
    ]
    """The training documents."""
    eval: Annotated[
        tuple[SourceConfig, ...],
        with_examples("[{source: held-out/*.txt, format: text}]", strict=False),
    ] = ()
    """Data sets to evaluate on, each by itself."""
    eval_fraction: Annotated[float | None, with_examples(0.05, gt=0, lt=1)] = None
    """Fraction of the training documents to hold out as an eval set named held_out, in addition to
    data.eval; rounded up. A hash of run.seed, the source's name and the document's index selects
    them, so every mesh and every resume holds out the same documents. A change of the
    fraction is a change of the data (run.on_data_change)."""
    row_tokens: Annotated[PositiveCount | tuple[PositiveCount, ...], with_examples(8192)]
    """Length of a row in tokens; documents are packed into rows. Or several lengths, such as [8192, 65536]: each document goes
    to the shortest that holds it, and each step has rows of one length."""
    max_segments_per_row: PositiveCount = 64
    """The most pieces (documents or parts of them) in one row."""
    long_documents: Literal["split", "truncate", "drop", "error"] = "split"
    """What becomes of a document longer than the (longest) row. split: pieces in several rows. truncate: its beginning stays.
    drop: it is left out. error: the run does not begin."""
    chat_template: Annotated[str | None, with_examples("template.jinja", min_length=1)] = None
    """A file with a chat template (Jinja), or the template itself; null: the tokenizer's own."""
    train_on: Literal["assistant", "all"] = "assistant"
    """assistant: of messages, only what the assistant says is learned, and of prompt_completion, the completion. all: every
    token."""
    on_bad_record: Literal["error", "skip"] = "error"
    """A record that is not what its format says. error: the run does not begin. skip: it is left out, and counted."""
    max_bad_records: NonNegativeCount = 100
    """The most records of a source that are skipped; with more, the run does not begin."""
    num_workers: Annotated[PositiveCount | None, with_examples(8)] = None
    """Processes that tokenise; null: one for each core, as far as there is work for them."""

    @pydantic.field_validator("row_tokens", mode="before")
    @classmethod
    def _check_row_tokens(cls, value: Any) -> Any:
        several = isinstance(value, list | tuple)
        lengths = list(value) if several else [value]
        if any(isinstance(length, int) and length > MAX_COUNT for length in lengths):
            raise ValueError(f"must be at most {MAX_COUNT} tokens")
        if not lengths or not all(map(is_count, lengths)):
            raise ValueError("must be a number of tokens, or a list of them")
        if len(set(lengths)) < len(lengths):
            raise ValueError("has a length twice")
        longest = max(lengths)
        if any(longest % length for length in lengths):
            # the nearest that divide it
            small = [
                part
                for part in range(1, min(math.isqrt(longest), 10**6) + 1)
                if longest % part == 0
            ]
            parts = [
                part for part in (*small, *(longest // part for part in small)) if part < longest
            ]
            near = {
                min(parts, key=lambda part: max(part / length, length / part))
                for length in lengths
                if length < longest
            }
            raise ValueError(
                f"every step has the same tokens: the longest has to be a multiple of each. Use {[*sorted(near), longest]}"
            )
        return tuple(lengths) if several else value

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The lengths of rows, the shortest first."""
        return (
            tuple(sorted(self.row_tokens))
            if isinstance(self.row_tokens, tuple)
            else (self.row_tokens,)
        )

    @property
    def max_row_tokens(self) -> int:
        """Tokens of the longest row; the only length of most configs."""
        return self.row_lengths[-1]


class BatchConfig(ConfigSection):
    """How many rows make a step."""

    rows_per_step: Annotated[PositiveCount, with_examples(8)]
    """Rows that one optimizer update learns from, over the whole mesh, whatever the mesh. With rows of several lengths: of the
    longest; of shorter ones it takes as many as have the same tokens."""
    rows_per_microbatch: PositiveCount = 1
    """Rows that a group of devices works on at the same time; the rest of a step's rows follow in turns."""


class OptimizerConfig(ConfigSection):
    """How the weights move."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw, or sgd (no momentum)."""
    learning_rate: Annotated[NonNegativeFloat, with_examples(1e-5)]
    """The peak, reached after warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """After warm-up: cosine or linear towards 0, which the step after the last would have, or constant."""
    warmup_steps: Annotated[NonNegativeCount, with_examples(100)] = 0
    """Steps of linear growth; the first has learning_rate / warmup_steps."""
    warmup_fraction: Annotated[Fraction | None, with_examples(0.03)] = None
    """Warm-up as a fraction of all steps of the run, rounded up to whole steps. Give this or warmup_steps."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of matrices, times the learning rate; norms and biases do not decay."""
    beta1: Fraction = 0.9
    """adamw: decay of the gradient's average."""
    beta2: Fraction = 0.95
    """adamw: decay of the squared gradient's average."""
    eps: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1e-8
    """adamw: added to the root of the squared gradient's average."""
    max_grad_norm: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = 1.0
    """Gradients are scaled down to this global norm, of the whole step; null: never."""

    @pydantic.field_validator("warmup_steps", mode="before")
    @classmethod
    def _check_warmup_steps(cls, value: Any) -> Any:
        if isinstance(value, float) and 0 < value < 1:
            raise ValueError(
                f"must be a whole number of steps. For a fraction of all steps, set optimizer.warmup_fraction={value}"
            )
        return value

    @pydantic.field_validator("warmup_fraction", mode="before")
    @classmethod
    def _check_warmup_fraction(cls, value: Any) -> Any:
        if is_count(value):
            raise ValueError(
                f"must be less than 1. For a number of steps, set optimizer.warmup_steps={value}"
            )
        return value

    def num_warmup_steps(self, num_steps: int) -> int:
        """Number of warm-up steps in a run of `num_steps` steps."""
        if self.warmup_fraction is None:
            return self.warmup_steps
        # 0.07 * 100 is 7.000000000000001 in floating point, and 7 steps are meant
        return math.ceil(round(self.warmup_fraction * num_steps, 6))


class MemoryConfig(ConfigSection):
    """What memory is traded for."""

    remat: Literal["auto", "none", "save_attention_and_mlp", "save_attention", "full"] = "auto"
    """What the backward pass recomputes. none: elementwise operations only. save_attention_and_mlp: a layer from its input, except
    attention and the wide products of its MLP, whose results are kept. attention: a layer from its input, except attention.
    full: attention too, about a quarter more arithmetic where rows are long. auto: the first of save_attention_and_mlp (if nothing
    is offloaded), attention and full that fits. Gathered weights are never kept; they are gathered again."""
    offload_activations: Annotated[
        Literal["none", "layer_inputs", "layer_inputs_and_attention"], with_examples("layer_inputs")
    ] = "none"
    """What waits in host memory for the backward pass. residual: each layer's input. layer_inputs_and_attention: what attention
    gives too."""
    offload_optimizer: Annotated[
        Literal["none", "state", "state_and_gradients"], with_examples("state")
    ] = "none"
    """What lies in host memory between the steps. state: float32 weights and the optimizer's averages, of which a layer at a
    time visits its device; a copy in the compute dtype stays there. state_and_gradients: finished gradients too. Needs jax
    0.11.1 or later."""
    mlp_tile_tokens: Annotated[Literal["auto"] | PositiveCount, with_examples(4096)] = "auto"
    """Tokens of a device that go through a layer's projections and MLP at a time; tiles are
    recomputed in the backward pass. auto: all tokens, or fewer if the step does not fit."""
    loss_tile_tokens: Annotated[Literal["auto"] | PositiveCount, with_examples(1024)] = "auto"
    """Tokens of a device whose logits exist at a time. auto: all tokens, or fewer if the step does
    not fit."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of sharded weights travel and are summed; those of small weights always sum in float32."""

    @pydantic.field_validator("mlp_tile_tokens", "loss_tile_tokens", mode="before")
    @classmethod
    def _check_tile_tokens(cls, value: Any) -> Any:
        if value != "auto" and not is_count(value):
            raise ValueError("must be auto, or a number of tokens, at least 1")
        return value


class CheckpointConfig(ConfigSection):
    """What is kept on disk."""

    keep_latest: PositiveCount = 2
    """Number of latest checkpoints that are kept; older ones are deleted when the next is complete, so
    that the disk must hold one more. The run does not start if there is no space for a single one, and
    prints a warning if there is not enough for all."""
    keep_best: NonNegativeCount = 0
    """Number of checkpoints with the lowest loss on a data set of data.eval that are kept in addition
    to the latest ones. If it is not 0, the run evaluates before each checkpoint; a checkpoint that a
    stop writes is evaluated when the run is resumed."""
    best_eval: Annotated[str | None, with_examples("held out", min_length=1)] = None
    """Name of the eval set whose loss ranks checkpoints for keep_best and decides early stopping; null: the first of
    data.eval, or held_out. After a change of this field, or of that set's documents, earlier losses no longer count."""


class LoggingConfig(ConfigSection):
    """What is recorded beside metrics.jsonl."""

    tensorboard: bool = True
    """Write the numbers of metrics.jsonl and eval.jsonl for TensorBoard too."""
    profile_steps: Annotated[
        tuple[PositiveCount, PositiveCount] | None, with_examples("[3, 5]", strict=False)
    ] = None
    """First and last step of a trace by JAX's profiler, in run.directory/profile; for XProf or Perfetto."""

    @pydantic.field_validator("profile_steps", mode="before")
    @classmethod
    def _check_profile_steps(cls, value: Any) -> Any:
        pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(is_count, value))
        if value is not None and not (pair and value[0] <= value[1]):
            raise ValueError("must be the first and the last step, counted from 1, or null")
        return value

    compilation_cache: Annotated[str | None, with_examples("~/.cache/jaxsp", min_length=1)] = None
    """Folder in which compiled programs are kept for the next start. (On CPUs, XLA prints long lines about the processor's
    features when it finds one there.)"""


class Config(ConfigSection):
    """A whole run."""

    run: RunConfig
    model: ModelSourceConfig
    mesh: MeshConfig = MeshConfig()
    attention: AttentionConfig = AttentionConfig()
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def with_row_tokens(self, row_tokens: int) -> "Config":
        """The config of steps with rows of one of the lengths: as many tokens a step, and at a time, as with the longest."""
        times = self.data.max_row_tokens // row_tokens
        batch = {
            "rows_per_step": times * self.batch.rows_per_step,
            "rows_per_microbatch": times * self.batch.rows_per_microbatch,
        }
        data = self.data.model_copy(update={"row_tokens": row_tokens})
        return self.model_copy(update={"data": data, "batch": self.batch.model_copy(update=batch)})


def load(path: str | pathlib.Path, overrides: list[str]) -> Config:
    """The config in a YAML file, changed by `key.path=value` words.

    Raises: UserError with every problem of the file and of the words at once.
    """
    return parse(read(path), overrides)


def _suggest_start() -> str:
    """Suggests how to get a config, at the end of an error about its file."""
    ours = pathlib.Path(__file__).parents[2] / "configs/quickstart.yaml"
    here = pathlib.Path("configs/quickstart.yaml")
    for path in (here, ours):
        if path.is_file():
            return f"Try {path}."
    return "Write one such as this, with the fields of python -m jaxsp.train --help:"


def _render_starter() -> list[str]:
    """A small config, where no file of the repository is there to start from."""
    return foreign_config.render_starter(Config) if _suggest_start().endswith(":") else []


def read(path: str | pathlib.Path) -> dict[str, Any]:
    """The nested fields of a YAML file, not checked yet. Raises: UserError where it holds none."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError([f"{path}: no such file. {_suggest_start()}", *_render_starter()]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None
    try:
        fields = yaml_io.load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2026-13-01 is not a date
        raise UserError(
            f"{path}: cannot be read as YAML: {' '.join(str(error).split())}."
        ) from None
    if not isinstance(fields, dict):
        problem = f"{path}: holds no `group: {{field: value}}` pairs. {_suggest_start()}"
        raise UserError([problem, *_render_starter()])
    return fields


def parse(fields: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config that nested fields describe, with some changed by `key.path=value`. Raises: UserError with all problems."""
    fields = copy.deepcopy(fields)
    problems = []
    for word in overrides:
        works = suggest_override(word.partition("=")[0]) or "mesh.seq=4"
        if problem := given.apply(fields, word, example_override=works):
            problems.append(problem)
    problems += given.check_fields_together(fields)
    try:
        config = Config.model_validate(fields)
    except pydantic.ValidationError as error:
        problems += _explain_problems(fields, error)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return config


def _explain_problems(fields: dict[str, Any], error: pydantic.ValidationError) -> list[str]:
    """A line for each finding, or one page for a config of another system."""
    # a list whose only entry is bad counts as empty
    found = [one for one in error.errors() if not (one["type"] == "too_short" and one["input"])]
    foreign = foreign_config.find_foreign_options(Config, fields)
    if len(foreign) < foreign_config.MIN_FOREIGN_OPTIONS:
        return list(config_errors.explain_errors(Config, found))
    start = [_suggest_start(), *_render_starter()]
    page = foreign_config.render_page(Config, foreign, start_lines=start)
    # the page says which groups there are
    known = [one for one in found if one["type"] != "missing" or len(one["loc"]) > 1]
    top = {name.partition(".")[0] for name in foreign}
    own = [one for one in known if one["loc"][0] not in top]
    return [*page, *config_errors.explain_errors(Config, own)]


def save(config: Config, path: pathlib.Path) -> None:
    """Writes the config with every default filled in, so that `load(path, [])` gives it back."""
    text = yaml_io.dump(config.model_dump(mode="json"))
    yaml_io.write_atomic(path, text)


def suggest_override(name: str) -> str | None:
    """Returns a `field=value` that works for a name without its group, or of another system."""
    return config_errors.suggest_override(Config, name)


def describe_fields() -> str:
    """Every field with its type, default and meaning, for --help."""
    return config_errors.describe_fields(Config)
