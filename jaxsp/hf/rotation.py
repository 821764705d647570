"""The rotation that a config.json describes: what is wrong with it, and what it is."""

import dataclasses
from typing import Any

from jaxsp.core import errors
from jaxsp.hf import values
from jaxsp.model.config import Llama3Rope

FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")

FULL_ROTARY_FACTORS = (1,)
"""What partial_rotary_factor may be."""

_LLAMA3_FIELDS = tuple(field.name for field in dataclasses.fields(Llama3Rope))


def find_problems(fields: dict[str, Any], path: str) -> list[str]:
    """Problems of the rotation, which comes as `rope_parameters` (transformers 5), or `rope_scaling` beside `rope_theta`."""
    problems = []
    meanings = {}
    outside = {name: fields[name] for name in ("rope_theta",) if name in fields}
    for form in ("rope_parameters", "rope_scaling"):
        given, where = fields.get(form), f"{path}.{form}"
        if not given:
            continue
        if not isinstance(given, dict):
            problems.append(
                f"{where} = {values.format_value(given)}: must be a group of fields, or null."
            )
            continue
        given = outside | given
        kinds = [given.pop(name) for name in ("rope_type", "type") if name in given] or ["default"]
        if any(kind not in ("default", "llama3") or kind != kinds[0] for kind in kinds):
            problems.append(
                f"{where}.rope_type = {errors.format_choices(kinds)}: is not implemented. Use default or llama3."
            )
            continue
        meanings[form] = (kinds[0], given)
        problems += _group_problems(given, kinds[0], where)
        for name, value in outside.items():
            if given[name] != value:
                problems.append(
                    f"{path}.{name} = {values.format_value(value)}: {where}.{name} = {values.format_value(given[name])} differs. Leave one out."
                )
    if len(meanings) == 2 and meanings["rope_parameters"] != meanings["rope_scaling"]:
        problems.append(f"{path}.rope_scaling: {path}.rope_parameters differs. Leave one out.")
    return problems


def _group_problems(given: dict[str, Any], kind: str, where: str) -> list[str]:
    problems: list[str] = []
    numbers = ("rope_theta", *(_LLAMA3_FIELDS if kind == "llama3" else ()))
    for name, value in given.items():
        if name == "partial_rotary_factor" and value in FULL_ROTARY_FACTORS:
            continue
        if name not in numbers:
            hint = errors.did_you_mean(str(name), numbers)
            problems.append(
                f"{where}.{name} = {values.format_value(value)}: is not implemented for rope_type {kind}.{hint or ' Leave it out.'}"
            )
    for name in numbers:
        number: Any = given.get(name)
        if name not in given and name != "rope_theta":
            problems.append(
                f"{where}.{name}: missing. Llama 3.1 has factor 8, 1 and 4, and 8192 positions."
            )
        elif name in given and (
            not values.is_number(number)
            or number <= 0
            or (name == _LLAMA3_FIELDS[-1] and not values.is_integer(number))
        ):
            problems.append(
                f"{where}.{name} = {values.format_value(number)}: must be a {'whole ' * (name == _LLAMA3_FIELDS[-1])}number above 0."
            )
    if kind == "llama3" and not problems and given["low_freq_factor"] >= given["high_freq_factor"]:
        problems.append(
            f"{where}.low_freq_factor = {given['low_freq_factor']}: must be below high_freq_factor, "
            f"which is {given['high_freq_factor']}. Llama 3.1 has 1 and 4."
        )
    return problems


def parse_llama3(given: dict[str, Any]) -> Llama3Rope | None:
    """The stretching that transformers' `rope_parameters` ask for; None if none."""
    return (
        Llama3Rope(**{name: given[name] for name in _LLAMA3_FIELDS})
        if given["rope_type"] == "llama3"
        else None
    )
