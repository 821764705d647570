"""Rows and documents beyond the model's range are described with the factor that reaches them."""

import pytest

from jaxsp.hf.rope import context_range
from tests.hf.test_rope_override import GEMMA3, LLAMA31, OLMO3, QWEN3, apply
from tests.messages import assert_names


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
