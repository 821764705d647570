"""Everything a run can be told: a YAML file plus `key.path=value`, checked before anything happens."""

import pathlib
from typing import Annotated, Any, Literal, get_args, get_origin

import pydantic
import yaml

from jaxsp.core import errors


class Group(pydantic.BaseModel):
    """A group of fields: frozen, unknown keys forbidden, documented by the docstring under each field."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


Positive = Annotated[int, pydantic.Field(ge=1)]
NotNegative = Annotated[int, pydantic.Field(ge=0)]
Number = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, pydantic.Field(ge=0, lt=1)]


class Run(Group):
    """How long to train, and where to write."""

    directory: Annotated[str, pydantic.Field(min_length=1)]
    """Folder that the run writes: config.yaml, banner.txt, metrics.jsonl, checkpoints/. Must not hold a run already."""
    seed: NotNegative = 0
    """Decides the random weights and the order of the rows."""
    steps: Positive | None = None
    """Optimizer updates. Give this or epochs."""
    epochs: Positive | None = None
    """Passes over the training data. Give this or steps."""
    log_every: Positive = 1
    """Steps between two lines of metrics.jsonl."""

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> "Run":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give run.steps or run.epochs, one of them, for example run.epochs=1")
        return self


class Model(Group):
    """What is trained."""

    config: dict[str, Any]
    """Fields of a Hugging Face config.json, with model_type (llama, qwen2 or qwen3); the weights start random."""
    tokenizer: str | None = None
    """`bytes` (256 bytes and an end token), or a folder or hub name for AutoTokenizer. `tokens` records need none."""
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
    virtual_cpu_devices: Positive | None = None
    """Split the CPU into so many devices, where there is no accelerator; for trying a mesh without GPUs."""

    @pydantic.field_validator("data")
    @classmethod
    def _no_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("there is no mesh of 0 groups; use -1 for as many as the devices allow")
        return value


class Attention(Group):
    """How attention is computed."""

    kernel: Literal["auto", "blockwise", "reference"] = "auto"
    """blockwise: online softmax over blocks, memory linear in length. reference: the whole score matrix, for tests.
    auto: blockwise."""


class Source(Group):
    """One place that documents come from."""

    source: Annotated[str, pydantic.Field(min_length=1)]
    """A file or a glob: .jsonl or .json lines, .parquet, or plain text (one document a file). `{stdlib}` stands for the
    folder of Python's own library."""
    format: Literal["text", "tokens"]
    """text: records with `text`. tokens: records with `input_ids` and optionally `labels` (not shifted, -100: no loss)."""


class Data(Group):
    """What is learned from, and how it is cut into rows."""

    train: Annotated[tuple[Source, ...], pydantic.Field(min_length=1, strict=False)]
    """The training documents."""
    row_tokens: Positive
    """Length of a row in tokens; documents are packed into rows, longer ones are split over several."""
    max_documents_per_row: Positive = 64
    """The most pieces (documents or parts of them) in one row."""
    workers: Positive = 1
    """Processes that tokenise."""


class Batch(Group):
    """How many rows make a step."""

    rows_per_step: Positive
    """Rows that one optimizer update learns from, over the whole mesh, whatever the mesh."""
    rows_at_once: Positive = 1
    """Rows that a group of devices works on at the same time; the rest of a step's rows follow in turns."""


class Optimizer(Group):
    """How the weights move."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw, or sgd (no momentum)."""
    learning_rate: Number
    """The peak, reached after warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """After warm-up: cosine or linear to 0 at the last step, or constant."""
    warmup_steps: NotNegative = 0
    """Steps of linear growth from 0."""
    weight_decay: Number = 0.0
    """Decoupled decay of matrices, times the learning rate; norms and biases do not decay."""
    beta1: Share = 0.9
    """adamw: decay of the gradient's average."""
    beta2: Share = 0.95
    """adamw: decay of the squared gradient's average."""
    eps: Annotated[float, pydantic.Field(gt=0)] = 1e-8
    """adamw: added to the root of the squared gradient's average."""
    max_grad_norm: Annotated[float, pydantic.Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global norm, of the whole step; null: never."""


class Memory(Group):
    """What memory is traded for."""

    loss_tile_tokens: Positive | None = None
    """Tokens of a device whose logits exist at a time; null: as many as keep them under 256 MiB."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over devices."""


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
    "gradient_accumulation_steps": "batch.rows_per_step (the turns of a step follow from it and the mesh)",
    "num_train_epochs": "run.epochs",
    "max_steps": "run.steps",
    "output_dir": "run.directory",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
}
"""What users of DeepSpeed, Accelerate, TRL and Axolotl look for, and what it is called here."""


