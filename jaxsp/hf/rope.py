"""Rotary position embedding of a config.json: types, frequencies, and checks of its fields.

It is given as `rope_parameters` (transformers 5), or as `rope_scaling` with `rope_theta` beside it
(transformers 4). Families whose layers differ have a group for each layer type in
`rope_parameters`; transformers 4 had the field rope_local_base_freq for Gemma 3's windowed layers.

To add a type: one function and one entry of `TYPES`. Angles need float64, because transformers'
float32 frequencies are off by 1e-7, which is 0.3 rad at position 5,000,000.

Sources: transformers' modeling_rope_utils.py; frequencies: Su et al. 2021, arXiv:2104.09864;
llama3: Llama 3.1's published code; yarn: Peng et al. 2023, arXiv:2309.00071; longrope: Ding et al.
2024, arXiv:2402.13753.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxsp.blocks.config import Rope
from jaxsp.config import json_values
from jaxsp.config.json_values import NOT_NEGATIVE, POSITIVE, SWITCH, Rule
from jaxsp.config.yaml_io import format_value
from jaxsp.core import errors
from jaxsp.core.errors import UserError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
_LOCAL_THETA = "rope_local_base_freq"

GROUPS = ("rope_parameters", "rope_scaling")

OUTSIDE_FIELDS = ("rope_theta", PARTIAL, _LOCAL_THETA, ORIGINAL)
"""Fields beside the groups. Which of them a family has is in its `RopeSupport`."""

FIELDS = (*GROUPS, *OUTSIDE_FIELDS)

LAYER_THETAS = "layer_rope_theta"
"""Field with rope_theta for each layer that has RoPE, and 0 for the others (Muse Glimmer)."""

NO_THETA = {"rope_theta": None}
"""Result of `find_theta` for a model without RoPE, if that is possible in its family."""

NO_ROPE = Rope(frequencies=(), description="none")
"""RoPE of such a model."""


def parse(
    group: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int | None = None,
    row_tokens: int | None = None,
) -> Rope:
    """Converts one resolved group of `rope_parameters`, with rope_type and rope_theta.

    Args: row_tokens: length of the rows, by which longrope chooses its factors; None: no longer
        than the model's original range.
    Raises: UserError if the frequencies would depend on the batch.
    """
    group = {name: value for name, value in group.items() if value is not None}
    rotated = int(head_dim * group.get(PARTIAL, 1.0))
    rope_type = TYPES[group["rope_type"]]
    dim = head_dim if rope_type.is_proportional else rotated
    base = float(group["rope_theta"]) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    limit = max_position_embeddings
    original = group.get(ORIGINAL, limit) or 1  # types that need it were checked
    factor = float(group.get("factor") or (limit or original) / original)
    inputs = {**group, ORIGINAL: original, "factor": factor, "max_position_embeddings": limit}
    frequencies, scale, details = rope_type.compute(inputs, base, row_tokens or 0)
    frequencies[rotated // 2 :] = 0
    if details is None:
        details = f"factor {factor:g} over {original:,} positions"
    parts = [group["rope_type"], f"theta {group['rope_theta']:,.12g}", *filter(None, [details])]
    if rotated < head_dim:
        parts.append(f"{rotated} of {head_dim} elements rotated")
    return Rope(
        frequencies=tuple(frequencies.tolist()), scale=float(scale), description=", ".join(parts)
    )


_Group = dict[str, Any]
"""Fields that `find_group_problems` accepts, without nulls; with factor, original range, and
max_position_embeddings (None if the model has no limit)."""

_Result = tuple[np.ndarray, float, str | None]
"""Frequencies in radians per position [pairs], factor of cosine and sine, and a description; None:
the factor and the range."""


def _linear(group: _Group, base: np.ndarray, row_tokens: int) -> _Result:
    """Positions are divided by the factor. Equals default without one."""
    factor = group["factor"]
    return base / factor, 1.0, f"factor {factor:g}" if factor != 1 else ""


def _dynamic(group: _Group, base: np.ndarray, row_tokens: int) -> _Result:
    """Equals default within the model's range; beyond it, theta depends on the longest document."""
    limit = group["max_position_embeddings"]
    if limit is not None and row_tokens > limit:
        raise UserError(
            f"is not implemented for rows of {row_tokens:,} tokens: beyond "
            f"{limit:,} positions (max_position_embeddings) the frequencies of all tokens depend "
            "on the longest document of a batch. Use model.rope={type: yarn, factor: "
            f"{format_factor(row_tokens / limit)}}}, or data.row_tokens of at most {limit}."
        )
    return base, 1.0, ""


