"""Rows have each document once, at the right length; counts are known before the first step."""

import re

import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.core.layout import Layout
from jaxsp.data import dataset, packing, store
from jaxsp.data.documents import Documents, digest_split, select_records
from tests.data import test_dataset, test_loader
from tests.messages import assert_names, assert_refused, numbers


def tokenized(lengths, first=0, labels=False, **columns):
    """Documents whose tokens are numbered from `first`, so that a token shows its origin."""
    tokens = []
    number = first
    for length in lengths:
        tokens.append(list(range(number, number + length)))
        number += length
    columns |= {
        "tokens": tokens,
        "place": [f"a.jsonl, line {line}" for line in range(1, len(lengths) + 1)],
    }
    if labels:
        columns["labels"] = [
            [token if token % 3 else -100 for token in document] for document in tokens
        ]
    return store.from_columns(columns)


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
        for word, words in dataset.describe_data(
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
            {"num_long": 3, "num_tokens_without_loss": 1},
        ),
        ("truncate", [32, 5, 32, 32, 32], {"num_long": 3, "num_tokens_cut": 77}),
        ("drop", [5, 32], {"num_long": 3, "num_tokens_cut": 173}),
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


@pytest.mark.parametrize("what", ["split", "truncate", "drop"])
def test_segments_without_a_loss_token_are_left_out_and_counted(what):
    """The oracle reads each document's labels one by one."""
    config = test_loader.settings_of(rows_per_step=4)
    row_tokens = config.data.row_tokens
    random = np.random.default_rng(0)
    tokens = [random.integers(1, 1000, length) for length in [*lengths_of(60, 150), 1, 2, 64, 65]]
    labels = [np.where(random.random(len(ids)) < 0.03, ids, -100) for ids in tokens]
    expected = []
    counts = {"num_without_loss": 0, "num_tokens_without_loss": 0}
    for record, document in enumerate(labels):
        used = len(document)
        if what == "truncate":
            used = min(used, row_tokens)
        if what == "drop" and used > row_tokens:
            continue
        kept = []
        for offset in range(0, used, row_tokens):
            length = min(row_tokens, used - offset)
            targets = [k + 1 for k in range(offset, offset + length) if k + 1 < used]
            if any(document[target] != -100 for target in targets):
                kept.append((record, offset, length))
            else:
                counts["num_tokens_without_loss"] += length
        if not kept:
            counts["num_without_loss"] += 1
        expected += kept
    columns = {"tokens": tokens, "labels": labels, "place": list("x" * len(tokens))}
    documents = Documents(
        [store.from_columns(columns)],
        source_names=["a"],
        row_tokens=row_tokens,
        long_documents=what,
    )
    actual = [
        (documents.find_origin(int(document))["record_index"], offset, length)
        for document, offset, length in zip(*vars(documents.segments).values(), strict=True)
    ]
    assert actual == expected
    (source,) = documents.sources
    assert {name: getattr(source, name) for name in counts} == counts
    assert min(counts.values()) > 0 or what != "split"
    data = test_loader.pack(documents, config)
    assert source.num_tokens == sum(length for *_, length in expected)
    steps = steps_of(data, config, epochs=1)
    assert sum(int(each.segment_lengths.sum()) for _, each in steps) == source.num_tokens
    num_labels = sum(int(np.sum(np.asarray(given.labels_BL) != -100)) for given, _ in steps)
    assert num_labels == source.num_loss_tokens > 0
    lines = dict(
        dataset.describe_data(
            data, config.data, data.make_schedule(config.batch.rows_per_step, epochs=1)
        )
    )
    assert numbers(lines["data"])[:3] == [source.num_documents, len(expected), source.num_tokens]
    assert set(counts.values()) - {0} <= set(numbers(lines[""]))


@pytest.mark.parametrize("what", ["truncate", "drop"])
def test_data_that_loses_its_labels_to_short_rows_names_row_tokens(what):
    columns = {"tokens": [[1] * 50, [1] * 40], "labels": [[-100] * 40 + [1] * 10, [-100] * 40]}
    chats = store.from_columns(columns)
    with assert_refused(f"data.long_documents = {what}", "32", "data.row_tokens", "50"):
        Documents([chats], row_tokens=32, long_documents=what)
    assert Documents([chats], row_tokens=50, long_documents=what).num_loss_tokens == 10
    assert Documents([chats], row_tokens=32, long_documents="split").num_loss_tokens == 10


def test_a_truncated_document_ends_like_any_other():
    """Its last token has no next one: the label would be a token that is not there."""
    for labels in (False, True):
        stored = Documents([tokenized([40], 1, labels)], row_tokens=32, long_documents="truncate")
        row = data_of([[40]], test_loader.settings_of(), long_documents="truncate").stream.row(0)
        share = stored.read_slice(row, 0, 32)
        assert share["tokens"].tolist() == list(range(1, 33))
        assert share["labels"].tolist() == [
            token if token % 3 or not labels else -100 for token in range(2, 33)
        ] + [-100]
        assert stored.num_loss_tokens == np.sum(share["labels"] != -100)


def test_a_long_document_may_be_an_error():
    with pytest.raises(UserError) as raised:
        Documents([tokenized(LONG)], row_tokens=32, long_documents="error")
    (lines,) = raised.value.problems
    assert_names(lines, "a.jsonl, line 1", "40", "32", "3", start="data.long_documents = error: ")
    assert_names(lines, "split", "truncate", "drop", "data.row_tokens", "100")


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


