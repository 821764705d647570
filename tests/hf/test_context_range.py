"""`model.rope` changes a config.json, and its range is compared with rows and documents."""

from typing import Any

import pytest
import transformers

from jaxsp.hf import context_range
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.hf.rope import RopeSupport
from tests.messages import assert_names

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
}
QWEN3 = SIZES | {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6, "rope_scaling": None}
QWEN3 |= {"max_position_embeddings": 40960}
GEMMA3 = SIZES | {"model_type": "gemma3_text", "head_dim": 16, "rope_theta": 1e6}
GEMMA3 |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}
GEMMA3 |= {"max_position_embeddings": 131072}
OLMO3 = SIZES | {"model_type": "olmo3", "rope_theta": 5e5, "max_position_embeddings": 65536}
OLMO3 |= {
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836},
        **{"original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1},
    }
}
LLAMA31 = SIZES | {"model_type": "llama", "rope_theta": 5e5, "max_position_embeddings": 131072}
LLAMA31 |= {
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    }
}
SHORT = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
LONG = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
PHI4 = SIZES | {"model_type": "phi3", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
PHI4 |= {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
PHI4 |= {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}}
PHI4 |= {"pad_token_id": 0, "eos_token_id": 2}

PLAIN = RopeSupport()
LAYERED = RopeSupport(layer_types=("full_attention", "sliding_attention"))
PHI = RopeSupport(
    types=("default", "longrope"),
    outside_fields=("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
)


def apply(fields: dict[str, Any], support: RopeSupport = PLAIN, **model: Any) -> dict[str, Any]:
    """The changed fields; changing them again must give the same."""
    change = ModelSourceConfig.model_validate({"config": fields, **model})

    def once(fields: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in fields.items() if value is not None}
        resolved = transformers.AutoConfig.for_model(**given).to_dict()
        return context_range.apply_changes(fields, change, resolved=resolved, support=support)

    changed = once(fields)
    assert once(changed) == changed
    return changed


def test_yarn_has_the_models_range_as_its_original_one():
    changed = apply(QWEN3, rope={"type": "yarn", "factor": 3.2})
    assert changed["rope_parameters"] == {
        **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 3.2},
        "original_max_position_embeddings": 40960,
    }
    assert changed["max_position_embeddings"] == 131072
    assert not {"rope_theta", "rope_scaling"} & {*changed}
    assert changed["hidden_size"] == 64


def test_the_factor_follows_from_the_range():
    changed = apply(QWEN3, rope={"type": "yarn"}, max_position_embeddings=131072)
    assert changed["rope_parameters"]["factor"] == 3.2
    assert changed["max_position_embeddings"] == 131072
    changed = apply(QWEN3, rope={"type": "linear"}, max_position_embeddings=81920)
    assert changed["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}


def test_theta_keeps_the_type_and_the_range():
    changed = apply(LLAMA31, rope={"theta": 8e6})
    assert changed["rope_parameters"] == {**LLAMA31["rope_scaling"], "rope_theta": 8e6}
    assert changed["max_position_embeddings"] == 131072
    changed = apply(QWEN3, rope={"theta": 8e6}, max_position_embeddings=65536)
    assert changed["rope_parameters"] == {"rope_type": "default", "rope_theta": 8e6}
    assert changed["max_position_embeddings"] == 65536


def test_the_range_keeps_every_other_field():
    changed = apply(LLAMA31, max_position_embeddings=262144)
    assert changed == LLAMA31 | {"max_position_embeddings": 262144}
    assert apply(LLAMA31) is LLAMA31


def test_a_factor_changes_the_models_own_type():
    group = apply(LLAMA31, rope={"factor": 32})["rope_parameters"]
    assert group == {**LLAMA31["rope_scaling"], "rope_theta": 5e5, "factor": 32.0}


def test_layer_types_keep_their_groups_except_full_attention():
    changed = apply(OLMO3, LAYERED, rope={"type": "yarn", "factor": 16})
    groups = changed["rope_parameters"]
    assert groups["full_attention"] == {
        **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 16.0},
        "original_max_position_embeddings": 8192,
    }
    assert groups["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e5}
    assert changed["max_position_embeddings"] == 131072
    changed = apply(GEMMA3, LAYERED, rope={"type": "linear", "factor": 16})
    groups = changed["rope_parameters"]
    assert groups["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 16.0}
    assert groups["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert changed["max_position_embeddings"] == 262144
    assert "rope_local_base_freq" not in changed


def test_longrope_can_have_one_list_for_all_rows():
    changed = apply(PHI4, PHI, rope={"longrope_factors": "long"})
    assert changed["rope_parameters"] == {
        **{"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        **{"short_factor": LONG, "long_factor": LONG, "original_max_position_embeddings": 4096},
    }
    assert changed["original_max_position_embeddings"] == 4096
    assert changed["max_position_embeddings"] == 131072
    changed = apply(PHI4, PHI, rope={"type": "default"})
    assert changed["rope_parameters"] == {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    }


def describe(fields, row_tokens, longest_document=None):
    return context_range.describe_excess(
        fields, row_tokens=row_tokens, longest_document=longest_document
    )


@pytest.mark.parametrize(
    ("fields", "row_tokens", "suggestion"),
    [
        (QWEN3, 131072, "model.rope={type: yarn, factor: 3.2}"),
        (LLAMA31, 262144, "model.rope={factor: 16}"),
        (GEMMA3, 524288, "model.rope={factor: 32}"),
        (OLMO3, 131072, "model.rope={type: yarn, factor: 16}"),
    ],
)
def test_long_rows_have_a_suggestion_that_reaches_them(fields, row_tokens, suggestion):
    text = describe(fields, row_tokens)
    limit = f"{fields['max_position_embeddings']:,}"
    assert_names(text, f"{row_tokens:,}", limit, "untrained distance", suggestion)


def test_the_suggestion_reaches_them():
    changed = apply(QWEN3, rope={"type": "yarn", "factor": 3.2})
    assert describe(changed, 131072) == ""
    assert_names(describe(changed, 131073), "yarn", "3.201")


def test_tokens_of_a_document_that_is_split_see_only_their_row():
    text = describe(QWEN3, 8192, 300_000)
    assert_names(text, "longest document", "300,000", "40,960", "rows of 8,192")
    assert "model.rope" not in text


@pytest.mark.parametrize(
    ("row_tokens", "longest_document", "factor"),
    [(81920, 300_000, 2), (300_000, 81920, 2), (61440, 61440, 1.5)],
)
def test_the_suggestion_reaches_the_longest_distance_in_a_row(row_tokens, longest_document, factor):
    text = describe(QWEN3, row_tokens, longest_document)
    assert f"factor: {factor}}}" in text
