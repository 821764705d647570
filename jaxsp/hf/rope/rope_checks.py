"""Checks of the fields for rotary position embedding in a config.json."""

from collections.abc import Iterator
from typing import Any

from jaxsp.config import json_values
from jaxsp.config.yaml_io import format_value
from jaxsp.core import errors
from jaxsp.hf.rope import rope_fields
from jaxsp.hf.rope.rope_fields import ORIGINAL
from jaxsp.hf.rope.rope_forms import (
    FULL_ATTENTION,
    GROUPS,
    OUTSIDE_FIELDS,
    SLIDING_ATTENTION,
    RopeSupport,
    is_nested,
)
from jaxsp.hf.rope.rope_types import TYPES, count_rotated

_ONE_GROUP = RopeSupport()

_IGNORED = ("rope_type", "type", "finetuned")
"""Fields that every group may have; `finetuned` is in configs of early YaRN models."""

_ORDERED = {
    "llama3": ("low_freq_factor", "high_freq_factor", "Llama 3.1 has 1 and 4."),
    "yarn": ("beta_slow", "beta_fast", "The YaRN paper has 1 and 32."),
}
"""Two fields of a type of which the first must be below the second, and an example."""

_DEFAULTS = {"beta_slow": 1, "beta_fast": 32}

_SUGGESTIONS = {
    "partial_rotary_factor": "It rotates whole heads: use 1, or leave it out.",
    "rope_local_base_freq": "All its layers have the same rope_theta: leave it out.",
    ORIGINAL: "Put it into rope_scaling.",
}
"""Suggestions for fields that the family does not have."""


def find_problems(
    fields: dict[str, Any], path: str, support: RopeSupport = _ONE_GROUP
) -> list[str]:
    """Problems of the rotary fields. Every field of every type is checked.

    Args:
        fields: fields of the config.json, without nulls, with groups from `normalize`.
        path: name of the config in messages, for example `model.config`.
    """
    problems = []
    outside = {}
    for name in OUTSIDE_FIELDS:
        value = fields.get(name)
        if value is None or (name == "partial_rotary_factor" and value == 1):
            continue
        if name not in support.outside_fields:
            problem = f"is not implemented for this model_type. {_SUGGESTIONS[name]}"
            problems.append(f"{path}.{name} = {format_value(value)}: {problem}")
        elif wrong := json_values.find_problem(rope_fields.RULES, name, value):
            problems.append(f"{path}.{wrong}")
        else:
            outside[name] = value
    local_theta = outside.pop("rope_local_base_freq", None)
    main_groups = []
    for form in GROUPS:
        form_groups = fields.get(form)
        if form_groups is None or (not form_groups and "default" in support.types):
            continue
        if form_problem := _find_form_problem(form, form_groups, support):
            problems.append(f"{path}.{form}{form_problem}")
            continue
        groups = {"": form_groups}
        if is_nested(form_groups, support):
            groups = {FULL_ATTENTION: {}} | form_groups
        for layer_type, group in groups.items():
            where = f"{path}.{form}.{layer_type}".rstrip(".")
            if layer_type and (wrong := _find_layer_type_problem(layer_type, group, support)):
                problems.append(f"{where}{wrong}")
            elif layer_type == SLIDING_ATTENTION:
                found = find_group_problems(group, fields, support)
                problems += (f"{where}.{problem}" for problem in found)
                problems += _find_conflict(
                    f"{path}.rope_local_base_freq", local_theta, f"{where}.rope_theta", group
                )
            else:
                found = find_group_problems(group, fields, support, outside)
                problems += (f"{where}.{problem}" for problem in found)
                for name, value in outside.items():
                    problems += _find_conflict(f"{path}.{name}", value, f"{where}.{name}", group)
                main_groups.append({**outside, **_comparable(group)})
    if not problems and any(group != main_groups[0] for group in main_groups):
        problems.append(f"{path}.rope_scaling: must equal {path}.rope_parameters. Leave one out.")
    return problems


def _find_form_problem(form: str, group: Any, support: RopeSupport) -> str | None:
    """Problem of a group, or of groups for each layer type, that transformers would not read."""
    if not isinstance(group, dict):
        return f" = {format_value(group)}: must be a group of fields, or null."
    if not support.layer_types or is_nested(group, support) == (form == "rope_parameters"):
        return None
    types = errors.format_choices(support.layer_types)
    if form == "rope_parameters":
        return (
            f": must have groups of fields for layers of {types}. Use rope_scaling for one group."
        )
    return f": must have no groups for layers of {types}. Use rope_parameters for these."


