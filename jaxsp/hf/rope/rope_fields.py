"""Fields of `rope_parameters` and `rope_scaling`: types, ranges and examples."""

from jaxsp.config import json_values
from jaxsp.config.json_values import NOT_NEGATIVE, POSITIVE, SWITCH, Rule

ORIGINAL = "original_max_position_embeddings"


_THETA = Rule(lambda x: json_values.is_number(x) and x > 1, "a number above 1")
_DIVISORS = Rule(
    lambda x: isinstance(x, list) and bool(x) and all(map(POSITIVE.is_valid, x)),
    "a list of numbers above 0, one for each rotated pair",
)

RULES = {
    "rope_theta": _THETA,
    "rope_local_base_freq": _THETA,
    "partial_rotary_factor": Rule(
        lambda x: POSITIVE.is_valid(x) and x <= 1, "a number above 0, at most 1"
    ),
    "factor": Rule(lambda x: json_values.is_number(x) and x >= 1, "a number from 1"),
    ORIGINAL: Rule(lambda x: json_values.is_integer(x) and x > 1, "a whole number from 2"),
    "truncate": SWITCH,
    "mscale": NOT_NEGATIVE,
    "mscale_all_dim": NOT_NEGATIVE,
    "llama_4_scaling_beta": NOT_NEGATIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "attention_factor": POSITIVE,
    "short_factor": _DIVISORS,
    "long_factor": _DIVISORS,
}

_LLAMA3_EXAMPLE = "Llama 3.1 has factor 8, 1 and 4, and 8192 positions."
_LONGROPE_EXAMPLE = "It is a list with a number for each rotated pair of a head's elements."

EXAMPLES = {
    "factor": "Llama 3.1 has 8 with llama3, and Gemma 3 has 8 with linear.",
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", ORIGINAL), _LLAMA3_EXAMPLE),
    **dict.fromkeys(("short_factor", "long_factor"), _LONGROPE_EXAMPLE),
    "llama_4_scaling_beta": "Ministral 3 has 0.1.",
}
"""Examples of required fields."""