def _llama3(group: _Group, base: np.ndarray, row_tokens: int) -> _Result:
    """Low frequencies are divided by the factor.

    Wavelengths above original / low_freq_factor become `factor` times longer; those below
    original / high_freq_factor stay the same. Between them, frequencies are interpolated linearly
    in original / wavelength.
    """
    low = group["low_freq_factor"]
    periods = group[ORIGINAL] * base / (2 * np.pi)
    unscaled = np.clip((periods - low) / (group["high_freq_factor"] - low), 0.0, 1.0)
    frequencies = base * (unscaled + (1 - unscaled) / group["factor"])
    return frequencies, 1.0, None


def _yarn(group: _Group, base: np.ndarray, row_tokens: int) -> _Result:
    """Low frequencies are divided by the factor, and cosine and sine grow with its logarithm.

    Pairs that rotate more than beta_fast times in the original range stay the same; those that
    rotate less than beta_slow times are divided by the factor; a linear ramp lies between them.
    """
    dim = 2 * len(base)
    factor = group["factor"]

    def pair_at(rotations: float) -> float:
        """Index of the pair that rotates that often in the original range."""
        wavelength = group[ORIGINAL] / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(group["rope_theta"]))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low = pair_at(float(group.get("beta_fast", 32)))
    high = pair_at(float(group.get("beta_slow", 1)))
    if group.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)  # dim, not pairs, as in transformers
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(len(base), dtype=np.float64) - low) / (high - low), 0, 1)
    scale = mscale(1.0)
    if "attention_factor" in group:
        scale = float(group["attention_factor"])
    elif group.get("mscale") and group.get("mscale_all_dim"):
        scale = mscale(float(group["mscale"])) / mscale(float(group["mscale_all_dim"]))
    frequencies = base * (interpolated / factor + (1 - interpolated))
    return frequencies, scale, None


def _longrope(group: _Group, base: np.ndarray, row_tokens: int) -> _Result:
    """Each frequency has its own divisor, from one list for short rows and one for long rows.

    transformers chooses by the longest document of a batch. Here the choice is fixed for a run, by
    the length of its rows.
    """
    original = group[ORIGINAL]
    is_long = row_tokens > original
    scale: float | None = group.get("attention_factor")
    if scale is None:
        scale = 1.0
        if group["factor"] > 1:
            scale = math.sqrt(1 + math.log(group["factor"]) / math.log(original))
    name = "long" if is_long else "short"
    relation = "above" if is_long else "of at most"
    details = f"{name} factors (for rows {relation} {original:,} tokens)"
    if group["long_factor"] == group["short_factor"]:
        details = "the same factors for all rows"
    return base / np.array(group[f"{name}_factor"], np.float64), scale, details


def format_factor(factor: float) -> str:
    """A factor for a suggestion, rounded up to three decimals."""
    return f"{math.ceil(round(factor * 1000, 6)) / 1000:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeType:
    """Entry of the registry: how a type computes frequencies, and its fields."""

    compute: Callable[[_Group, np.ndarray, int], _Result]
    """Args: a group; radians per position of each rotated pair with the type `default`, float64
    [pairs]; length of the rows."""
    required: tuple[str, ...] = ()
    """Fields without a default."""
    optional: tuple[str, ...] = ()
    """Fields with a default, besides those of all types."""
    extends_range: bool = False
    """True if max_position_embeddings is `factor` times the original range."""
    is_proportional: bool = False
    """True if frequencies are those of whole heads, of which the last ones do not rotate."""
    needs_range: bool = False
    """True if it depends on max_position_embeddings or on the original range."""
    ordered: tuple[str, ...] = ()
    """Two fields of which the first must be below the second."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields of a group, except the type."""
        return ("rope_theta", PARTIAL, *self.required, *self.optional)


TYPES = {
    "default": RopeType(compute=lambda group, base, row_tokens: (base, 1.0, "")),
    "linear": RopeType(compute=_linear, required=("factor",), extends_range=True),
    "proportional": RopeType(
        compute=_linear, optional=("factor",), extends_range=True, is_proportional=True
    ),
    "dynamic": RopeType(compute=_dynamic, required=("factor",), needs_range=True),
    "llama3": RopeType(
        compute=_llama3,
        required=("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
        ordered=("low_freq_factor", "high_freq_factor"),
    ),
    "yarn": RopeType(
        compute=_yarn,
        optional=(
            *("factor", ORIGINAL, "beta_fast", "beta_slow"),
            *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
        ),
        extends_range=True,
        needs_range=True,
        ordered=("beta_slow", "beta_fast"),
    ),
    "longrope": RopeType(
        compute=_longrope,
        required=("short_factor", "long_factor"),
        optional=("factor", ORIGINAL, "attention_factor"),
        extends_range=True,
        needs_range=True,
    ),
}
"""All types by their name in `rope_type`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSupport:
    """Rotary features that a family's code in transformers has."""

    types: tuple[str, ...] = tuple(name for name in TYPES if name != "proportional")
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
    only_windows: bool = False
    """True if only layers with a window have RoPE (Cohere 2)."""


_THETA = Rule(lambda x: json_values.is_number(x) and x > 1, "a number above 1")
_DIVISORS = Rule(
    lambda x: isinstance(x, list) and bool(x) and all(map(POSITIVE.is_valid, x)),
    "a list of numbers above 0, one for each rotated pair",
)

_RULES = {
    **dict.fromkeys(("rope_theta", _LOCAL_THETA), _THETA),
    PARTIAL: Rule(lambda x: POSITIVE.is_valid(x) and x <= 1, "a number above 0, at most 1"),
    "factor": Rule(lambda x: json_values.is_number(x) and x >= 1, "a number from 1"),
    ORIGINAL: Rule(lambda x: json_values.is_integer(x) and x > 1, "a whole number from 2"),
    "truncate": SWITCH,
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), NOT_NEGATIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "attention_factor"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("short_factor", "long_factor"), _DIVISORS),
}
"""Values that fields of groups, and beside groups, may have."""

