"""Everything a run can be told: a YAML file plus `key.path=value`, checked before anything happens."""

import copy
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import pydantic
import yaml

from jaxsp.core import errors


class Group(pydantic.BaseModel):
    """A group of fields: frozen, unknown keys forbidden, documented by the docstring under each field.

    A field without a default that works for everyone carries an example, for the end of an error's sentence.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


Positive = Annotated[int, pydantic.Field(ge=1)]
NotNegative = Annotated[int, pydantic.Field(ge=0)]
Number = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, pydantic.Field(ge=0, lt=1)]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _like(*examples: Any, **rules: Any) -> Any:
    return pydantic.Field(examples=list(examples), **rules)


class Run(Group):
    """How long to train, and where to write."""

    directory: Annotated[str, _like("runs/first", min_length=1)]
    """Folder that the run writes: config.yaml, banner.txt, metrics.jsonl, eval.jsonl, tensorboard/, model/, checkpoints/."""
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    """Decides the random weights and the order of the rows."""
    steps: Annotated[Positive | None, _like(1000)] = None
    """Optimizer updates. Give this or epochs. Those before a resume count, and a checkpoint is written after the last."""
    epochs: Annotated[Positive | None, _like(1)] = None
    """Passes over the training data. Give this or steps."""
    log_every: Positive = 1
    """Steps between two lines of metrics.jsonl."""
    save_every: Annotated[int | str | None, _like("100", "30m")] = "30m"
    """Steps between two checkpoints, or minutes: 30m. null: only after the last step."""
    eval_every: Annotated[Positive | None, _like(100)] = None
    """Steps between two evaluations on data.eval, which is also evaluated after the last step; null: only then."""
    resume: Annotated[str, _like("auto", min_length=1)] = "auto"
    """auto: go on from the newest checkpoint in run.directory, if it has one. never: run.directory must be new or empty.
    Or a run's directory or a checkpoint to go on from, in a run.directory that is new or empty."""

    @pydantic.field_validator("save_every", mode="before")
    @classmethod
    def _steps_or_minutes(cls, value: Any) -> Any:
        if value is not None and not _is_count(value) and not (isinstance(value, str) and re.fullmatch("[1-9][0-9]*m", value)):
            raise ValueError("must be a number of steps, or of minutes with an m behind it, or null")
        return value

    @property
    def save_steps(self) -> int | None:
        """Steps between two checkpoints, where the field counts steps."""
        return self.save_every if isinstance(self.save_every, int) else None

    @property
    def save_minutes(self) -> int | None:
        """Minutes between two checkpoints, where the field counts minutes."""
        return int(self.save_every[:-1]) if isinstance(self.save_every, str) else None


class Model(Group):
    """What is trained."""

    source: Annotated[str | None, _like("Qwen/Qwen3-0.6B", min_length=1)] = None
    """A Hugging Face folder, or a model's name on the hub: its config.json, safetensors weights and tokenizer. Give this
    or config."""
    config: Annotated[dict[str, Any] | None, _like("{model_type: llama, hidden_size: 256}")] = None
    """Fields of a Hugging Face config.json, with model_type (llama, mistral, qwen2 or qwen3); the weights start random."""
    tokenizer: Annotated[str | None, _like("bytes")] = None
    """`bytes` (256 bytes and an end token), or a folder or hub name for AutoTokenizer; null: the source's own. `tokens`
    records need none."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations, of gathered weights and of weights on the wire. Master weights are float32."""


class Mesh(Group):
    """How the devices are arranged: replica x data x seq of them."""

    replica: Positive = 1
    """Copies of the whole arrangement; weights are repeated over it and sharded over data x seq."""
    data: Annotated[int, pydantic.Field(ge=-1)] = -1
    """Groups of devices within a replica, each with rows of its own. -1: as many as the devices allow."""
    seq: Positive = 1
    """Devices that share each row of a group (the degree of sequence parallelism)."""
    virtual_cpu_devices: Annotated[Positive | None, _like(8)] = None
    """Split the CPU into so many devices, where there is no accelerator; for trying a mesh without GPUs."""

    @pydantic.field_validator("data")
    @classmethod
    def _no_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("there is no mesh of 0 groups")
        return value


