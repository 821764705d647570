"""data.eval_fraction: held-out documents, of which none is trained on."""

import re

import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.data import dataset
from jaxsp.data.documents import Documents, digest_split, select_records
from tests.data import test_dataset, test_loader
from tests.messages import assert_names, numbers

LENGTHS = [2 + number % 7 for number in range(1000)]


def choose(lengths=LENGTHS, *, fraction=0.2, seed=0, name="a"):
    tokenized = [test_dataset.tokenized(lengths)]
    return select_records(tokenized, source_names=[name], fraction=fraction, seed=seed)[0]


def test_the_choice_depends_on_seed_name_and_index_only():
    chosen = choose()
    assert chosen.sum() == 200
    assert np.flatnonzero(chosen)[:6].tolist() == [25, 27, 32, 35, 37, 39], (
        "with every version of NumPy"
    )
    assert np.array_equal(choose([9] * 1000), chosen), "not the lengths"
    for other in (choose(seed=1), choose(name="b")):
        assert 0.1 < np.mean(other & chosen) / np.mean(chosen) < 0.3, "independent"
    assert not np.any(chosen & ~choose(fraction=0.3)), "a larger fraction contains the smaller"


def test_every_document_is_trained_on_or_held_out():
    problems = ["bad" if number % 100 == 5 else None for number in range(1000)]
    lengths = [0 if problem else length for problem, length in zip(problems, LENGTHS, strict=True)]
    lengths[1] = 0
    tokenized = test_dataset.tokenized(lengths, problem=problems)
    chosen = select_records([tokenized], source_names=["a"], fraction=0.2, seed=0)
    parts = [
        Documents(
            [tokenized], source_names=["a"], held_out=chosen, use_held_out=which, row_tokens=7
        )
        for which in (False, True)
    ]
    places = [
        {parts[k].find_origin(document)["location"] for document in range(len(parts[k].lengths))}
        for k in (0, 1)
    ]
    assert not places[0] & places[1]
    assert len(places[0] | places[1]) == np.count_nonzero(lengths)
    assert sum(int(part.lengths.sum()) for part in parts) == sum(lengths)
    (train,) = parts[0].sources
    (held,) = parts[1].sources
    assert train.num_held_out == held.num_documents
    assert (train.num_skipped, train.num_empty, held.num_skipped, held.num_empty) == (10, 1, 0, 0)
    assert train.num_long + held.num_long == sum(length > 7 for length in lengths)
    assert numbers(dataset.describe_exclusions(parts[0]))[0] == held.num_documents
    assert held.num_held_out == 0


def test_another_fraction_is_a_change_of_the_data():
    documents = Documents([test_dataset.tokenized(LENGTHS)], source_names=["a"], row_tokens=64)
    packing = test_loader.settings_of().step.packing
    data = dataset.pack_documents("train", documents, **packing, digests=["same"])
    before, now = (
        data.fingerprint(test_loader.settings_of(eval_fraction=fraction).data, seed=0)
        for fraction in (None, 0.1)
    )
    assert dataset.describe_changes(before, now) == ["data.eval_fraction = 0.1, was null"]
    assert dataset.describe_changes(before, before) == []
    assert digest_split("x", choose(), is_held_out=False) != digest_split(
        "x", choose(name="b"), is_held_out=False
    )
    nothing = np.zeros(9, bool)
    assert digest_split("x", nothing, is_held_out=False) == "x"
    assert digest_split("x", nothing, is_held_out=True) != "x"


@pytest.mark.parametrize(
    ("count", "fraction", "expected"), [(5, 0.02, 1), (5, 0.2, 1), (200, 0.05, 10), (30, 0.1, 3)]
)
def test_few_documents_are_divided_exactly(count, fraction, expected):
    assert choose([5] * count, fraction=fraction).sum() == expected


@pytest.mark.parametrize(("count", "fraction"), [(20, 0.9999), (2, 0.9999), (2, 0.6)])
def test_a_fraction_that_leaves_no_document_is_refused_with_one_that_works(count, fraction):
    with pytest.raises(
        UserError,
        match=rf"data\.eval_fraction = {fraction:g}: .*data\.train.* {count}\b",
    ) as caught:
        choose([5] * count, fraction=fraction)
    suggestion = float(re.search(r"data\.eval_fraction=(\d[\d.e-]*\d)", str(caught.value))[1])
    assert 0 < choose([5] * count, fraction=suggestion).sum() < count


def test_one_document_cannot_be_divided():
    with pytest.raises(UserError) as caught:
        choose([5, 0, 0], fraction=0.5)
    assert_names(caught.value, "data.eval", start="data.eval_fraction = 0.5: ")
    assert "data.eval_fraction=" not in str(caught.value)
