"""What to say of a config's fields: what they mean, what is wrong with a value, and what would work."""

import re
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import pydantic

from jaxsp.core import errors, notation

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
    "gradient_checkpointing": "memory.remat",
    "activation_checkpointing": "memory.remat",
    "activation_offloading": "memory.offload_activations",
    "offload_optimizer_device": "memory.offload_optimizer",
    "tiled_mlp": "memory.mlp_tile_tokens",
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


def describe(root: type[pydantic.BaseModel]) -> str:
    """Every field of a config of groups, with its type, default and meaning."""
    lines = []
    for name, group in _groups(root).items():
        lines.append(f"{name}: {group.__doc__}")
        lines += _describe(group, f"  {name}.")
    return "\n".join(lines)


def _describe(group: type[pydantic.BaseModel], prefix: str) -> list[str]:
    lines = []
    for name, field in group.model_fields.items():
        default = "required" if field.is_required() else f"default {notation.line(field.get_default())}"
        meaning = " ".join((field.description or "").split())
        lines.append(f"{prefix}{name}  ({_type_name(field.annotation)}; {default})\n      {meaning}")
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
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


def problem(root: type[pydantic.BaseModel], found: Any) -> str:
    """One line for one of the findings of a pydantic.ValidationError: field, value, rule and a way out."""
    path = [str(part) for part in found["loc"]]
    key, given = ".".join(path), f"{'.'.join(path)} = {notation.line(found['input'])}"
    match found["type"]:
        case "extra_forbidden" if path[-1] in ELSEWHERE:
            return f"{given}: unknown. Here it is called {ELSEWHERE[path[-1]]}."
        case "extra_forbidden":
            return f"{given}: unknown.{_nearest_key(root, path)}"
        case "missing":
            return f"{key}: missing.{_meaning(root, path)}"
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
    return f"{given}: {rule}.{_meaning(root, path)}"


def _group(root: type[pydantic.BaseModel], path: list[str]) -> type[pydantic.BaseModel] | None:
    """The class that declares the fields next to the last word of `path`."""
    group: Any = root
    for part in path[:-1]:
        if part.isdigit():
            continue
        field = group.model_fields.get(part)
        if field is None:
            return None
        inner = [arg for arg in (field.annotation, *get_args(field.annotation)) if isinstance(arg, type)]
        group = next((arg for arg in inner if issubclass(arg, pydantic.BaseModel)), None)
        if group is None:
            return None
    return group


def _nearest_key(root: type[pydantic.BaseModel], path: list[str]) -> str:
    group = _group(root, path)
    here = list(group.model_fields) if group else []
    everywhere = {field: f"{name}.{field}" for name, other in _groups(root).items() for field in other.model_fields}
    if path[-1] in everywhere:
        return f" Did you mean {everywhere[path[-1]]}?"
    return errors.nearest(path[-1], here) or errors.nearest(path[-1], everywhere) or f" Known here: {', '.join(here)}."


def _meaning(root: type[pydantic.BaseModel], path: list[str]) -> str:
    """What a field means, in a sentence, and a value that works; of a group, what it is and its fields."""
    group, inner = _group(root, path), _group(root, [*path, ""])
    field = group.model_fields.get(path[-1]) if group else None
    if field and field.description:
        works = field.examples[0] if field.examples else field.default
        example = works if isinstance(works, str) else notation.line(works)
        means = re.split(r"(?<=\.)\s+(?=[A-Z(])", " ".join(field.description.split()))[0]
        return f" {means} For example {'.'.join(path)}={example}."
    return f" {inner.__doc__} Its fields: {', '.join(inner.model_fields)}." if inner else ""


def _groups(root: type[pydantic.BaseModel]) -> dict[str, type[pydantic.BaseModel]]:
    return {name: cast(type[pydantic.BaseModel], field.annotation) for name, field in root.model_fields.items()}
