"""Types of rotary position embedding: frequencies, fields, and checks of a group of fields.

To add a type: one function and one entry of `TYPES`. Angles need float64, because transformers'
float32 frequencies are off by 1e-7, which is 0.3 rad at position 5,000,000.

Sources: transformers' modeling_rope_utils.py; llama3: Llama 3.1's published code; yarn: Peng et al.
2023, arXiv:2309.00071; longrope: Ding et al. 2024, arXiv:2402.13753.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxsp.blocks.config import Rope
from jaxsp.config import json_values
from jaxsp.config.json_values import NOT_NEGATIVE, POSITIVE, SWITCH, Rule
from jaxsp.config.yaml_io import format_value
from jaxsp.core import errors
from jaxsp.core.errors import UserError

ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeInputs:
    """Everything that the frequencies of a layer depend on."""

    group: dict[str, Any]
    """Fields that `find_group_problems` accepts, with rope_type and rope_theta."""
    head_dim: int
    max_position_embeddings: int | None
    row_tokens: int | None
    """Length of the rows, by which longrope chooses its factors; None: no longer than the
    model's original range."""

    @property
    def rotated_dim(self) -> int:
        """Number of elements of each head that are rotated."""
        return count_rotated(self.head_dim, self.group)

    @property
    def original(self) -> int:
        """Number of positions that the model had before its range was extended."""
        positions = self.group.get(ORIGINAL, self.max_position_embeddings)
        assert positions is not None, "checked before"
        return positions

    @property
    def factor(self) -> float:
        """Factor of the extension."""
        given = self.group.get("factor")
        if given is not None:
            return float(given)
        assert self.max_position_embeddings is not None, "checked before"
        return self.max_position_embeddings / self.original


def count_rotated(head_dim: int, group: Mapping[str, Any]) -> int:
    """Number of elements of each head that are rotated, as in transformers."""
    return int(head_dim * group.get(PARTIAL, 1.0))


def parse(inputs: RopeInputs) -> Rope:
    """Converts one resolved group of `rope_parameters`.

    Raises: UserError if the frequencies would depend on the batch.
    """
    group = {name: value for name, value in inputs.group.items() if value is not None}
    inputs = dataclasses.replace(inputs, group=group)
    frequencies, scale, details = TYPES[group["rope_type"]].compute(inputs)
    parts = [group["rope_type"], f"theta {group['rope_theta']:,.12g}", *filter(None, [details])]
    if inputs.rotated_dim < inputs.head_dim:
        parts.append(f"{inputs.rotated_dim} of {inputs.head_dim} elements rotated")
    return Rope(
        frequencies=tuple(frequencies.tolist()), scale=float(scale), description=", ".join(parts)
    )


_Result = tuple[np.ndarray, float, str]
"""Frequencies in radians per position [pairs], factor of cosine and sine, and a description."""


def _base_frequencies(inputs: RopeInputs) -> np.ndarray:
    """Radians per position of each rotated pair, float64 [pairs].

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    dim = inputs.rotated_dim
    theta = float(inputs.group["rope_theta"])
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _linear(inputs: RopeInputs) -> _Result:
    """Positions are divided by the factor."""
    return _base_frequencies(inputs) / inputs.factor, 1.0, f"factor {inputs.factor:g}"


def _dynamic(inputs: RopeInputs) -> _Result:
    """Equals default within the model's range; beyond it, theta depends on the longest document."""
    limit = inputs.max_position_embeddings
    if limit is not None and inputs.row_tokens is not None and inputs.row_tokens > limit:
        raise UserError(
            f"is not implemented for rows of {inputs.row_tokens:,} tokens: beyond "
            f"{limit:,} positions (max_position_embeddings) the frequencies of all tokens depend "
            "on the longest document of a batch. Use model.rope={type: yarn, factor: "
            f"{format_factor(inputs.row_tokens / limit)}}}, or data.row_tokens of at most {limit}."
        )
    return _base_frequencies(inputs), 1.0, ""


