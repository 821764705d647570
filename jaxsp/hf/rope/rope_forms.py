"""Rotary position embedding of a config.json: where its fields are in transformers 5 and 4.

It is given as `rope_parameters` (transformers 5), or as `rope_scaling` with `rope_theta` beside it
(transformers 4). Families whose layers differ have a group for each layer type in
`rope_parameters`; transformers 4 had the field rope_local_base_freq for Gemma 3's windowed layers.
"""

import dataclasses
from typing import Any

from jaxsp.hf.rope import rope_types
from jaxsp.hf.rope.rope_fields import ORIGINAL

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

GROUPS = ("rope_parameters", "rope_scaling")

OUTSIDE_FIELDS = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq", ORIGINAL)
"""Fields beside the groups. Which of them a family has is in its `RopeSupport`."""

FIELDS = (*GROUPS, *OUTSIDE_FIELDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSupport:
    """Rotary features that a family's code in transformers has."""

    types: tuple[str, ...] = tuple(rope_types.TYPES)
    layer_types: tuple[str, ...] = ()
    """Layer types with their own groups in `rope_parameters`; empty if all layers share one."""
    outside_fields: tuple[str, ...] = ("rope_theta",)
    """Fields beside the groups: partial_rotary_factor if it may be below 1, rope_local_base_freq
    for layers with a window in transformers 4 (Gemma 3), original_max_position_embeddings
    (Phi-3)."""
    extra_fields: tuple[str, ...] = ()
    """Fields of a group that the family reads elsewhere (Ministral 3: llama_4_scaling_beta)."""
    required_fields: tuple[str, ...] = ()
    """Fields that a group must have in addition to those of its type."""
    is_optional: bool = False
    """True if a `rope_theta` of null means that no layer has RoPE (OLMo Hybrid)."""
    layer_thetas: str | None = None
    """Field with rope_theta for each layer that has RoPE, and 0 for the others; None: the family
    has no such field."""


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
        elif name in ("rope_type", "type"):
            value = rope_types.LEGACY_NAMES.get(str(value), value)
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