class Attention(Group):
    """How attention is computed."""

    kernel: Literal["auto", "cudnn", "blockwise", "reference"] = "auto"
    """cudnn: flash attention in bfloat16, on NVIDIA GPUs from Hopper on (A100: rows of one document). blockwise: online
    softmax over blocks, memory linear in length, on any device. reference: the whole score matrix, for tests. auto: cudnn
    where it runs, else blockwise."""
    head_chunks: Annotated[Positive | None, _like(2)] = None
    """cudnn: a device's heads go through the kernel in so many parts, one after another; null: as few as keep within
    cuDNN's limits and its memory in bounds."""


class Source(Group):
    """One place that documents come from."""

    source: Annotated[str, _like("notes/*.txt", min_length=1)]
    """A file or a glob: .jsonl or .json lines, .parquet, or plain text (one document a file). `{stdlib}` stands for the
    folder of Python's own library."""
    format: Annotated[Literal["text", "tokens"], _like("text")]
    """text: records with `text`. tokens: records with `input_ids` and optionally `labels` (not shifted, -100: no loss)."""
    name: Annotated[str | None, _like("books", min_length=1)] = None
    """What eval.jsonl calls it; null: the source as written."""


class Data(Group):
    """What is learned from, and how it is cut into rows."""

    train: Annotated[tuple[Source, ...], _like("[{source: notes/*.txt, format: text}]", min_length=1, strict=False)]
    """The training documents."""
    eval: Annotated[tuple[Source, ...], _like("[{source: held-out/*.txt, format: text}]", strict=False)] = ()
    """Data sets to evaluate on, each by itself."""
    row_tokens: Annotated[Positive, _like(8192)]
    """Length of a row in tokens; documents are packed into rows, longer ones are split over several."""
    max_documents_per_row: Positive = 64
    """The most pieces (documents or parts of them) in one row."""
    workers: Positive = 1
    """Processes that tokenise."""


class Batch(Group):
    """How many rows make a step."""

    rows_per_step: Annotated[Positive, _like(8)]
    """Rows that one optimizer update learns from, over the whole mesh, whatever the mesh."""
    rows_at_once: Positive = 1
    """Rows that a group of devices works on at the same time; the rest of a step's rows follow in turns."""


class Optimizer(Group):
    """How the weights move."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw, or sgd (no momentum)."""
    learning_rate: Annotated[Number, _like(1e-5)]
    """The peak, reached after warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """After warm-up: cosine or linear towards 0, which the step after the last would have, or constant."""
    warmup_steps: NotNegative = 0
    """Steps of linear growth; the first has learning_rate / warmup_steps."""
    weight_decay: Number = 0.0
    """Decoupled decay of matrices, times the learning rate; norms and biases do not decay."""
    beta1: Share = 0.9
    """adamw: decay of the gradient's average."""
    beta2: Share = 0.95
    """adamw: decay of the squared gradient's average."""
    eps: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1e-8
    """adamw: added to the root of the squared gradient's average."""
    max_grad_norm: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = 1.0
    """Gradients are scaled down to this global norm, of the whole step; null: never."""


class Memory(Group):
    """What memory is traded for."""

    loss_tile_tokens: Annotated[Positive | None, _like(1024)] = None
    """Tokens of a device whose logits exist at a time; null: as many as keep them under 256 MiB."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of sharded weights travel and are summed; those of small weights always sum in float32."""


class Checkpoint(Group):
    """What is kept on disk."""

    keep_latest: Positive = 2
    """The newest checkpoints that are kept; older ones are deleted."""


class Logging(Group):
    """What is recorded beside metrics.jsonl."""

    tensorboard: bool = True
    """Write the numbers of metrics.jsonl and eval.jsonl for TensorBoard too."""
    profile_steps: Annotated[tuple[Positive, Positive] | None, _like("[3, 5]", strict=False)] = None
    """First and last step of a trace by JAX's profiler, in run.directory/profile; for XProf or Perfetto."""

    @pydantic.field_validator("profile_steps", mode="before")
    @classmethod
    def _first_and_last(cls, value: Any) -> Any:
        pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_count, value))
        if value is not None and not (pair and value[0] <= value[1]):
            raise ValueError("must be the first and the last step, counted from 1, or null")
        return value

    compilation_cache: Annotated[str | None, _like("~/.cache/jaxsp", min_length=1)] = None
    """Folder in which compiled programs are kept for the next start. (On CPUs, XLA prints long lines about the processor's
    features when it finds one there.)"""


class Config(Group):
    """A whole run."""

    run: Run
    model: Model
    mesh: Mesh = Mesh()
    attention: Attention = Attention()
    data: Data
    batch: Batch
    optimizer: Optimizer
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()