def _llama3(inputs: RopeInputs) -> _Result:
    """Low frequencies are divided by the factor.

    Wavelengths above original / low_freq_factor become `factor` times longer; those below
    original / high_freq_factor stay the same. Between them, frequencies are interpolated linearly
    in original / wavelength.
    """
    frequencies = _base_frequencies(inputs)
    low = inputs.group["low_freq_factor"]
    periods = inputs.original * frequencies / (2 * np.pi)
    factor_range = inputs.group["high_freq_factor"] - low
    unscaled = np.clip((periods - low) / factor_range, 0.0, 1.0)
    scaled = frequencies * (unscaled + (1 - unscaled) / inputs.factor)
    return scaled, 1.0, _describe_extension(inputs)


def _yarn(inputs: RopeInputs) -> _Result:
    """Low frequencies are divided by the factor, and cosine and sine grow with its logarithm.

    Pairs that rotate more than beta_fast times in the original range stay the same; those that
    rotate less than beta_slow times are divided by the factor; a linear ramp lies between them.
    """
    group = inputs.group
    dim = inputs.rotated_dim

    def pair_at(rotations: float) -> float:
        """Index of the pair that rotates that often in the original range."""
        wavelength = inputs.original / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(group["rope_theta"]))

    low = pair_at(float(group.get("beta_fast", 32)))
    high = pair_at(float(group.get("beta_slow", 1)))
    if group.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)  # dim, not pairs, as in transformers
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    frequencies = _base_frequencies(inputs)
    frequencies = frequencies * (interpolated / inputs.factor + (1 - interpolated))
    return frequencies, _yarn_scale(inputs), _describe_extension(inputs)