def _find_layer_type_problem(name: str, group: Any, support: RopeSupport) -> str | None:
    """Problem of the group of a layer type, besides those of its fields."""
    if name not in support.layer_types:
        types = errors.format_choices(support.layer_types)
        return f" = {format_value(group)}: is not a layer type of this model_type. Use {types}."
    if not isinstance(group, dict):
        return f" = {format_value(group)}: must be a group of fields, or null."
    if group.get("truncate") is False:
        return (
            ".truncate = false: is not implemented in the group of a layer type, where "
            "transformers ignores it. Leave it out."
        )
    return None


def _find_conflict(field: str, value: Any, inner: str, group: dict[str, Any]) -> list[str]:
    """Problem of a field beside the groups that a group has with another value."""
    own = group.get(inner.rpartition(".")[2])
    if None in (own, value) or own == value:
        return []
    return [
        f"{field} = {format_value(value)}: must equal {inner} = {format_value(own)}. Leave one out."
    ]


def _comparable(group: dict[str, Any]) -> dict[str, Any]:
    """A group with its type in `rope_type`, without ignored fields and rotation of whole heads."""
    kept = {name: value for name, value in group.items() if name not in _IGNORED}
    if kept.get("partial_rotary_factor") == 1:
        del kept["partial_rotary_factor"]
    return {"rope_type": _find_types(group)[0], **kept}


def _find_types(group: dict[str, Any]) -> list[Any]:
    """Values of `rope_type` and its former name `type`; ["default"] if there is neither."""
    return [group[name] for name in ("rope_type", "type") if name in group] or ["default"]


def find_group_problems(
    group: dict[str, Any],
    fields: dict[str, Any],
    support: RopeSupport,
    outside: dict[str, Any] | None = None,
) -> list[str]:
    """Problems of one group, which begin with the names of its fields.

    Args:
        fields: fields of the config.json.
        outside: valid fields beside the groups that belong to this one.
    """
    name_of_type, *others = _find_types(group)
    if name_of_type not in support.types or others not in ([], [name_of_type]):
        types = errors.format_choices([name_of_type, *others])
        return [
            f"rope_type = {types}: is not implemented for this model_type. "
            f"Use {errors.format_choices(support.types)}."
        ]
    problems = []
    rope_type = TYPES[name_of_type]
    known = {*rope_type.fields, *_IGNORED, *support.extra_fields}
    if "partial_rotary_factor" not in support.outside_fields:
        known.remove("partial_rotary_factor")
    group = {name: value for name, value in group.items() if value is not None}
    for name, value in group.items():
        if name not in known and not (name == "partial_rotary_factor" and value == 1):
            hint = errors.did_you_mean(str(name), known) or " Leave it out."
            if name == "partial_rotary_factor":
                hint = f" {_SUGGESTIONS[name]}"
            problems.append(
                f"{name} = {format_value(value)}: is not implemented for rope_type {name_of_type} "
                f"of this model_type.{hint}"
            )
        elif problem := json_values.find_problem(rope_fields.RULES, name, value):
            problems.append(problem)
    given = {**(outside or {}), **group}
    problems += [
        f"{name}: missing. {rope_fields.EXAMPLES[name]}"
        for name in (*rope_type.required, *support.required_fields)
        if name not in given
    ]
    if rope_type.needs_range and not {"max_position_embeddings", ORIGINAL} & {*fields, *given}:
        problems.append(
            f"rope_type = {name_of_type}: needs the number of positions that the model was trained "
            "for. Set max_position_embeddings."
        )
    return problems or [*_find_relation_problems(name_of_type, given, fields)]


def _find_relation_problems(
    name_of_type: str, given: dict[str, Any], fields: dict[str, Any]
) -> Iterator[str]:
    """Values of a group that do not fit together, or do not fit the head's size."""
    if name_of_type in _ORDERED:
        small, large, example = _ORDERED[name_of_type]
        low, high = ({**_DEFAULTS, **given}[name] for name in (small, large))
        if low >= high:
            yield f"{small} = {low}: must be below {large}, which is {high}. {example}"
    sizes: list[Any] = [fields.get(name) for name in ("hidden_size", "num_attention_heads")]
    head_dim: Any = fields.get("head_dim")
    if head_dim is None and all(json_values.is_integer(size) and size > 0 for size in sizes):
        head_dim = sizes[0] // sizes[1]
    if not json_values.is_integer(head_dim) or head_dim <= 0 or head_dim % 2:
        return  # the sizes are missing or wrong, which is another problem
    rotated = count_rotated(head_dim, given)
    if rotated % 2 or rotated == 0:
        yield (
            f"partial_rotary_factor = {given.get('partial_rotary_factor', 1)}: gives "
            f"{rotated} of {head_dim} elements of a head; it must be an even number from 2."
        )
    for name in ("short_factor", "long_factor"):
        if name in given and len(given[name]) != rotated // 2:
            yield (
                f"{name}: has {len(given[name])} numbers, but {rotated} elements of a head are "
                f"rotated in pairs. Give {rotated // 2} numbers."
            )