_TYPE_FIELDS = ("rope_type", "type")
"""Present and former name of the type's field."""

_IGNORED = (*_TYPE_FIELDS, "finetuned")
"""Fields that every group may have; `finetuned` is in configs of early YaRN models."""


def find_theta(fields: dict[str, Any]) -> dict[str, Any]:
    """The field rope_theta where transformers finds it, also if it is null; empty if there is none.

    Layers must share one group.
    """
    group = fields.get("rope_scaling") or fields.get("rope_parameters")
    places = (group if isinstance(group, dict) else {}, fields)
    return next(({"rope_theta": x["rope_theta"]} for x in places if "rope_theta" in x), {})


def normalize(group: Any, place: str = GROUPS[0]) -> dict[str, Any]:
    """Copies a group, or a group for each layer type, as transformers reads it.

    Types have their present names, and are in `rope_type`: with only `type`, transformers would
    read the default for layers that differ (Gemma 3). Nulls are left out, except for `factor`,
    which transformers then computes from the numbers of positions.

    Args: place: name of the field. Raises: UserError if it is not a group.
    """
    if not isinstance(group, dict):
        raise UserError(f".{place} = {format_value(group)}: must be a group of fields, or null.")
    kept: dict[str, Any] = {}
    for name, value in group.items():
        if value is not None and name in (FULL_ATTENTION, SLIDING_ATTENTION):
            value = normalize(value, f"{place}.{name}")
        elif name in _TYPE_FIELDS:
            value = "longrope" if value == "su" else value  # its former name
        if value is not None or name == "factor":
            kept[str(name)] = value
    if "type" in kept:
        kept.setdefault("rope_type", kept["type"])
    return kept


def is_nested(group: dict[str, Any], support: RopeSupport) -> bool:
    """True if a group has a group for each layer type."""
    return any(name in support.layer_types for name in group)


def to_old_form(groups: dict[str, Any], support: RopeSupport) -> dict[str, Any]:
    """Converts `rope_parameters` to the fields of transformers 4; empty if these cannot express
    it."""
    local: dict[str, Any] = {}
    if is_nested(groups, support):
        sliding, groups = (groups[name] for name in (SLIDING_ATTENTION, FULL_ATTENTION))
        theta = sliding["rope_theta"]
        if _LOCAL_THETA in support.outside_fields:
            local = {_LOCAL_THETA: theta}
        if sliding["rope_type"] != "default" or not (local or theta == groups["rope_theta"]):
            return {}
    outside = {name: groups[name] for name in support.outside_fields if name in groups}
    scaling = {name: value for name, value in groups.items() if name not in outside}
    is_default = scaling == {"rope_type": "default"}
    if ORIGINAL in support.outside_fields:
        # transformers 4 reads Phi-3's scaling only with `type`, and without other fields
        scaling["type"] = scaling.pop("rope_type")
    return {**outside, "rope_scaling": None if is_default else scaling, **local}