def _yarn_scale(inputs: RopeInputs) -> float:
    """YaRN's factor of cosine and sine, called attention factor."""
    group = inputs.group
    if "attention_factor" in group:
        return float(group["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if inputs.factor <= 1 else 0.1 * weight * math.log(inputs.factor) + 1.0

    if group.get("mscale") and group.get("mscale_all_dim"):
        return mscale(float(group["mscale"])) / mscale(float(group["mscale_all_dim"]))
    return mscale(1.0)


def _longrope(inputs: RopeInputs) -> _Result:
    """Each frequency has its own divisor, from one list for short rows and one for long rows.

    transformers chooses by the longest document of a batch. Here the choice is fixed for a run, by
    the length of its rows.
    """
    group = inputs.group
    original = inputs.original
    is_long = inputs.row_tokens is not None and inputs.row_tokens > original
    scale: float | None = group.get("attention_factor")
    if scale is None:
        scale = 1.0
        if inputs.factor > 1:
            scale = math.sqrt(1 + math.log(inputs.factor) / math.log(original))
    name = "long" if is_long else "short"
    divisors = np.array(group[f"{name}_factor"], np.float64)
    relation = "above" if is_long else "of at most"
    details = f"{name} factors (for rows {relation} {original:,} tokens)"
    if group["long_factor"] == group["short_factor"]:
        details = "the same factors for all rows"
    return _base_frequencies(inputs) / divisors, scale, details


def _describe_extension(inputs: RopeInputs) -> str:
    return f"factor {inputs.factor:g} over {inputs.original:,} positions"


def format_factor(factor: float) -> str:
    """A factor for a suggestion, rounded up to three decimals."""
    return f"{math.ceil(round(factor * 1000, 6)) / 1000:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeType:
    """Entry of the registry: how a type computes frequencies, and its fields."""

    compute: Callable[[RopeInputs], _Result]
    required: tuple[str, ...] = ()
    """Fields without a default."""
    optional: tuple[str, ...] = ()
    """Fields with a default, besides those of all types."""
    extends_range: bool = False
    """True if max_position_embeddings is `factor` times the original range."""
    needs_range: bool = False
    """True if it depends on the number of positions: max_position_embeddings or the original."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields of a group, except the type."""
        return ("rope_theta", PARTIAL, *self.required, *self.optional)


TYPES = {
    "default": RopeType(compute=lambda inputs: (_base_frequencies(inputs), 1.0, "")),
    "linear": RopeType(compute=_linear, required=("factor",), extends_range=True),
    "dynamic": RopeType(compute=_dynamic, required=("factor",), needs_range=True),
    "llama3": RopeType(
        compute=_llama3, required=("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
    ),
    "yarn": RopeType(
        compute=_yarn,
        optional=(
            *("factor", ORIGINAL, "beta_fast", "beta_slow"),
            *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
        ),
        extends_range=True,
        needs_range=True,
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

    types: tuple[str, ...] = tuple(TYPES)
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


_THETA = Rule(lambda x: json_values.is_number(x) and x > 1, "a number above 1")
_DIVISORS = Rule(
    lambda x: isinstance(x, list) and bool(x) and all(map(POSITIVE.is_valid, x)),
    "a list of numbers above 0, one for each rotated pair",
)

RULES = {
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), _THETA),
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

_EXAMPLES = {
    "factor": "Llama 3.1 has 8 with llama3, and Gemma 3 has 8 with linear.",
    **dict.fromkeys(
        ("low_freq_factor", "high_freq_factor", ORIGINAL),
        "Llama 3.1 has factor 8, 1 and 4, and 8192 positions.",
    ),
    **dict.fromkeys(
        ("short_factor", "long_factor"),
        "It is a list with a number for each rotated pair of a head's elements.",
    ),
    "llama_4_scaling_beta": "Ministral 3 has 0.1.",
}
"""Examples of required fields."""

WHOLE_HEADS = "It rotates whole heads: use 1, or leave it out."

TYPE_FIELDS = ("rope_type", "type")
"""Present and former name of the type's field."""

IGNORED = (*TYPE_FIELDS, "finetuned")
"""Fields that every group may have; `finetuned` is in configs of early YaRN models."""

_ORDERED = {
    "llama3": ("low_freq_factor", "high_freq_factor", "Llama 3.1 has 1 and 4."),
    "yarn": ("beta_slow", "beta_fast", "The YaRN paper has 1 and 32."),
}
"""Two fields of a type of which the first must be below the second, and an example."""


def find_group_problems(
    group: Mapping[str, Any],
    fields: Mapping[str, Any],
    support: RopeSupport,
    outside: Mapping[str, Any],
) -> list[str]:
    """Problems of one group, which begin with the names of its fields.

    Args:
        fields: fields of the config.json.
        outside: valid fields beside the groups that belong to this one.
    """
    type_name, *others = [group[name] for name in TYPE_FIELDS if name in group] or ["default"]
    if type_name not in support.types or others not in ([], [type_name]):
        return [
            f"rope_type = {errors.format_choices([type_name, *others])}: is not implemented for "
            f"this model_type. Use {errors.format_choices(support.types)}."
        ]
    problems = []
    rope_type = TYPES[type_name]
    known = {*rope_type.fields, *IGNORED, *support.extra_fields}
    if PARTIAL not in support.outside_fields:
        known.remove(PARTIAL)
    group = {name: value for name, value in group.items() if value is not None}
    for name, value in group.items():
        if name not in known and not (name == PARTIAL and value == 1):
            hint = errors.did_you_mean(str(name), known) or " Leave it out."
            if name == PARTIAL:
                hint = f" {WHOLE_HEADS}"
            problems.append(
                f"{name} = {format_value(value)}: is not implemented for rope_type {type_name} "
                f"of this model_type.{hint}"
            )
        elif problem := json_values.find_problem(RULES, name, value):
            problems.append(problem)
    given = {**outside, **group}
    problems += [
        f"{name}: missing. {_EXAMPLES[name]}"
        for name in (*rope_type.required, *support.required_fields)
        if name not in given
    ]
    if rope_type.needs_range and not {"max_position_embeddings", ORIGINAL} & {*fields, *given}:
        problems.append(
            f"rope_type = {type_name}: needs the number of positions that the model was trained "
            "for. Set max_position_embeddings."
        )
    return problems or [*_find_relation_problems(type_name, given, fields)]


def _find_relation_problems(
    type_name: str, given: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[str]:
    """Values of a group that do not fit together, or do not fit the head's size."""
    if type_name in _ORDERED:
        small, large, example = _ORDERED[type_name]
        low, high = ({"beta_slow": 1, "beta_fast": 32, **given}[name] for name in (small, large))
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
            f"{PARTIAL} = {given.get(PARTIAL, 1)}: gives "
            f"{rotated} of {head_dim} elements of a head; it must be an even number from 2."
        )
    for name in ("short_factor", "long_factor"):
        if name in given and len(given[name]) != rotated // 2:
            yield (
                f"{name}: has {len(given[name])} numbers, but {rotated} elements of a head are "
                f"rotated in pairs. Give {rotated // 2} numbers."
            )