def test_every_count_is_printed_before_the_first_step():
    config = test_loader.settings_of(row_tokens=64, rows_per_step=2)
    bad = {"tokens": [[]] * 2, "place": ["line 1", "line 2"], "problem": ["x", "y"]}
    sets = [tokenized([10, 70, 0, 3]), tokenized([5]), store.from_columns(bad)]
    documents = Documents(sets, source_names=["a", "b", "c"], row_tokens=64)
    data = test_loader.pack(documents, config, digests=["x"] * 3)
    schedule = data.make_schedule(config.batch.rows_per_step, epochs=1)
    counts, exclusions, skipped, *lines = dataset.describe_data(data, config.data, schedule)
    assert numbers(counts[1]) == [4, 5, 88, 84, 2, 68.75]
    assert numbers(exclusions[1]) == [1, 2, 1]
    assert_names(exclusions[1], "split", "empty", "skipped")
    assert skipped == ("skipped", "line 1: x")
    assert [numbers(line) for _, line in lines] == [[3, 83], [1, 5], [0, 0]]


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
        found = dataset.describe_epochs(data, schedule, fields["epochs"])
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


def test_a_fraction_of_an_epoch_ends_at_the_latest_with_its_epoch():
    data = data_of([[16] * 7], test_loader.settings_of(row_tokens=16, rows_per_step=4))
    assert [data.make_schedule(4, epochs=epochs).num_rows for epochs in (0.5, 0.9)] == [4, 7]


def test_long_documents_changes_nothing_if_no_document_is_long():
    config = test_loader.settings_of()
    fingerprints = [
        data_of([lengths], config, long_documents=what).fingerprint(
            test_loader.settings_of(long_documents=what).data, seed=0
        )
        for lengths in ([3, 32], [3, 33])
        for what in ("split", "truncate")
    ]
    assert dataset.describe_changes(fingerprints[0], fingerprints[1]) == []
    for before, now in [(0, 2), (2, 0), (0, 3), (3, 0)]:
        lines = dataset.describe_changes(fingerprints[before], fingerprints[now])
        assert not any("long_documents" in line for line in lines), "the documents changed"
    assert (
        dataset.describe_changes(fingerprints[2], fingerprints[3])[0]
        == "data.long_documents = truncate, was split"
    )


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


def test_the_end_of_an_epoch_plans_no_epoch_that_never_comes(monkeypatch):
    planned = []
    plan = packing.plan_rows
    monkeypatch.setattr(
        packing,
        "plan_rows",
        lambda *given, seed, **how: planned.append(seed) or plan(*given, seed=seed, **how),
    )
    config = test_loader.settings_of(rows_per_step=1)
    data = data_of([[32] * 4], config)
    schedule = data.make_schedule(config.batch.rows_per_step, epochs=2)
    assert [step for step in range(1, 9) if data.is_epoch_end(schedule, step)] == [4, 8]
    assert sorted(set(planned)) == [(0, 0), (0, 1)]


def test_a_limit_that_leaves_rows_empty_is_named():
    for lengths, has_note in (([16] * 800, True), ([120] * 80, False), ([600] * 20, False)):
        config = test_loader.settings_of(row_tokens=1024, max_segments=8)
        data = data_of([lengths], config)
        schedule = data.make_schedule(config.batch.rows_per_step, epochs=1)
        lines = dict(dataset.describe_data(data, config.data, schedule))
        assert ("data.max_segments_per_row" in lines.get("note", "")) == has_note


def test_changes_of_the_data_are_named():
    config = test_loader.settings_of()
    data = data_of([[3, 4], [5]], config)
    before = data.fingerprint(config.data, seed=config.run.seed)
    assert (
        dataset.describe_changes(before, data.fingerprint(config.data, seed=config.run.seed)) == []
    )
    other = test_loader.settings_of(row_tokens=64, max_segments=6)
    (tokens, slots) = dataset.describe_changes(
        before, data.fingerprint(other.data, seed=other.run.seed)
    )
    assert_names(tokens, "32", start="data.row_tokens = 64")
    assert_names(slots, "5", start="data.max_segments_per_row = 6")
    longer = data_of([[3, 4], [6, 2]], config)
    renamed = {**longer.fingerprint(config.data, seed=config.run.seed)}
    renamed["sources"] = [
        {**renamed["sources"][0], "name": "x"},
        {**renamed["sources"][1], "digest": "new"},
    ]
    (tokens,) = dataset.describe_changes(before, renamed)
    assert_names(tokens, "2", "1", "8", "5", start="data.train.1 (b)")
    (count,) = dataset.describe_changes(
        before, data_of([[3]], config).fingerprint(config.data, seed=config.run.seed)
    )
    assert_names(count, "1", "2", start="data.train ")
    weighted = data_of([[3, 4], [5]], config, weights=[1.0, 3.0]).fingerprint(
        config.data, seed=config.run.seed
    )
    (weights,) = dataset.describe_changes(before, weighted)
    assert_names(weights, "weights", "data.train = [0.25, 0.75]", "None")


def test_the_imbalance_of_a_ring_is_that_of_its_steps():
    """A row of 32 tokens on 2 devices of 2 chunks each: one has chunks 0 and 3, one 1 and 2."""
    config = test_loader.settings_of(rows_per_step=1)
    data = data_of([[8, 24]], config)
    layout = Layout(degree=2, chunks_per_device=2)
    schedule = data.make_schedule(config.batch.rows_per_step, epochs=1)
    loader = data.make_loader(
        schedule, test_loader.rows_on(config, 1, 1, 2, layout=layout, has_ring_steps=True)
    )
    ((_, counts),) = list(loader.batches())
    # A document of 24 and one of 8 tokens, the longer first: chunks 0 to 2 are of one document.
    # Own keys: 64 + 64 and 64 + 64 + 2 * 64; others': 0 and 2 * (64 + 64)
    assert counts.imbalance == pytest.approx((256 + 256) / (192 + 128))


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
