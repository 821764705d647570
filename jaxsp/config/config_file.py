"""Reading, checking and writing the YAML file of a config."""

import copy
import inspect
import pathlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pydantic
import yaml

from jaxsp.config import foreign_names, yaml_io
from jaxsp.config.config_errors import Schema
from jaxsp.config.fields import FOR_TRAINING, ConfigSection
from jaxsp.core import errors, files
from jaxsp.core.errors import UserError

_MIN_FOREIGN_OPTIONS = 5  # minimum number of unknown options in a config of another system

_STARTER = """\
run: {directory: runs/first, epochs: 1}
model: {source: Qwen/Qwen3-0.6B}
data: {train: [{source: notes/*.txt, format: text}], row_tokens: 8192}
batch: {rows_per_step: 8}
optimizer: {learning_rate: 1e-05}"""
"""The smallest config."""


def read(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads the nested fields of a YAML file, unchecked. Raises: UserError if it has none."""
    path = pathlib.Path(path)
    try:
        text = files.read_text(path)
    except FileNotFoundError:
        neighbors = [file.name for file in path.parent.glob("*.y*ml")]
        near = errors.did_you_mean(path.name, neighbors)
        suggestion, *lines = [near.strip()] if near else _suggest_start()
        raise UserError([f"{path}: no such file. {suggestion}", *lines]) from None
    except IsADirectoryError:
        raise UserError(
            f"{path}: is a folder. Name a config, such as {path / 'config.yaml'} of a run."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None
    try:
        fields = yaml_io.load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as YAML: {reason}.") from None
    if not isinstance(fields, dict):
        suggestion, *lines = _suggest_start()
        problem = f"{path}: must have sections, each `section: {{field: value}}`. {suggestion}"
        raise UserError([problem, *lines])
    return fields


def parse(
    schema: Schema,
    fields: dict[str, Any],
    changes: Sequence[str] = (),
    *,
    rules: Sequence[Callable[..., Iterable[str]]] = (),
    name: str = "CONFIG.yaml",
    trains: bool = True,
    unneeded: Collection[str] = (),
) -> Any:
    """Checks nested fields, changed by `key.path=value` words.

    Args:
        rules: functions that yield a line for each problem between sections; the names of their
            parameters are those of the sections, and those of invalid sections are not called.
        name: name of their file, for messages.
        trains: False for commands that do not train: `for_training` fields may be missing, and so
            may sections that require no other fields.
        unneeded: names of `for_training` fields that this training command does not require.
    Returns: a `schema.config`.
    Raises: UserError with all problems.
    """
    fields = copy.deepcopy(fields)
    problems = []
    for word in changes:
        if problem := apply_override(schema, fields, word):
            problems.append(problem)
    sections: dict[str, Any] = {}
    findings: list[Any] = [
        {"type": "extra_forbidden", "loc": (key,), "input": value}
        for key, value in fields.items()
        if key not in schema.sections
    ]
    for key, field in schema.config.model_fields.items():
        if key in fields:
            try:
                sections[key] = schema.validators[key](fields[key])
            except pydantic.ValidationError as error:
                findings += [each | {"loc": (key, *each["loc"])} for each in error.errors()]
        elif not field.is_required():
            sections[key] = field.get_default()
        elif not trains and not any(
            each.is_required()
            for kind in schema.sections[key].sections
            for each in kind.model_fields.values()
        ):
            sections[key] = schema.validators[key]({})
        else:
            findings.append({"type": "missing", "loc": (key,), "input": None})
        given = fields.get(key)
        if trains and isinstance(given, dict):
            findings += [
                {"type": "missing", "loc": (key, inner), "input": None}
                for inner, each in schema.sections[key].sections[0].model_fields.items()
                if each.json_schema_extra == FOR_TRAINING
                and f"{key}.{inner}" not in unneeded
                and (inner not in given or (given[inner] == [] and each.default == ()))
            ]
    for rule in rules:
        needed = inspect.signature(rule).parameters
        if sections.keys() >= needed.keys():
            problems += rule(**{key: sections[key] for key in needed})
    if findings:
        problems += _explain_problems(schema, fields, findings, name=name)
    if problems:
        raise UserError(dict.fromkeys(problems), is_named=True)
    return schema.config.model_construct(_fields_set={*fields}, **sections)


def apply_override(schema: Schema, fields: dict[str, Any], override: str) -> str | None:
    """Sets one `key.path=value` in nested fields, or returns the problem with it."""
    key, equals, text = override.partition("=")
    path = key.split(".")
    is_name = all(path) and len(path) <= yaml_io.MAX_DEPTH and key == errors.escape(key)
    if not equals or not is_name:
        example = schema.suggest_override(key) or "mesh.seq=4"
        return f"{override}: must be key.path=value, for example {example}."
    try:
        value = yaml_io.load(text)
    except yaml.YAMLError:
        return f"{key} = {yaml_io.shorten(text)}: must be a YAML value. Quote it: '{key}=\"...\"'."
    parent: Any = fields
    for depth, part in enumerate(path):
        name = ".".join(path[:depth])
        index: Any = part
        if isinstance(parent, list):
            indices = {str(n): n for n in range(len(parent))}
            if part not in indices:
                entries = errors.format_choices(f"{name}.{n}" for n in indices)
                return (
                    f"{key} = {text}: {name} has {len(parent)} entries. "
                    f"Use {entries or f'{name}=[...]'}."
                )
            index = indices[part]
        elif not isinstance(parent, dict):
            return f"{key} = {text}: {name} = {yaml_io.format_value(parent)} has no fields."
        if depth == len(path) - 1:
            parent[index] = value
            break
        if isinstance(parent, dict) and parent.get(index) is None:
            parent[index] = {}
        if isinstance(parent[index], str):
            choice = schema.find_choice(path[: depth + 1])
            if choice is not None and choice.is_name:
                named = {choice.selector: parent[index]}
                parent[index] = [named] if path[depth + 1].isdigit() else named
        parent = parent[index]
    return None


def save(config: ConfigSection, path: pathlib.Path) -> None:
    """Writes the config with all defaults, so that `load(path, [])` returns it."""
    text = yaml_io.dump(config.model_dump(mode="json"))
    files.write_atomic(path, text)


def _explain_problems(
    schema: Schema, fields: dict[str, Any], findings: Sequence[Any], *, name: str
) -> list[str]:
    """Returns one line per finding; one line for all options of another system."""
    # pydantic counts a list whose only entry is invalid as empty
    findings = [each for each in findings if each["type"] != "too_short" or not each["input"]]
    # names at the top of the config that are in no section of jaxsp
    options = [
        str(key)
        for key, value in fields.items()
        if schema.find_near_section([str(key)], value) is None
        and (
            key not in schema.sections
            # optimizer: adamw is another system's
            or (not isinstance(value, dict | None) and foreign_names.find(key) is not None)
        )
    ]
    if len(options) < _MIN_FOREIGN_OPTIONS:
        return list(schema.explain_errors(findings))
    own_findings = [
        finding
        for finding in findings
        if finding["loc"][0] not in options
        and (finding["type"] != "missing" or len(finding["loc"]) > 1)
    ]
    return [
        f"{name}: has {len(options)} options of another system ({', '.join(options[:3])}, ...). "
        f"Convert it: jaxsp convert {name} --gpus 8 > my.yaml. A jaxsp config has the sections "
        f"{', '.join(schema.sections)}.",
        *schema.explain_errors(own_findings),
    ]


def _suggest_start() -> list[str]:
    """Lines that suggest a config to start from: quickstart.yaml, or a small config itself."""
    repository = pathlib.Path(__file__).parents[2]
    for folder in (pathlib.Path(), repository):
        path = folder / "configs/quickstart.yaml"
        if path.is_file():
            return [f"Try {path}."]
    first = "Write a config such as this one (python -m jaxsp.train --help lists all fields):"
    return [first, *_STARTER.splitlines()]
