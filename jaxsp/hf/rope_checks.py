"""Checks of the fields for rotary position embedding in a config.json."""

import dataclasses
from typing import Any

from jaxsp.core import errors
from jaxsp.hf import json_values, rope_fields, rope_types
from jaxsp.hf.json_values import format_value
from jaxsp.hf.rope_forms import (
    FULL_ATTENTION,
    GROUPS,
    OUTSIDE_FIELDS,
    SLIDING_ATTENTION,
    RopeSupport,
    is_nested,
)

FULL_ROTARY_FACTORS = (1,)

_ONE_GROUP = RopeSupport()

_IGNORED = ("rope_type", "type", "finetuned")
"""Fields that every group may have; `finetuned` is in configs of early YaRN models."""


def find_problems(
    fields: dict[str, Any], path: str, support: RopeSupport = _ONE_GROUP
) -> list[str]:
    """Problems of the rotary fields. Every field of every type is checked.

    Args:
        fields: fields of the config.json, without nulls, with groups from `normalize`.
        path: name of the config in messages, for example `model.config`.
    """
    check = _Check(fields=fields, path=path, support=support)
    problems = check.find_outside_problems()
    has_default = "default" in support.types  # the type of an empty group
    forms = [form for form in GROUPS if form in fields and (fields[form] or not has_default)]
    for form in forms:
        group = fields[form]
        where = f"{path}.{form}"
        if not isinstance(group, dict):
            problems.append(f"{where} = {format_value(group)}: must be a group of fields, or null.")
        elif form_problem := _find_form_problem(form, group, support):
            problems.append(f"{where}: {form_problem}")
        elif is_nested(group, support):
            problems += check.find_nested_problems(group, where)
        else:
            problems += check.find_group_problems(group, where, outside=check.outside)
    if len(forms) == 2 and not problems:
        groups = [fields[form] for form in forms]
        if is_nested(groups[0], support):
            groups[0] = groups[0].get(FULL_ATTENTION, {})
        first, second = ({**check.outside, **_comparable(group)} for group in groups)
        if first != second:
            problems.append(
                f"{path}.rope_scaling: must equal {path}.rope_parameters. Leave one out."
            )
    return problems


def _find_form_problem(form: str, group: dict[str, Any], support: RopeSupport) -> str | None:
    """Problem of a group, or of groups for each layer type, that transformers would not read."""
    if not support.layer_types or is_nested(group, support) == (form == "rope_parameters"):
        return None
    types = errors.format_choices(support.layer_types)
    if form == "rope_parameters":
        return f"must have groups of fields for layers of {types}. Use rope_scaling for one group."
    return f"must have no groups for layers of {types}. Use rope_parameters for these."


def _comparable(group: dict[str, Any]) -> dict[str, Any]:
    """A group with its type in `rope_type`, without ignored fields."""
    kept = {name: value for name, value in group.items() if name not in _IGNORED}
    return {"rope_type": _find_types(group)[0], **kept}