_GROUPS = {name: cast(type[Group], field.annotation) for name, field in Config.model_fields.items()}


ELSEWHERE = {
    "sp_size": "mesh.seq",
    "sequence_parallel_degree": "mesh.seq",
    "sequence_parallel_size": "mesh.seq",
    "context_parallel_size": "mesh.seq",
    "cp_size": "mesh.seq",
    "dp_shard_size": "mesh.data",
    "dp_replicate_size": "mesh.replica",
    "max_seq_length": "data.row_tokens",
    "max_length": "data.row_tokens",
    "sequence_len": "data.row_tokens",
    "per_device_train_batch_size": "batch.rows_at_once",
    "micro_batch_size": "batch.rows_at_once",
    "train_micro_batch_size_per_gpu": "batch.rows_at_once",
    "gradient_accumulation_steps": "batch.rows_per_step (the turns of a step follow from it and the mesh)",
    "num_train_epochs": "run.epochs",
    "max_steps": "run.steps",
    "output_dir": "run.directory",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
}
"""What users of DeepSpeed, Accelerate, TRL and Axolotl look for, and what it is called here."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers (PyYAML's 1.1 reads 3e-4 as text), and no key twice (PyYAML takes the last without a word)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that _Loader would read as a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("+-0123456789"))


def load(path: str | pathlib.Path, overrides: list[str]) -> Config:
    """The config in a YAML file, changed by `key.path=value` words.

    Raises: UserError with every problem of the file and of the words at once.
    """
    return parse(read(path), overrides)


def read(path: str | pathlib.Path) -> dict[str, Any]:
    """The nested fields of a YAML file, not checked yet. Raises: UserError where it holds none."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise errors.UserError(f"{path}: no such file. Try configs/quickstart.yaml.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UserError(f"{path}: cannot be read: {error}.") from None
    try:
        fields = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2026-13-01 is not a date
        raise errors.UserError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(fields, dict):
        raise errors.UserError(f"{path}: holds no `group: {{field: value}}` pairs. See configs/quickstart.yaml.")
    return fields