def find_problems(
    fields: dict[str, Any], resolved: dict[str, Any], support: RopeSupport, head_dim: int
) -> list[str]:
    """Problems of the rotary fields, which begin with a dot. Every field of every type is checked.

    Args:
        fields: of config.json, without nulls, with groups from `normalize`.
        resolved: fields with transformers' defaults; what it does not read is not in their
            rope_parameters.
    """
    whole = resolved[GROUPS[0]]
    groups = {name: whole[name] for name in support.layer_types if name in whole} or {"": whole}
    form = next((name for name in GROUPS[::-1] if fields.get(name)), GROUPS[0])
    places = [fields, *(fields.get(name) or {} for name in GROUPS)]
    is_default = not any(places[1:])  # the range too is transformers' default
    has_range = (
        is_default or "max_position_embeddings" in fields or any(ORIGINAL in x for x in places)
    )
    problems = []
    for layer_type, group in groups.items():
        place = f".{form}.{layer_type}".rstrip(".") if form == GROUPS[0] else f".{form}"
        size = head_dim
        if layer_type == FULL_ATTENTION:  # Gemma 4
            size = fields.get("global_head_dim", head_dim)
        found = find_group_problems(group, support, head_dim=size, has_range=has_range)
        if layer_type and group.get("truncate") is False:
            found.append(
                "truncate = false: is not implemented in the group of a layer type, where "
                "transformers ignores it. Leave it out."
            )
        for problem in found:
            is_beside = problem.partition(" =")[0] in fields
            problems.append(f".{problem}" if is_beside else f"{place}.{problem}")
    if problems:
        return problems
    main = groups.get(FULL_ATTENTION, whole)
    given = []  # names, values and what transformers reads
    for name in OUTSIDE_FIELDS:
        group = groups.get(SLIDING_ATTENTION, {}) if name == _LOCAL_THETA else main
        read = group.get("rope_theta" if name == _LOCAL_THETA else name)
        is_own = name in support.outside_fields
        is_unused = (name == PARTIAL and fields.get(name) == 1) or (
            name == ORIGINAL and is_own and read is None  # by the type default (Phi-4)
        )
        if name in fields and not is_unused:
            given.append((name, fields[name], read if is_own else None))
    for form in GROUPS:
        own = fields.get(form) or {}
        own_groups = own if is_nested(own, support) else {form: own}
        for layer_type, group in own_groups.items():
            place = form if group is own else f"{form}.{layer_type}"
            read = main if group is own else groups.get(layer_type, {})
            if not isinstance(group, dict):
                given.append((place, group, None))
                continue
            names = [x for x in group if x not in _IGNORED[1:] and (x, group[x]) != (PARTIAL, 1)]
            given += [(f"{place}.{name}", group[name], read.get(name)) for name in names]
    return [
        f".{name} = {format_value(value)}: transformers does not read it, or reads "
        f"{format_value(read)} instead. Leave it out, or correct it."
        for name, value, read in given
        if value != read
    ]


def find_group_problems(
    group: Mapping[str, Any],
    support: RopeSupport,
    *,
    head_dim: int | None = None,
    has_range: bool = True,
) -> list[str]:
    """Problems of one group, which begin with the names of its fields.

    Args: has_range: True if the model's range or its original one is known.
    """
    type_name, *others = [group[name] for name in _TYPE_FIELDS if name in group] or ["default"]
    if type_name not in support.types or others not in ([], [type_name]):
        return [
            f"rope_type = {errors.format_choices([type_name, *others])}: is not implemented for "
            f"this model_type. Use {errors.format_choices(support.types)}."
        ]
    problems = []
    rope_type = TYPES[type_name]
    known = {*rope_type.fields, *_IGNORED, *support.extra_fields}
    if PARTIAL not in support.outside_fields and not rope_type.is_proportional:
        known.remove(PARTIAL)
    group = {name: value for name, value in group.items() if value is not None}
    for name, value in group.items():
        if name not in known and not (name == PARTIAL and value == 1):
            hint = errors.did_you_mean(str(name), known) or " Leave it out."
            problems.append(
                f"{name} = {format_value(value)}: is not implemented for rope_type {type_name} "
                f"of this model_type.{hint}"
            )
        elif problem := json_values.find_problem(_RULES, name, value):
            problems.append(problem)
    problems += [
        f"{name}: missing. Take it from the config.json of a published model with this type."
        for name in (*rope_type.required, *support.required_fields)
        if name not in group
    ]
    if rope_type.needs_range and not has_range:
        problems.append(
            f"rope_type = {type_name}: needs the number of positions that the model was trained "
            "for. Set max_position_embeddings."
        )
    if problems:
        return problems
    if rope_type.ordered:
        small, large = rope_type.ordered
        low, high = ({"beta_slow": 1, "beta_fast": 32, **group}[name] for name in (small, large))
        if low >= high:
            problems.append(f"{small} = {low}: must be below {large}, which is {high}.")
    if head_dim is None:
        return problems
    rotated = int(head_dim * group.get(PARTIAL, 1))
    if rotated % 2 or rotated == 0:
        problems.append(
            f"{PARTIAL} = {group.get(PARTIAL, 1)}: gives "
            f"{rotated} of {head_dim} elements of a head; it must be an even number from 2."
        )
    problems += [
        f"{name}: has {len(group[name])} numbers, but {rotated} elements of a head are "
        f"rotated in pairs. Give {rotated // 2} numbers."
        for name in ("short_factor", "long_factor")
        if name in group and len(group[name]) != rotated // 2
    ]
    return problems
