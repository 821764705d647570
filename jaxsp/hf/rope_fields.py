"""Fields of `rope_parameters` and `rope_scaling`: types, ranges and examples."""

from collections.abc import Callable
from typing import Any

from jaxsp.hf import json_values
from jaxsp.hf.json_values import format_value

ORIGINAL = "original_max_position_embeddings"

_Rule = tuple[Callable[[Any], bool], str]
"""Check of a value, and the end of the sentence `... must be`."""


def _is_positive(value: Any) -> bool:
    return json_values.is_number(value) and value > 0


def _is_divisors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_positive, value))


_POSITIVE: _Rule = (_is_positive, "a number above 0")
_NOT_NEGATIVE: _Rule = (lambda x: json_values.is_number(x) and x >= 0, "a number from 0")
_THETA: _Rule = (lambda x: json_values.is_number(x) and x > 1, "a number above 1")

_RULES: dict[str, _Rule] = {
    "rope_theta": _THETA,
    "rope_local_base_freq": _THETA,
    "partial_rotary_factor": (
        lambda x: _is_positive(x) and x <= 1,
        "a number above 0, at most 1",
    ),
    "factor": (lambda x: json_values.is_number(x) and x >= 1, "a number from 1"),
    ORIGINAL: (lambda x: json_values.is_integer(x) and x > 1, "a whole number from 2"),
    "truncate": (lambda x: isinstance(x, bool), "true or false"),
    "mscale": _NOT_NEGATIVE,
    "mscale_all_dim": _NOT_NEGATIVE,
    "llama_4_scaling_beta": _NOT_NEGATIVE,
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), _POSITIVE),
    **dict.fromkeys(
        ("short_factor", "long_factor"),
        (_is_divisors, "a list of numbers above 0, one for each rotated pair"),
    ),
}


def find_problem(name: str, value: Any) -> str | None:
    """Problem of a value of the wrong type or range, with the field's name; None if it is right."""
    is_valid, rule = _RULES.get(name, (lambda x: True, ""))
    return None if is_valid(value) else f"{name} = {format_value(value)}: must be {rule}."


_LLAMA3_EXAMPLE = "Llama 3.1 has factor 8, 1 and 4, and 8192 positions."
_LONGROPE_EXAMPLE = "It is a list with a number for each rotated pair of a head's elements."

EXAMPLES = {
    "factor": "Llama 3.1 has 8 with llama3, and Gemma 3 has 8 with linear.",
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", ORIGINAL), _LLAMA3_EXAMPLE),
    **dict.fromkeys(("short_factor", "long_factor"), _LONGROPE_EXAMPLE),
    "llama_4_scaling_beta": "Ministral 3 has 0.1.",
}
"""Examples of required fields."""

ORDERED = {
    "llama3": [("low_freq_factor", "high_freq_factor", "Llama 3.1 has 1 and 4.")],
    "yarn": [("beta_slow", "beta_fast", "The YaRN paper has 1 and 32.")],
}
"""Pairs of fields of which the first must be below the second."""

DEFAULTS = {"beta_slow": 1, "beta_fast": 32}
