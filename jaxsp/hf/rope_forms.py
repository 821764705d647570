"""Rotary position embedding of a config.json: places and checks of its fields.

It is given as `rope_parameters` (transformers 5), or as `rope_scaling` with `rope_theta` beside it
(transformers 4). Families whose layers differ have a group for each layer type in
`rope_parameters`; transformers 4 had the field rope_local_base_freq for Gemma 3's windowed layers.
"""

from typing import Any

from jaxsp.config import json_values
from jaxsp.config.yaml_io import format_value
from jaxsp.core import errors
from jaxsp.hf import rope_types
from jaxsp.hf.rope_types import ORIGINAL, PARTIAL, RopeSupport

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

GROUPS = ("rope_parameters", "rope_scaling")

OUTSIDE_FIELDS = ("rope_theta", PARTIAL, "rope_local_base_freq", ORIGINAL)
"""Fields beside the groups. Which of them a family has is in its `RopeSupport`."""

FIELDS = (*GROUPS, *OUTSIDE_FIELDS)


def find_theta(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the field `rope_theta` of a config.json, as transformers finds it; empty if it has
    none.

    Args: fields: with nulls, for families whose layers share one group.
    """
    group = fields.get("rope_scaling") or fields.get("rope_parameters")
    places = (group if isinstance(group, dict) else {}, fields)
    return next(({"rope_theta": x["rope_theta"]} for x in places if "rope_theta" in x), {})


NO_ROPE = {"rope_theta": None}
"""Result of `find_theta` for a model without RoPE, if that is possible in its family."""


def normalize(group: dict[str, Any]) -> dict[str, Any]:
    """Copies a group, or a group for each layer type, as transformers reads it.

    Types have their present names, and are in `rope_type`: with only `type`, transformers would
    read the default for layers that differ (Gemma 3). Nulls are left out, except for `factor`,
    which transformers then computes from the numbers of positions.
    """
    kept: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, dict):
            value = normalize(value)
        elif name in rope_types.TYPE_FIELDS:
            value = "longrope" if value == "su" else value  # its former name
        if value is not None or name == "factor":
            kept[str(name)] = value
    if "type" in kept:
        kept.setdefault("rope_type", kept["type"])
    return kept


def to_old_form(groups: dict[str, Any], support: RopeSupport) -> dict[str, Any]:
    """Converts `rope_parameters` to the fields of transformers 4; empty if these cannot express
    it."""
    local: dict[str, Any] = {}
    if is_nested(groups, support):
        sliding, groups = (groups[name] for name in (SLIDING_ATTENTION, FULL_ATTENTION))
        theta = sliding["rope_theta"]
        if "rope_local_base_freq" in support.outside_fields:
            local = {"rope_local_base_freq": theta}
        if sliding["rope_type"] != "default" or not (local or theta == groups["rope_theta"]):
            return {}
    outside = {name: groups[name] for name in support.outside_fields if name in groups}
    scaling = {name: value for name, value in groups.items() if name not in outside}
    is_default = scaling == {"rope_type": "default"}
    if ORIGINAL in support.outside_fields:
        # transformers 4 reads Phi-3's scaling only with `type`, and without other fields
        scaling["type"] = scaling.pop("rope_type")
    return {**outside, "rope_scaling": None if is_default else scaling, **local}


def is_nested(group: dict[str, Any], support: RopeSupport) -> bool:
    """True if a group has a group for each layer type."""
    return any(name in support.layer_types for name in group)


_SUGGESTIONS = {
    PARTIAL: rope_types.WHOLE_HEADS,
    "rope_local_base_freq": "All its layers have the same rope_theta: leave it out.",
    ORIGINAL: "Put it into rope_scaling.",
}
"""Suggestions for fields that the family does not have."""


def find_problems(fields: dict[str, Any], path: str, support: RopeSupport) -> list[str]:
    """Problems of the rotary fields. Every field of every type is checked.

    Args:
        fields: fields of the config.json, without nulls, with groups from `normalize`.
        path: name of the config in messages, for example `model.config`.
    """
    problems = []
    outside = {}
    for name in OUTSIDE_FIELDS:
        value = fields.get(name)
        if value is None or (name == PARTIAL and value == 1):
            continue
        if name not in support.outside_fields:
            problem = f"is not implemented for this model_type. {_SUGGESTIONS[name]}"
            problems.append(f"{path}.{name} = {format_value(value)}: {problem}")
        elif wrong := json_values.find_problem(rope_types.RULES, name, value):
            problems.append(f"{path}.{wrong}")
        else:
            outside[name] = value
    local = {"rope_theta": outside.pop("rope_local_base_freq", None)}
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
                continue
            is_local = layer_type == SLIDING_ATTENTION
            beside = local if is_local else outside
            found = rope_types.find_group_problems(group, fields, support, beside)
            problems += (f"{where}.{problem}" for problem in found)
            for name, value in beside.items():
                if None not in (own := group.get(name), value) and own != value:
                    outer = "rope_local_base_freq" if is_local else name
                    problems.append(
                        f"{path}.{outer} = {format_value(value)}: must equal {where}.{name} = "
                        f"{format_value(own)}. Leave one out."
                    )
            if not is_local:
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
    if form == "rope_scaling":
        return f": must have no groups for layers of {types}. Use rope_parameters for these."
    return f": must have groups of fields for layers of {types}. Use rope_scaling for one group."


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


def _comparable(group: dict[str, Any]) -> dict[str, Any]:
    """A group with its type in `rope_type`, without ignored fields and rotation of whole heads."""
    kept = {name: value for name, value in group.items() if name not in rope_types.IGNORED}
    if kept.get(PARTIAL) == 1:
        del kept[PARTIAL]
    return {"rope_type": group.get("rope_type", group.get("type", "default")), **kept}