def parse(fields: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config that nested fields describe, with some changed by `key.path=value`. Raises: UserError with all problems."""
    fields = copy.deepcopy(fields)
    problems = [problem for word in overrides if (problem := _override(fields, word))]
    problems += _across(fields)
    try:
        config = Config.model_validate(fields)
    except pydantic.ValidationError as error:
        found = error.errors()
        # a list whose only entry is bad counts as empty
        problems += [_problem(one) for one in found if not (one["type"] == "too_short" and one["input"])]
    if problems:
        raise errors.UserError(dict.fromkeys(problems))
    return config


def save(config: Config, path: pathlib.Path) -> None:
    """Writes the config with every default filled in, so that `load(path, [])` gives it back."""
    text = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def describe() -> str:
    """Every field with its type, default and meaning, for --help."""
    lines = []
    for name, group in _GROUPS.items():
        lines.append(f"{name}: {group.__doc__}")
        lines += _describe(group, f"  {name}.")
    return "\n".join(lines)


def _describe(group: type[Group], prefix: str) -> list[str]:
    lines = []
    for name, field in group.model_fields.items():
        default = "required" if field.is_required() else f"default {_yaml(field.get_default())}"
        meaning = " ".join((field.description or "").split())
        lines.append(f"{prefix}{name}  ({_type_name(field.annotation)}; {default})\n      {meaning}")
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, Group):
                lines += _describe(inner, f"{prefix}{name}[].")
    return lines


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    plain = {dict: "mapping", tuple: "list", str: "text", type(None): "null"}
    if (name := plain.get(get_origin(annotation) or annotation)) is not None:
        return name
    return " | ".join(_type_name(arg) for arg in get_args(annotation)) or annotation.__name__


def _yaml(value: object) -> str:
    """A value as one would write it in the file, on one line, its beginning if it is long."""
    if isinstance(value, float):
        return repr(value)
    try:
        text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True)
    except yaml.YAMLError:
        text = repr(value)
    text = " ".join(text.removesuffix("...\n").split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _override(fields: dict[str, Any], word: str) -> str | None:
    """Sets one `key.path=value` in `fields`, or returns the problem with it."""
    key, equals, text = word.partition("=")
    *groups, name = key.split(".")
    if not equals or not all([*groups, name]):
        return f"{word}: is not key.path=value, for example mesh.seq=4."
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):
        return f"{key} = {text}: is not a YAML value. Quote it: '{key}=\"...\"'."
    place: Any = fields
    for depth, part in enumerate([*groups, name]):
        above = ".".join(groups[:depth])
        index: Any = part
        if isinstance(place, list):
            if not part.isdecimal() or int(part) >= len(place):
                entries = errors.choices(f"{above}.{number}" for number in range(len(place))) or f"{above}=[...]"
                return f"{key} = {text}: {above} is a list of {len(place)}. Use {entries}."
            index = int(part)
        elif not isinstance(place, dict):
            return f"{key} = {text}: {above} = {_yaml(place)} is a value, not a group of fields."
        if depth == len(groups):
            place[index] = value
        else:
            if isinstance(place, dict) and place.get(index) is None:
                place[index] = {}
            place = place[index]
    return None


def _across(fields: dict[str, Any]) -> list[str]:
    """Problems of several fields together, seen in the raw fields, so that another problem does not hide them."""
    return [
        *_one_of(fields, "run", ("steps", "epochs"), "says how long to train", "run.epochs=1"),
        *_one_of(fields, "model", ("source", "config"), "says what the model is", "model.source=Qwen/Qwen3-0.6B"),
    ]


def _one_of(fields: dict[str, Any], group: str, names: tuple[str, str], role: str, example: str) -> list[str]:
    """The problem of two fields of a group of which exactly one has to be given."""
    given = fields.get(group)
    if not isinstance(given, dict):
        return []
    there = [name for name in names if given.get(name) is not None]
    if not there:
        return [f"{group}.{names[0]}, {group}.{names[1]}: both missing. One of them {role}, for example {example}."]
    if len(there) == 2:
        said = ", ".join(f"{group}.{name} = {_yaml(given[name])}" for name in names)
        return [f"{said}: only one of them {role}. Leave one out, or write {group}.{names[0]}=null or {group}.{names[1]}=null."]
    return []


def _problem(found: Any) -> str:
    """One line for one of pydantic's findings: field, value, rule and a way out."""
    path = [str(part) for part in found["loc"]]
    key, given = ".".join(path), f"{'.'.join(path)} = {_yaml(found['input'])}"
    match found["type"]:
        case "extra_forbidden" if path[-1] in ELSEWHERE:
            return f"{given}: unknown. Here it is called {ELSEWHERE[path[-1]]}."
        case "extra_forbidden":
            return f"{given}: unknown.{_nearest_key(path)}"
        case "missing":
            return f"{key}: missing.{_meaning(path)}"
        case "value_error":
            rule = str(found["ctx"]["error"])
        case "tuple_type":
            rule = "must be a list"
        case "too_short":
            rule = "must have at least 1 entry"
        case "dict_type" | "model_type":
            rule = "must be a group of fields"
        case "string_type":
            rule = "must be text, in quotes where it looks like something else"
        case "string_too_short":
            rule = "must not be empty"
        case _:
            rule = found["msg"].replace("Input should be", "must be")
    return f"{given}: {rule}.{_meaning(path)}"


def _group(path: list[str]) -> type[Group] | None:
    """The class that declares the fields next to the last word of `path`."""
    group: Any = Config
    for part in path[:-1]:
        if part.isdigit():
            continue
        field = group.model_fields.get(part)
        if field is None:
            return None
        inner = [arg for arg in (field.annotation, *get_args(field.annotation)) if isinstance(arg, type)]
        group = next((arg for arg in inner if issubclass(arg, Group)), None)
        if group is None:
            return None
    return group


def _nearest_key(path: list[str]) -> str:
    group = _group(path)
    here = list(group.model_fields) if group else []
    everywhere = {field: f"{name}.{field}" for name, other in _GROUPS.items() for field in other.model_fields}
    if path[-1] in everywhere:
        return f" Did you mean {everywhere[path[-1]]}?"
    return errors.nearest(path[-1], here) or errors.nearest(path[-1], everywhere) or f" Known here: {', '.join(here)}."


def _meaning(path: list[str]) -> str:
    """What a field means, and a value that works; of a group, what it is and its fields."""
    group, inner = _group(path), _group([*path, ""])
    field = group.model_fields.get(path[-1]) if group else None
    if field and field.description:
        works = field.examples[0] if field.examples else field.default
        example = works if isinstance(works, str) else _yaml(works)
        return f" {' '.join(field.description.split())} For example {'.'.join(path)}={example}."
    return f" {inner.__doc__} Its fields: {', '.join(inner.model_fields)}." if inner else ""
