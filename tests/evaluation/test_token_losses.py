"""Losses by document and position: those of a plain program, on every mesh."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL
from jaxsp.data import dataset, store
from jaxsp.data.documents import Documents
from jaxsp.evaluation import evaluator, token_losses
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.token_losses import PositionSums, TokenLosses
from tests import batches
from tests.attention.strategies import make_strategy
from tests.data import test_dataset, test_loader
from tests.evaluation import plain
from tests.training import runs

ROW_TOKENS = 256
RANDOM = np.random.default_rng(3)
LENGTHS = [5, 192, 40, 300, 64, 17, 33, 150, 191, 2, 100, 128]
"""One document is longer than a row."""
TOKENS = [RANDOM.integers(0, runs.MODEL.vocab_size, length) for length in LENGTHS]
LABELS = [np.where(RANDOM.random(len(x)) < 0.7, x, NO_LABEL) for x in TOKENS]
for labels in LABELS:
    labels[1] = 3  # each has one
CASES = {
    "2 x 4": ((1, 2, 4), {}),
    "replicas": ((2, 2, 2), {}),
    "1 x 8": ((1, 1, 8), {"strategy": make_strategy(seq=8, ulysses_degree=2, tokens="ring")}),
    "ring": ((1, 1, 4), {"strategy": make_strategy(seq=4, ulysses_degree=1, tokens="ring")}),
}
QUICK = ("2 x 4", "ring")
"""Cases of the default tier."""


def make_spec(sizes=(1, 1, 1), **how):
    spec = runs.make_spec({}, row_tokens=ROW_TOKENS, sizes=sizes)
    config = spec.config.change(rows_per_step=8, rows_per_microbatch=2)
    choice = batches.attention_choice(seq=sizes[2], **how)
    return dataclasses.replace(spec, config=config, attention=choice)


def pack(config):
    columns = {"tokens": TOKENS, "labels": LABELS, "place": [""] * len(TOKENS)}
    documents = Documents([store.from_columns(columns)], row_tokens=ROW_TOKENS)
    return dataset.pack_documents("documents", documents, **config.packing, digests=["x"])


@functools.cache
def compute_reference():
    """Document, position, loss and correctness of each loss token."""
    tokens = []
    for document, (ids, labels) in enumerate(zip(TOKENS, LABELS, strict=True)):
        for begin in range(0, len(ids), ROW_TOKENS):
            part = ids[begin : begin + ROW_TOKENS]
            log_probs_LV = plain.compute_log_probs(part, first_position=begin)
            for index in range(len(part)):
                target = begin + index + 1
                if target < len(ids) and labels[target] != NO_LABEL:
                    loss = -log_probs_LV[index, labels[target]]
                    is_correct = log_probs_LV[index].argmax() == labels[target]
                    tokens.append((document, begin + index, loss, is_correct))
    return TokenLosses(*map(np.array, zip(*tokens, strict=True)))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.e2e) for case in CASES],
)
def test_sums_by_document_and_position_are_those_of_a_plain_program(case):
    sizes, how = CASES[case]
    spec = make_spec(sizes, **how)
    data = pack(spec.config)
    master = runs.put_weights(spec.table, plain.WEIGHTS, spec.mesh)
    evaluation = Evaluator(spec, [data])
    sums = evaluation.score(data, master)
    tokens = compute_reference()
    count = functools.partial(np.bincount, tokens.document_T, minlength=len(TOKENS))
    assert sums.num_tokens_D.tolist() == count().tolist()
    assert sums.num_correct_D.tolist() == count(tokens.is_correct_T).tolist()
    np.testing.assert_allclose(sums.losses_D, count(tokens.losses_T), rtol=1e-6)
    line = evaluation.evaluate(data, master, num_steps=0)
    check_positions(line, tokens)
    assert line["loss"] == pytest.approx(sum_by_position(line) / line["num_loss_tokens"], rel=1e-12)


def sum_by_position(line):
    counts = line["num_loss_tokens_by_position"]
    return sum(line["loss_by_position"][first] * count for first, count in counts.items())


def check_positions(line, tokens):
    """Compares each number by position with its definition."""
    lengths = np.array(LENGTHS)
    means = {}
    for first, end in ((0, 128), (128, 256), (256, 512)):
        is_in = (first <= tokens.position_T) & (tokens.position_T < end)
        is_filled = is_in & (lengths[tokens.document_T] >= end)
        before = (tokens.position_T < first) & (tokens.position_T >= first // 2)
        if first == 128:
            before = tokens.position_T < 128
        before &= lengths[tokens.document_T] >= end
        means[str(first)] = [
            tokens.losses_T[chosen].mean() if chosen.any() else None
            for chosen in (is_in, is_filled, before)
        ]
        assert line["num_loss_tokens_by_position"][str(first)] == is_in.sum()
        accuracy = tokens.is_correct_T[is_in].mean()
        assert line["token_accuracy_by_position"][str(first)] == pytest.approx(accuracy)
    assert set(line["loss_by_position"]) == {"0", "128", "256"}
    filled = {first: mean for first, (_, mean, _) in means.items() if mean is not None}
    assert set(filled) == {"0", "128"}, "one document has 300 tokens"
    assert line["loss_of_filled_by_position"] == pytest.approx(filled, rel=1e-6)
    every = {first: mean for first, (mean, _, _) in means.items()}
    assert line["loss_by_position"] == pytest.approx(every, rel=1e-6)
    change = means["128"][1] - means["128"][2]
    assert line["loss_change_by_position"] == pytest.approx({"128": change}, rel=1e-4)
    assert line["loss_per_doubling"] == pytest.approx(change, rel=1e-4)


def test_only_documents_with_loss_tokens_in_both_buckets_are_compared():
    """Documents 0 and 1 have loss tokens in one bucket each, and document 2 in both."""
    sums = PositionSums(np.array([256, 256, 300]), row_tokens=300)
    document_T = np.array([0, 1, 2, 2, 2])
    position_T = np.array([5, 200, 7, 130, 131])
    losses_T = np.array([1.0, 5.0, 3.0, 2.0, 1.0])
    sums.add(TokenLosses(document_T, position_T, losses_T, losses_T > 2))
    fields = sums.make_fields()
    assert fields.loss_by_position == {"0": 2.0, "128": pytest.approx(8 / 3)}
    assert fields.loss_change_by_position == {"128": -1.5}
    assert fields.loss_per_doubling == -1.5


def test_losses_that_are_not_finite_are_undefined():
    sums = PositionSums(np.array([256]), row_tokens=256)
    position_T = np.array([5, 200])
    losses_T = np.array([1.0, np.nan])
    sums.add(TokenLosses(np.zeros(2, np.int64), position_T, losses_T, losses_T > 2))
    fields = sums.make_fields()
    assert fields.loss_by_position == {"0": 1.0, "128": None}
    assert (fields.loss_change_by_position, fields.loss_per_doubling) == ({"128": None}, None)


def test_the_mean_change_is_weighted_by_documents():
    """Losses are 8 - bucket; documents of 128, 256 and 512 tokens fill 1, 2 and 3 buckets."""
    lengths = np.array([128, 256, 512])
    document_T = np.repeat(np.arange(3), lengths)
    position_T = np.concatenate([np.arange(length) for length in lengths])
    bucket_T = token_losses.find_buckets(position_T)
    sums = PositionSums(lengths, row_tokens=512)
    losses_T = 8.0 - bucket_T**2
    sums.add(TokenLosses(document_T, position_T, losses_T, losses_T > 7))
    fields = sums.make_fields()
    assert fields.loss_by_position == {"0": 8, "128": 7, "256": 4}
    assert fields.token_accuracy_by_position == {"0": 1, "128": 0, "256": 0}
    assert fields.num_loss_tokens_by_position == {"0": 384, "128": 256, "256": 256}
    assert fields.loss_change_by_position == {"128": -1, "256": -3}
    assert fields.loss_per_doubling == pytest.approx((2 * -1 + 1 * -3) / 3)


@pytest.mark.parametrize(
    ("row_tokens", "changes"),
    [
        (255, {}),
        (1023, {"128": -1, "256": -3}),
        (1024, {"128": -1, "256": -3, "512": -5}),
    ],
)
def test_only_buckets_that_a_row_holds_are_compared(row_tokens, changes):
    """A document of 1024 tokens is cut in shorter rows, and its tokens do not see across a cut."""
    position_T = np.arange(1024)
    losses_T = 16.0 - token_losses.find_buckets(position_T) ** 2
    sums = PositionSums(np.array([1024]), row_tokens=row_tokens)
    sums.add(TokenLosses(np.zeros(1024, np.int64), position_T, losses_T, losses_T > 15))
    fields = sums.make_fields()
    assert fields.loss_by_position == {"0": 16, "128": 15, "256": 12, "512": 7}
    assert fields.loss_change_by_position == changes
    assert fields.loss_per_doubling == (sum(changes.values()) / len(changes) if changes else None)


def digest_of(lengths, row_tokens, **fields):
    config = test_loader.settings_of(row_tokens=row_tokens)
    data = test_dataset.data_of([lengths], config, **fields)
    return evaluator.identify_eval_set(data)["digest"]


def test_digest_changes_with_the_row_length_only_if_a_document_is_cut():
    assert digest_of([3, 40], 64) == digest_of([3, 40], 128)
    assert digest_of([3, 100], 64) != digest_of([3, 100], 128)
    assert digest_of([3, 100], 64) != digest_of([3, 100], 64, long_documents="drop")
    assert digest_of([3, 40], 64) != digest_of([3, 41], 64)
