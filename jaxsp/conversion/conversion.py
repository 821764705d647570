"""Converts configs and scripts of other training systems to the text of a jaxsp config."""

import pathlib
import re
from collections.abc import Sequence
from typing import Any

from jaxsp.config import config_errors, config_file, foreign_names, yaml_io
from jaxsp.conversion import (
    data_sources,
    model_rules,
    objective_rules,
    page,
    scripts,
    training_rules,
)
from jaxsp.conversion.draft import OTHER, Draft, find_system, is_on, is_set, read_systems
from jaxsp.core import files
from jaxsp.core.errors import UserError

_RULES = (
    data_sources.convert,
    training_rules.convert_batch,
    training_rules.convert_length,
    model_rules.convert_adapter,
    training_rules.convert_schedule,
    training_rules.convert_intervals,
    model_rules.convert_precision,
    training_rules.convert_trackers,
    model_rules.convert_memory,
    model_rules.convert_rope,
    training_rules.convert_text,
    model_rules.convert_tokens,
)
"""Rules in the order of their use; the table of names is for the options that they leave."""

_OTHER_TRAINING = ("process_reward_model", "diffusion")
"""Options, or sections, that select a training that is not offered."""

_OTHER_TASKS = ("seq_cls", "embedding", "reranker", "generative_reranker")
"""Values of ms-swift's task_type that select a training that is not offered."""

_SECRET = re.compile(r"(hub|hf|access|auth|swanlab)_token$|key$|password|secret|webhook")
"""Names of options whose value is never printed."""

_ALWAYS_ON = ("shuffle", "average_tokens")
"""Parts of the names of options that cannot be turned off."""

_AUTOMATIC = (
    "attention.kernel",
    "memory.remat",
    "memory.mlp_tile_tokens",
    "memory.loss_tile_tokens",
    "data.num_workers",
)
"""Fields whose default is chosen for the run: values of other systems are not needed."""

_EMPTY: tuple[Any, ...] = (None, "", [], {})

_WHOLE = ("lr_scheduler_kwargs", "rope_scaling", "rope_parameters", "special_tokens", "trl")
"""Sections that are one option."""


def convert(paths: Sequence[pathlib.Path], *, num_gpus: int | None) -> str:
    """Converts files that belong to one run to the text of a config, which is valid.

    Args:
        paths: the config or script, then those of Accelerate or DeepSpeed.
        num_gpus: number of GPUs of the run; None: that in the files.
    Raises: UserError
    """
    draft = _read_draft(paths, num_gpus)
    objective_rules.convert(draft)
    _check_training(draft.options)
    draft.add_defaults("defaults")
    for rule in _RULES:
        rule(draft)
    if file := draft.take("config_file"):
        draft.add_task(f"{file}: convert that file together with this one")
    for name, value in draft.options.items():
        _convert_other(name, value, draft)
    training_rules.round_row_tokens(draft)
    draft.complete()
    names = ", ".join(path.name for path in paths)
    return page.render(draft, title=f"{names} ({draft.title}), for {draft.num_gpus} GPUs")


def _read_draft(paths: Sequence[pathlib.Path], num_gpus: int | None) -> Draft:
    """Reads the options in all files; the first file that has one counts. Raises: UserError"""
    options: dict[str, Any] = {}
    expressions: dict[str, str] = {}
    remarks: list[str] = []
    for path in paths:
        found: dict[str, Any] = {}
        if path.suffix == ".py":
            found, new_expressions, new_remarks = scripts.read_python(_read(path), path=str(path))
            expressions |= new_expressions
            remarks += new_remarks
        elif path.suffix == ".sh":
            found = scripts.read_shell(_read(path), path=str(path))
        else:
            for name, value in config_file.read(path).items():
                found |= _flatten(str(name), value)
        count = found.pop("num_processes", None)
        num_gpus = num_gpus or (count if isinstance(count, int) else None)
        options = {name: value for name, value in found.items() if value not in _EMPTY} | options
    system = "trl" if paths[0].suffix == ".py" else find_system(options)
    if system == OTHER and not any(map(foreign_names.find, options)):
        known = ", ".join(entry["title"] for entry in read_systems().values())
        raise UserError(f"{paths[0]}: has no option of a known system: {known}.")
    if num_gpus is None:
        raise UserError("--gpus: missing. The batch depends on the number of GPUs, such as 8.")
    tasks = [
        f"{name} = {expression}: its value is known when the script runs"
        for name, expression in expressions.items()
    ]
    return Draft(
        system=system,
        options=options,
        num_gpus=num_gpus,
        taken=dict.fromkeys(expressions),
        tasks=[*tasks, *remarks],
    )


def _read(path: pathlib.Path) -> str:
    try:
        return files.read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None


def _flatten(name: str, value: Any) -> dict[str, Any]:
    """Returns the options of a section by dotted name."""
    if not isinstance(value, dict) or name.rpartition(".")[2] in _WHOLE:
        return {name: value}
    options: dict[str, Any] = {}
    for inner, inner_value in value.items():
        options |= _flatten(f"{name}.{inner}", inner_value)
    return options


def _check_training(options: dict[str, Any]) -> None:
    """Raises: UserError for training that is not offered."""
    for name, value in options.items():
        is_other = name.partition(".")[0] in _OTHER_TRAINING and is_on(value)
        if is_other or (name == "task_type" and value in _OTHER_TASKS):
            text = yaml_io.format_value(value)
            raise UserError(
                f"{name} = {text}: jaxsp trains language models and reward models only."
            )


def _convert_other(name: str, value: Any, draft: Draft) -> None:
    """Converts an option without a rule by the table of names, or reports why it is not."""
    counterpart = config_errors.find_counterpart(name)
    section = foreign_names.find(name.partition(".")[0])
    if counterpart is None and section is not None and section.field is None:
        counterpart = section
    option = f"{name} = {_format(name, value)}"
    if counterpart is None:
        draft.not_converted[option] = "unknown"
    elif value is False and any(part in name for part in _ALWAYS_ON):
        draft.not_converted[option] = counterpart.note
    elif value == 0 and counterpart.field == "optimizer.max_grad_norm":
        draft.set(counterpart.field, None, name)
    elif counterpart.is_not_needed or counterpart.field in _AUTOMATIC or not is_set(value):
        draft.not_needed.append(name)
    elif counterpart.field is None:
        if is_on(value) and not (name.endswith("revision") and value == "main"):
            draft.not_converted[option] = counterpart.note
    elif "=" in counterpart.field:
        field, _, text = counterpart.field.partition("=")
        if is_on(value):
            draft.set(field, yaml_io.load(text), name)
    else:
        kept = config_errors.coerce_value(counterpart.field, value)
        if counterpart.takes_value and kept is not None:
            draft.set(counterpart.field, kept, name)
        elif is_on(value):
            reason = counterpart.note or "its value is not offered"
            draft.not_converted[option] = f"see {counterpart.field}: {reason}"


def _format(name: str, value: Any) -> str:
    """Formats a value, except for secrets."""
    if _SECRET.search(name.lower()):
        return "(a secret)"
    return yaml_io.format_value(value)
