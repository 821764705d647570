"""Digests that decide which losses are comparable."""

from jaxsp.evaluation import evaluator
from tests.data import test_dataset, test_loader


def digest_of(lengths, row_tokens, **fields):
    config = test_loader.settings_of(row_tokens=row_tokens)
    data = test_dataset.data_of([lengths], config, **fields)
    return evaluator.identify_eval_set(data)["digest"]


def test_digest_changes_with_the_row_length_only_if_a_document_is_cut():
    assert digest_of([3, 40], 64) == digest_of([3, 40], 128)
    assert digest_of([3, 100], 64) != digest_of([3, 100], 128)
    assert digest_of([3, 100], 64) != digest_of([3, 100], 64, long_documents="drop")
    assert digest_of([3, 40], 64) != digest_of([3, 41], 64)
