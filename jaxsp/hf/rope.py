"""Rotary position embedding of a config.json: checks, and conversion to jaxsp's fields."""

import dataclasses
from typing import Any

from jaxsp.core import errors
from jaxsp.hf import json_values
from jaxsp.hf.json_values import format_value
from jaxsp.model.config import Llama3Rope

FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")

FULL_ROTARY_FACTORS = (1,)

_LLAMA3_FIELDS = tuple(field.name for field in dataclasses.fields(Llama3Rope))

_INTEGER_FIELD = "original_max_position_embeddings"


def find_problems(fields: dict[str, Any], path: str) -> list[str]:
    """Problems of the RoPE fields.

    It is given as `rope_parameters` (transformers 5), or as `rope_scaling` and `rope_theta`.
    """
    problems = []
    resolved = {}
    outside = {name: fields[name] for name in ("rope_theta",) if name in fields}
    for form in ("rope_parameters", "rope_scaling"):
        group = fields.get(form)
        where = f"{path}.{form}"
        if not group:
            continue
        if not isinstance(group, dict):
            problems.append(f"{where} = {format_value(group)}: must be a group of fields, or null.")
            continue
        group = outside | group
        types = [group.pop(name) for name in ("rope_type", "type") if name in group] or ["default"]
        if any(name not in ("default", "llama3") or name != types[0] for name in types):
            problems.append(
                f"{where}.rope_type = {errors.format_choices(types)}: is not implemented. "
                "Use default or llama3."
            )
            continue
        resolved[form] = (types[0], group)
        problems += _group_problems(group, types[0], where)
        for name, value in outside.items():
            if group[name] != value:
                problems.append(
                    f"{path}.{name} = {format_value(value)}: must equal {where}.{name} = "
                    f"{format_value(group[name])}. Leave one out."
                )
    if len(resolved) == 2 and resolved["rope_parameters"] != resolved["rope_scaling"]:
        problems.append(f"{path}.rope_scaling: must equal {path}.rope_parameters. Leave one out.")
    return problems


def _group_problems(group: dict[str, Any], rope_type: str, where: str) -> list[str]:
    """Problems of one group of fields, without its type."""
    problems: list[str] = []
    numbers = ("rope_theta", *(_LLAMA3_FIELDS if rope_type == "llama3" else ()))
    for name, value in group.items():
        is_full = name == "partial_rotary_factor" and value in FULL_ROTARY_FACTORS
        if not is_full and name not in numbers:
            hint = errors.did_you_mean(str(name), numbers) or " Leave it out."
            problems.append(
                f"{where}.{name} = {format_value(value)}: "
                f"is not implemented for rope_type {rope_type}.{hint}"
            )
    for name in numbers:
        number: Any = group.get(name, 1)
        is_valid = json_values.is_number(number) and number > 0
        rule = "a number above 0"
        if name == _INTEGER_FIELD:
            is_valid = is_valid and json_values.is_integer(number)
            rule = "a whole number above 0"
        if not is_valid:
            problems.append(f"{where}.{name} = {format_value(number)}: must be {rule}.")
        elif name not in group and name != "rope_theta":
            problems.append(
                f"{where}.{name}: missing. Llama 3.1 has factor 8, 1 and 4, and 8192 positions."
            )
    if rope_type == "llama3" and not problems:
        if group["low_freq_factor"] >= group["high_freq_factor"]:
            problems.append(
                f"{where}.low_freq_factor = {group['low_freq_factor']}: must be below "
                f"high_freq_factor, which is {group['high_freq_factor']}. Llama 3.1 has 1 and 4."
            )
    return problems


def parse_llama3(group: dict[str, Any]) -> Llama3Rope | None:
    """Llama 3's frequency scaling in transformers' `rope_parameters`; None for another type."""
    if group["rope_type"] != "llama3":
        return None
    return Llama3Rope(**{name: group[name] for name in _LLAMA3_FIELDS})
