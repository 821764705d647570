"""Rows have each document once, at the right length; counts are known before the first step."""

import datasets
import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.data.packing import summary
from jaxsp.data.packing.row_reader import Documents
from tests.data.packing import test_loader


def tokenized(lengths, first=0, labels=False):
    """Documents whose tokens are numbered from `first`, so that a token shows its origin."""
    tokens = []
    number = first
    for length in lengths:
        tokens.append(list(range(number, number + length)))
        number += length
    columns = {
        "tokens": tokens,
        "place": [f"a.jsonl, line {line}" for line in range(1, len(lengths) + 1)],
    }
    if labels:
        columns["labels"] = [
            [token if token % 3 else -100 for token in document] for document in tokens
        ]
    return datasets.Dataset.from_dict(columns)


def data_of(sources, config, weights=None, **fields):
    sets = []
    first = 1
    for lengths in sources:
        sets.append(tokenized(lengths, first))
        first += sum(lengths)
    names = [chr(ord("a") + number) for number in range(len(sources))]
    documents = Documents(sets, source_names=names, row_tokens=config.data.row_tokens, **fields)
    return test_loader.pack(documents, config, digests=names, source_weights=weights)


def lengths_of(count, most, seed=0):
    return np.random.default_rng(seed).integers(1, most, count).tolist()


def steps_of(data, config, mesh=(1, 2, 4), **how):
    return list(test_loader.load(data, config, mesh, **how).batches())


def taken(steps):
    """Tokens of a run's steps, in order of their numbers; 0 is padding."""
    actual = np.concatenate([np.asarray(given.tokens_BL).ravel() for given, _ in steps])
    return np.sort(actual[actual > 0])


def shares_of(steps):
    tokens = np.sum([counts.tokens_per_source for _, counts in steps], axis=0)
    return tokens / tokens.sum()


def test_sources_give_tokens_by_their_weights_whatever_their_sizes_and_lengths():
    config = test_loader.settings_of(rows_per_step=4)
    lengths = [lengths_of(300, 14), [*lengths_of(20, 60, 1), *lengths_of(40, 10, 2)], [9] * 40]
    data = data_of(lengths, config, weights=[6.0, 3.0, 1.0])
    steps = steps_of(data, config, num_steps=300)
    assert data.source_weights == pytest.approx((0.6, 0.3, 0.1))
    assert shares_of(steps) == pytest.approx([0.6, 0.3, 0.1], abs=0.01)
    assert {counts.epoch for _, counts in steps} == {None}
    lines = [
        words
        for word, words in summary.describe_data(
            data, config.data, data.make_schedule(config.batch.rows_per_step, num_steps=300)
        )
        if word == "source"
    ]
    total = sum(counts.segment_lengths.sum() for _, counts in steps)
    for line, weight, source in zip(lines, (0.6, 0.3, 0.1), data.documents.sources, strict=True):
        times = float(line.split("repeated ")[1].split()[0])
        assert times == pytest.approx(weight * total / source.num_tokens, rel=0.03)


def test_a_row_has_documents_of_one_source_where_they_have_weights():
    config = test_loader.settings_of()
    data = data_of([lengths_of(50, 20), lengths_of(50, 20, 1)], config, weights=[1.0, 1.0])
    for index in range(50):
        assert len(set(data.documents.find_sources(data.stream.row(index).document).tolist())) == 1


def test_without_weights_all_documents_are_packed_together_and_counted_by_source():
    config = test_loader.settings_of()
    data = data_of([[10] * 30, [5] * 30], config)
    steps = steps_of(data, config, epochs=1)
    assert np.sum([counts.tokens_per_source for _, counts in steps], axis=0).tolist() == [300, 150]


def test_a_source_of_which_nothing_is_left_is_no_part_of_a_mixture():
    config = test_loader.settings_of()
    with pytest.raises(UserError, match=r"data\.train\.1 \(b\): .*document"):
        data_of([[3, 4], [50, 60]], config, weights=[1.0, 1.0], long_documents="drop")


LONG = [40, 5, 33, 32, 100]


@pytest.mark.parametrize(
    ("what", "lengths", "counts"),
    [
        (
            "split",
            LONG,
            {"num_split": 3, "num_segments_without_loss": 1, "num_tokens_without_loss": 1},
        ),
        ("truncate", [32, 5, 32, 32, 32], {"num_truncated": 3, "num_tokens_truncated": 77}),
        ("drop", [5, 32], {"num_dropped": 3, "num_tokens_dropped": 173}),
    ],
)
def test_long_documents_are_counted_by_their_treatment(what, lengths, counts):
    config = test_loader.settings_of(rows_per_step=2)
    data = data_of([LONG], config, long_documents=what)
    (source,) = data.documents.sources
    assert data.documents.lengths.tolist() == lengths
    actual = {
        name: value
        for name, value in vars(source).items()
        if value and name not in ("name", "num_documents")
    }
    assert (
        actual
        == {
            "num_tokens": sum(lengths) - counts.get("num_tokens_without_loss", 0),
            "num_loss_tokens": sum(n - 1 for n in lengths),
        }
        | counts
    )
    steps = steps_of(data, config, epochs=1)
    assert len(taken(steps)) == source.num_tokens
    assert (
        sum(int(np.sum(np.asarray(given.labels_BL) != -100)) for given, _ in steps)
        == source.num_loss_tokens
    )