def load(path: str | pathlib.Path, overrides: list[str]) -> Config:
    """The config in a YAML file, changed by `key.path=value` words.

    Raises: UserError with every problem of the file and of the words at once.
    """
    try:
        fields = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise errors.UserError(f"{path}: no such file. Try configs/quickstart.yaml.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UserError(f"{path}: cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise errors.UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise errors.UserError(f"{path}: holds no `group: {{field: value}}` pairs. See configs/quickstart.yaml.")
    problems = [problem for word in overrides if (problem := _override(fields, word))]
    return parse(fields, problems=problems)


def parse(fields: dict[str, Any], *, problems: list[str] | None = None) -> Config:
    """The config that nested fields describe. Raises: UserError with all `problems` and every one found here."""
    problems = list(problems or [])
    try:
        config = Config.model_validate(fields)
    except pydantic.ValidationError as error:
        problems += [_problem(found) for found in error.errors()]
    if problems:
        raise errors.UserError(dict.fromkeys(problems))
    return config


def save(config: Config, path: pathlib.Path) -> None:
    """Writes the config with every default filled in, so that `load(path, [])` gives it back."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")


def describe() -> str:
    """Every field with its type, default and meaning, for --help."""
    lines = []
    for name, group in Config.model_fields.items():
        lines.append(f"{name}: {group.annotation.__doc__.splitlines()[0]}")
        lines += _describe(group.annotation, f"  {name}.")
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
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is tuple:
        return "list"
    if inner := [arg for arg in get_args(annotation) if get_origin(annotation) is not dict]:
        return " | ".join(_type_name(arg) for arg in inner)
    return getattr(annotation, "__name__", "mapping")


def _yaml(value: object) -> str:
    return "null" if value is None else str(value)


def _override(fields: dict[str, Any], word: str) -> str | None:
    """Sets one `key.path=value` in `fields`, or returns the problem with it."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        return f"{word}: is not key.path=value, for example mesh.seq=4."
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return f"{key} = {text}: is not a YAML value. Quote it: {key}='\"...\"'."
    *groups, name = key.split(".")
    place: Any = fields
    for depth, group in enumerate([*groups, name]):
        if isinstance(place, list):
            if not group.isdigit() or int(group) >= len(place):
                return f"{key}: {'.'.join(groups[:depth])} is a list of {len(place)}; name an entry by its number from 0."
            group = int(group)  # type: ignore[assignment]  # a list is indexed by number
        elif not isinstance(place, dict):
            return f"{key}: {'.'.join(groups[:depth])} is a value, not a group of fields."
        if depth == len(groups):
            place[group] = value
        elif isinstance(place, dict):
            place = place.setdefault(group, {})
        else:
            place = place[group]
    return None


def _problem(found: Any) -> str:
    """One line for one of pydantic's findings: field, value, rule and a way out."""
    path = [str(part) for part in found["loc"]]
    key, value = ".".join(path), found["input"]
    if found["type"] == "extra_forbidden":
        if path[-1] in ELSEWHERE:
            return f"{key}: unknown. Here it is called {ELSEWHERE[path[-1]]}."
        return f"{key}: unknown.{_nearest_key(path)}"
    if found["type"] == "missing":
        return f"{key}: missing.{_meaning(path)}"
    if found["type"] == "value_error":
        return f"{key}: {found['ctx']['error']}."
    rule = found["msg"][0].lower() + found["msg"][1:]
    return f"{key} = {value!r}: {rule}.{_hint(value)}{_meaning(path)}"


def _hint(value: object) -> str:
    """YAML 1.1 reads 3e-4 as text, the most frequent surprise in a learning rate."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return ""
    return "" if number is None else f" YAML reads {value} as text; write {number:.1e}." if "e" in str(value) else ""


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
    everywhere = {field: f"{name}.{field}" for name, g in Config.model_fields.items() for field in g.annotation.model_fields}
    if path[-1] in everywhere:
        return f" Did you mean {everywhere[path[-1]]}?"
    return errors.nearest(path[-1], here) or f" Known here: {', '.join(here)}."


def _meaning(path: list[str]) -> str:
    group = _group(path)
    field = group.model_fields.get(path[-1]) if group else None
    return " " + " ".join(field.description.split()) if field and field.description else ""
