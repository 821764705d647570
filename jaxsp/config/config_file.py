"""Reading, checking and writing the YAML file of a config."""

import copy
import pathlib
from collections.abc import Sequence
from typing import Any

import pydantic
import yaml

from jaxsp.config import config_errors, cross_checks, foreign_names, yaml_io
from jaxsp.config.schema import Config
from jaxsp.core import errors, files
from jaxsp.core.errors import UserError

_MIN_FOREIGN_OPTIONS = 5
"""Minimum number of unknown options in a config of another system."""

_STARTER = {
    "run": ("directory", "epochs"),
    "model": ("source",),
    "data": ("train", "row_tokens"),
    "batch": ("rows_per_step",),
    "optimizer": ("learning_rate",),
}
"""Fields of the smallest config."""


def load(path: str | pathlib.Path, changes: Sequence[str]) -> Config:
    """Loads a YAML file, changed by `key.path=value` words. Raises: UserError with all problems."""
    return parse(read(path), changes, name=str(path))


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
    fields: dict[str, Any], changes: Sequence[str] = (), *, name: str = "CONFIG.yaml"
) -> Config:
    """Checks nested fields, changed by `key.path=value` words.

    Args: name: name of their file, for messages.
    Raises: UserError with all problems.
    """
    fields = copy.deepcopy(fields)
    problems = []
    for word in changes:
        key = word.partition("=")[0]
        example = config_errors.suggest_override(key) or "mesh.seq=4"
        problem = apply_override(fields, word, example_override=example)
        if problem:
            problems.append(problem)
    problems += cross_checks.check(fields)
    try:
        config = Config.model_validate(fields)
    except pydantic.ValidationError as error:
        problems += _explain_problems(fields, error, name=name)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return config


def apply_override(fields: dict[str, Any], override: str, *, example_override: str) -> str | None:
    """Sets one `key.path=value` in nested fields, or returns the problem with it.

    Args:
        example_override: a valid one, for the error about text that is not key.path=value.
    """
    key, equals, text = override.partition("=")
    path = key.split(".")
    is_name = all(path) and len(path) <= yaml_io.MAX_DEPTH and key == errors.escape(key)
    if not equals or not is_name:
        return f"{override}: must be key.path=value, for example {example_override}."
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
        parent = parent[index]
    return None


def save(config: Config, path: pathlib.Path) -> None:
    """Writes the config with all defaults, so that `load(path, [])` returns it."""
    text = yaml_io.dump(config.model_dump(mode="json"))
    files.write_atomic(path, text)


def _explain_problems(
    fields: dict[str, Any], error: pydantic.ValidationError, *, name: str
) -> list[str]:
    """Returns one line per finding; one line for all options of another system."""
    findings = [
        finding
        for finding in error.errors()
        # pydantic counts a list whose only entry is invalid as empty
        if finding["type"] != "too_short" or not finding["input"]
    ]
    # names at the top of the config that are in no section of jaxsp
    options = [
        str(name)
        for name, value in fields.items()
        if config_errors.find_near_section([str(name)], value) is None
        and (
            name not in config_errors.SECTIONS
            # optimizer: adamw is another system's
            or (not isinstance(value, dict | None) and foreign_names.find(name) is not None)
        )
    ]
    if len(options) < _MIN_FOREIGN_OPTIONS:
        return list(config_errors.explain_errors(findings))
    own_findings = [
        finding
        for finding in findings
        if finding["loc"][0] not in options
        and (finding["type"] != "missing" or len(finding["loc"]) > 1)
    ]
    examples = ", ".join(list(options)[:3])
    return [
        f"{name}: has {len(options)} options of another system ({examples}, ...). "
        f"Convert it: jaxsp convert {name} --gpus 8 > my.yaml. A jaxsp config has the sections "
        f"{', '.join(config_errors.SECTIONS)}.",
        *config_errors.explain_errors(own_findings),
    ]


def _suggest_start() -> list[str]:
    """Lines that suggest a config to start from: quickstart.yaml, or a small config itself."""
    repository = pathlib.Path(__file__).parents[2]
    for folder in (pathlib.Path(), repository):
        path = folder / "configs/quickstart.yaml"
        if path.is_file():
            return [f"Try {path}."]
    first = "Write a config such as this one (python -m jaxsp.train --help lists all fields):"
    lines = []
    for section, names in _STARTER.items():
        examples = [config_errors.format_example(f"{section}.{name}") or "" for name in names]
        fields = [example.partition(".")[2].replace("=", ": ", 1) for example in examples]
        lines.append(f"{section}: {{{', '.join(fields)}}}")
    return [first, *lines]