def _find_types(group: dict[str, Any]) -> list[Any]:
    """Values of `rope_type` and its former name `type`; ["default"] if there is neither."""
    return [group[name] for name in ("rope_type", "type") if name in group] or ["default"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Check:
    """Check of one config.json."""

    fields: dict[str, Any]
    path: str
    support: RopeSupport

    @property
    def outside(self) -> dict[str, Any]:
        """Fields beside the groups that belong to the group of all layers, if they are valid."""
        fields = {name: self.fields[name] for name in OUTSIDE_FIELDS if name in self.fields}
        return {
            name: value
            for name, value in fields.items()
            if name in self.support.outside_fields
            and name != "rope_local_base_freq"
            and rope_fields.find_problem(name, value) is None
        }

    def find_outside_problems(self) -> list[str]:
        """Problems of the fields beside the groups."""
        problems = []
        for name in OUTSIDE_FIELDS:
            if name not in self.fields:
                continue
            value = self.fields[name]
            is_full = name == "partial_rotary_factor" and value in FULL_ROTARY_FACTORS
            if name not in self.support.outside_fields and not is_full:
                problems.append(
                    f"{self.path}.{name} = {format_value(value)}: "
                    f"is not implemented for this model_type. {_SUGGESTIONS[name]}"
                )
            elif problem := rope_fields.find_problem(name, value):
                problems.append(f"{self.path}.{problem}")
        return problems

    def find_nested_problems(self, groups: dict[str, Any], where: str) -> list[str]:
        """Problems of a group for each layer type."""
        problems = []
        for name, group in groups.items():
            if name not in self.support.layer_types:
                problems.append(
                    f"{where}.{name} = {format_value(group)}: is not a layer type of this "
                    f"model_type. Use {errors.format_choices(self.support.layer_types)}."
                )
            elif not isinstance(group, dict):
                problems.append(
                    f"{where}.{name} = {format_value(group)}: must be a group of fields, or null."
                )
            else:
                outside = self.outside if name == FULL_ATTENTION else {}
                problems += self.find_group_problems(group, f"{where}.{name}", outside=outside)
                if group.get("truncate") is False:
                    problems.append(
                        f"{where}.{name}.truncate = false: is not implemented in the group of a "
                        "layer type, where transformers ignores it. Leave it out."
                    )
        local = self.fields.get("rope_local_base_freq")
        theta = (groups.get(SLIDING_ATTENTION) or {}).get("rope_theta")
        if not problems and local is not None and theta not in (None, local):
            problems.append(
                f"{self.path}.rope_local_base_freq = {format_value(local)}: must equal "
                f"{where}.{SLIDING_ATTENTION}.rope_theta = {format_value(theta)}. Leave one out."
            )
        return problems

    def find_group_problems(
        self, group: dict[str, Any], where: str, *, outside: dict[str, Any]
    ) -> list[str]:
        """Problems of one group, to which the fields `outside` belong too."""
        types = _find_types(group)
        name_of_type = types[0]
        if any(name not in self.support.types or name != name_of_type for name in types):
            return [
                f"{where}.rope_type = {errors.format_choices(types)}: is not implemented. "
                f"Use {errors.format_choices(self.support.types)}."
            ]
        problems = []
        group = {name: value for name, value in group.items() if value is not None}
        for name, value in group.items():
            if problem := self._unknown_problem(name, value, name_of_type):
                problems.append(f"{where}.{name} = {format_value(value)}: {problem}")
            elif problem := rope_fields.find_problem(name, value):
                problems.append(f"{where}.{problem}")
            elif outside.get(name, value) != value:
                problems.append(
                    f"{self.path}.{name} = {format_value(outside[name])}: must equal "
                    f"{where}.{name} = {format_value(value)}. Leave one out."
                )
        given = {**outside, **group}
        rope_type = rope_types.TYPES[name_of_type]
        problems += [
            f"{where}.{name}: missing. {rope_fields.EXAMPLES[name]}"
            for name in (*rope_type.required, *self.support.required_fields)
            if name not in given
        ]
        if rope_type.needs_range and not {"max_position_embeddings", rope_fields.ORIGINAL} & {
            *self.fields,
            *given,
        }:
            problems.append(
                f"{where}.rope_type = {name_of_type}: needs the number of positions that the model "
                f"was trained for. Set {self.path}.max_position_embeddings."
            )
        return problems or self._find_relation_problems(name_of_type, given, where)

    def _unknown_problem(self, name: str, value: Any, name_of_type: str) -> str | None:
        """Problem of a field that the type or the family does not have."""
        known = {*rope_types.TYPES[name_of_type].fields, *_IGNORED, *self.support.extra_fields}
        if name == "partial_rotary_factor" and not self.support.has_partial_rotary:
            if value in FULL_ROTARY_FACTORS:
                return None
            return (
                f"is not implemented for rope_type {name_of_type} of this model_type, which "
                "rotates whole heads. Leave it out."
            )
        if name in known:
            return None
        hint = errors.did_you_mean(str(name), known) or " Leave it out."
        return f"is not implemented for rope_type {name_of_type}.{hint}"

    def _find_relation_problems(
        self, name_of_type: str, given: dict[str, Any], where: str
    ) -> list[str]:
        """Values of a group that do not fit together, or do not fit the head's size."""
        problems = []
        for small, large, example in rope_fields.ORDERED.get(name_of_type, ()):
            low, high = (
                given.get(name, rope_fields.DEFAULTS.get(name, 0)) for name in (small, large)
            )
            if low >= high:
                problems.append(
                    f"{where}.{small} = {low}: must be below {large}, which is {high}. {example}"
                )
        head_dim = self._find_head_dim()
        if head_dim is None:
            return problems
        rotated = rope_types.count_rotated(head_dim, given)
        if rotated % 2 or rotated == 0:
            problems.append(
                f"{where}.partial_rotary_factor = {given.get('partial_rotary_factor', 1)}: gives "
                f"{rotated} of {head_dim} elements of a head; it must be an even number from 2."
            )
        for name in ("short_factor", "long_factor"):
            if name in given and len(given[name]) != rotated // 2:
                problems.append(
                    f"{where}.{name}: has {len(given[name])} numbers, but {rotated} elements of a "
                    f"head are rotated in pairs. Give {rotated // 2} numbers."
                )
        return problems

    def _find_head_dim(self) -> int | None:
        """Size of a head; None if the sizes are missing, wrong, or an odd head."""
        sizes: list[Any] = [
            self.fields.get(name) for name in ("hidden_size", "num_attention_heads")
        ]
        head_dim: Any = self.fields.get("head_dim")
        if head_dim is None and all(json_values.is_integer(size) and size > 0 for size in sizes):
            head_dim = sizes[0] // sizes[1]
        is_valid = json_values.is_integer(head_dim) and head_dim > 0 and head_dim % 2 == 0
        return head_dim if is_valid else None


_SUGGESTIONS = {
    "partial_rotary_factor": "It rotates whole heads: use 1, or leave it out.",
    "rope_local_base_freq": "All its layers have the same rope_theta: leave it out.",
    rope_fields.ORIGINAL: "Put it into rope_scaling.",
}
"""Suggestions for fields that the family does not have."""