def test_a_truncated_document_ends_like_any_other():
    """Its last token has no next one: the label would be a token that is not there."""
    for labels in (False, True):
        stored = Documents([tokenized([40], 1, labels)], row_tokens=32, long_documents="truncate")
        row = data_of([[40]], test_loader.settings_of(), long_documents="truncate").stream.row(0)
        share = stored.read_slice(row, 0, 32)
        assert share.tokens.tolist() == list(range(1, 33))
        assert share.labels.tolist() == [
            token if token % 3 or not labels else -100 for token in range(2, 33)
        ] + [-100]
        assert stored.num_loss_tokens == np.sum(share.labels != -100)


def test_rows_of_similar_work_are_side_by_side():
    """A document of 32 tokens has the work of 1024 of one token; in random order, groups wait."""
    config = test_loader.settings_of(rows_per_step=16, max_segments=32)
    data = data_of([[32] * 40 + [16] * 80 + [1] * 1280], config)
    steps = steps_of(data, config, (1, 8, 1), epochs=1)
    for given, counts in steps:
        work = np.sort((np.asarray(given.lengths_BM).astype(int) ** 2).sum(-1), axis=1)
        assert counts.imbalance == pytest.approx(work[:, -1].sum() / work.mean(1).sum())
    feed = test_loader.load(data, config, (1, 8, 1), epochs=1)
    unsorted = [_dealt_unsorted(data, 16 * step) for step in range(len(steps) - 1)]
    assert np.mean([counts.imbalance for _, counts in steps]) < 1 + 0.5 * (np.mean(unsorted) - 1)
    assert feed.num_steps == len(steps)
    even = steps_of(data_of([[32] * 32], config), config, (1, 8, 1), epochs=1)
    assert [counts.imbalance for _, counts in even] == [1.0, 1.0]


def _dealt_unsorted(data, first):
    work = np.array(
        [
            int((data.stream.row(index).length.astype(int) ** 2).sum())
            for index in range(first, first + 16)
        ]
    ).reshape(2, 8)
    return work.max(1).sum() / work.mean(1).sum()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"epochs": 3}, "3 epochs of 7 rows (steps continue across epochs)"),
        ({"steps": 7}, "4 epochs of 7 rows (steps continue across epochs)"),
        ({"epochs": 1}, "1 epoch of 2 steps"),
        ({"steps": 1}, "0.571 epochs of 2 steps"),
        ({"epochs": 1.5}, "1.5 epochs of 7 rows (steps continue across epochs)"),
    ],
)
def test_epochs_that_end_inside_a_step_are_counted_in_rows(run, expected):
    config = test_loader.settings_of(row_tokens=16, rows_per_step=4)
    fields = {"steps": None, "epochs": None} | run
    config = config.model_copy(update={"run": config.run.model_copy(update=fields)})
    for lengths, text in (([16] * 7, expected), ([16] * 8, None)):
        data = data_of([lengths], config)
        schedule = data.make_schedule(
            config.batch.rows_per_step, num_steps=fields["steps"], epochs=fields["epochs"]
        )
        found = summary.describe_epochs(data, schedule, fields["epochs"])
        assert found == text or (text is None and found.endswith("of 2 steps"))


@pytest.mark.parametrize(
    ("epochs", "rows", "num_steps"),
    [(0.001, 4, 1), (0.07, 1, 7), (0.5, 4, 13), (1.5, 4, 38), (1.1, 10, 11), (2, 10, 20)],
)
def test_a_fraction_of_an_epoch_ends_with_a_whole_step(epochs, rows, num_steps):
    """In floating point, 0.07 epochs of 100 rows are more than seven."""
    data = data_of([[16] * 100], test_loader.settings_of(row_tokens=16))
    schedule = data.make_schedule(rows, epochs=epochs)
    assert (len(schedule), schedule.num_rows) == (num_steps, rows * num_steps)
    assert len(data.make_schedule(rows, consumed=rows, epochs=epochs)) == num_steps - 1


@pytest.mark.parametrize("rows_per_step", [2, 6])
def test_an_epoch_ends_with_the_step_that_completes_a_pass_over_the_data(rows_per_step):
    config = test_loader.settings_of(rows_per_step=rows_per_step)
    data = data_of([lengths_of(60, 60)], config)
    schedule = data.make_schedule(config.batch.rows_per_step, epochs=3)
    # one step may complete two short epochs
    expected = sorted({-(-data.stream.count_rows(epoch) // rows_per_step) for epoch in (1, 2, 3)})
    actual = [step for step in range(1, len(schedule) + 1) if data.is_epoch_end(schedule, step)]
    assert actual == expected
    assert actual[-1] == len(schedule)
    # and after a resume the same steps
    done = 3
    rest = data.make_schedule(
        config.batch.rows_per_step, consumed=schedule.rows_consumed(done), epochs=3
    )
    actual = [done + step for step in range(1, len(rest) + 1) if data.is_epoch_end(rest, step)]
    assert actual == [step for step in expected if step > done]
