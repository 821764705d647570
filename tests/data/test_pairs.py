"""Pairs of documents: both in one row, or in two rows that stay together; used as a whole."""

import functools

import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data import packing, store
from jaxsp.data.documents import Documents
from jaxsp.data.packing import PackedEpochs
from tests.data import test_loader

ROW = 32


def make_records(lengths, *, prompt=1, **columns):
    """Records of two documents whose tokens are unique; the first tokens are a prompt."""
    ends = np.cumsum(np.ravel(lengths))
    tokens = [
        np.arange(end - length, end) for end, length in zip(ends, np.ravel(lengths), strict=True)
    ]
    labels = [np.where(np.arange(len(ids)) < prompt, NO_LABEL, ids) for ids in tokens]
    join = lambda arrays: [np.concatenate(arrays[n : n + 2]) for n in range(0, len(arrays), 2)]
    places = [f"line {number}" for number in range(len(lengths))]
    first_tokens = np.int32([first for first, _ in lengths])
    columns |= {"tokens": join(tokens), "labels": join(labels)}
    return store.from_columns(columns | {"place": places, "first_tokens": first_tokens})


def draw_lengths(count, most, seed=0):
    return np.random.default_rng(seed).integers(2, most, (count, 2)).tolist()


def make_epochs(lengths, *, max_segments=6, seed=0):
    documents = Documents([make_records(lengths)], row_tokens=ROW)
    return PackedEpochs(
        documents.segments, row_tokens=ROW, max_segments=max_segments, seed=seed, per_record=2
    )


@pytest.mark.parametrize("most", [ROW // 2, ROW + 1])
def test_each_pair_is_in_one_row_or_in_two_that_stay_together(most):
    lengths = draw_lengths(60, most)
    epochs = make_epochs(lengths)
    split = {pair for pair, (first, second) in enumerate(lengths) if first + second > ROW}
    assert epochs.num_split_pairs == len(split)
    assert bool(split) == (most > ROW)
    num_rows = epochs.count_rows(6)
    rows_of_document = [[] for _ in range(120)]
    for number in range(num_rows):
        row = epochs.row(number)
        assert row.length.sum() <= ROW
        assert len(row.length) <= 6
        for document in row.document.tolist():
            rows_of_document[document].append(number)
    for pair in range(60):
        first, second = rows_of_document[2 * pair : 2 * pair + 2]
        assert len(first) == 6, "once in each epoch"
        if pair in split:
            assert [place // 2 for place in first] == [place // 2 for place in second]
            assert first != second
        else:
            assert first == second
    assert num_rows % 2 == 0 or not split


def test_rows_of_split_pairs_are_filled_with_other_pairs():
    lengths = [[20, 20]] * 8 + [[5, 6]] * 16
    plan = packing.plan_rows(
        Documents([make_records(lengths)], row_tokens=ROW).segments,
        row_tokens=ROW,
        max_segments=6,
        seed=0,
        per_record=2,
    )
    assert len(plan) == 16, "each row has a document of 20 tokens and a pair of 11"


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_the_rows_of_a_pair_are_in_one_step_and_one_even_microbatch(mesh):
    settings = test_loader.settings_of(rows_per_step=8, rows_per_microbatch=2 // mesh[1])
    documents = Documents([make_records(draw_lengths(60, ROW + 1))], row_tokens=ROW)
    data = test_loader.pack(documents, settings)
    assert data.num_split_pairs > 10
    loader = test_loader.load(data, settings, mesh, epochs=1)
    seen = []
    for step in range(loader.num_steps):
        batch = loader.read_step(step)
        numbers = np.concatenate(
            [block.reshape(len(block), -1) for block in batch.blocks["documents_BM"].values()],
            axis=1,
        )
        for microbatch in numbers:
            real = np.sort(microbatch[microbatch >= 0])
            first = np.unique(real[::2])
            assert np.array_equal(np.unique(real), np.sort(np.append(first, first + 1)))
            assert not (first % 2).any()
        seen += batch.counts.documents_P2.tolist()
    assert sorted(seen) == [[2 * pair, 2 * pair + 1] for pair in range(60)]


def test_a_mixture_keeps_the_rows_of_pairs_together():
    settings = test_loader.settings_of(rows_per_step=8)
    sources = [make_records(draw_lengths(30, ROW + 1, seed)) for seed in range(2)]
    documents = Documents(sources, source_names=["a", "b"], row_tokens=ROW)
    data = test_loader.pack(documents, settings, digests=["x", "y"], source_weights=[2.0, 1.0])
    rows = data.stream.rows(0, 80)
    block = rows.row_of_segment // 2
    for document in np.unique(rows.document // 2):
        places = block[rows.document // 2 == document]
        values, counts = np.unique(places, return_counts=True)
        assert (counts == 2).all(), (document, values)


def test_a_record_is_left_out_as_a_whole():
    lengths = [[8, 9], [40, 5], [9, 40], [6, 7], [1, 9]]
    records = make_records(lengths)
    dropped = Documents([records], row_tokens=ROW, long_documents="drop")
    assert dropped.lengths.tolist() == [8, 9, 6, 7], "a document of one token has no loss"
    (counts,) = dropped.sources
    assert (counts.num_long, counts.num_without_loss) == (4, 2)
    truncated = Documents([records], row_tokens=ROW, long_documents="truncate")
    assert truncated.lengths.tolist() == [8, 9, 32, 5, 9, 32, 6, 7]


def test_a_prompt_that_fills_the_row_leaves_nothing_to_compare():
    records = make_records([[40, 36], [33, 34]], prompt=32)
    with pytest.raises(UserError, match="leaves no token with a loss"):
        Documents([records], row_tokens=ROW, long_documents="truncate")


def test_documents_of_pairs_are_not_split():
    with pytest.raises(UserError, match=r"line 1 has 40 tokens.*Use truncate or drop") as caught:
        Documents([make_records([[8, 9], [9, 40]])], row_tokens=ROW)
    assert "long_documents = split" in str(caught.value)


def test_held_out_records_and_origins_count_records():
    records = make_records([[8, 9], [6, 7], [5, 4]])
    mask = np.array([False, True, False])
    training = Documents([records], row_tokens=ROW, held_out=[mask])
    held_out = Documents([records], row_tokens=ROW, held_out=[mask], use_held_out=True)
    assert training.lengths.tolist() == [8, 9, 5, 4]
    assert held_out.lengths.tolist() == [6, 7]
    origins = [training.find_origin(document) for document in range(4)]
    assert [origin["record_index"] for origin in origins] == [0, 0, 2, 2]
    assert origins[3]["location"] == "line 2"


def test_a_reward_model_scores_the_last_token_of_each_document():
    documents = Documents([make_records([[5, 4]])], row_tokens=ROW, has_scores=True)
    row = documents.segments
    labels = np.concatenate(
        [documents.read_slice(row, begin, begin + 3)["labels"] for begin in range(0, 12, 3)]
    )
    assert np.flatnonzero(labels == 0).tolist() == [4, 8]
    assert (labels != 0).sum() == (labels == NO_LABEL).sum()
    assert documents.num_loss_tokens == 2


def test_references_are_given_to_all_records_or_to_none():
    make = functools.partial(make_records, [[5, 4], [3, 3]])
    columns = {"first_reference": [-1.0, -3.0], "second_reference": [-2.0, -4.0]}
    assert Documents([make(**columns)]).references.tolist() == [-1, -2, -3, -4]
    unknown = {name: [np.nan, np.nan] for name in columns}
    assert Documents([make(**unknown)]).references is None
    columns["first_reference"][1] = np.nan
    columns["second_reference"][1] = np.nan
    with pytest.raises(UserError, match="1 of 2 records have ref_chosen_logps"):
        Documents([make(**columns)])


def read_counts(data, settings):
    """Counts of each step of an epoch."""
    loader = test_loader.load(data, settings, epochs=1)
    return [loader.read_step(step).counts for step in range(loader.num_steps)]


def test_an_evaluation_with_an_odd_number_of_rows_reads_all_of_them():
    settings = test_loader.settings_of(rows_per_step=3)
    lengths = [[31, 31], [17, 18], [18, 16], [31, 30], [3, 4]] * 3
    documents = Documents([make_records(lengths)], row_tokens=ROW)
    data = test_loader.pack(documents, settings)
    seen = np.concatenate([counts.documents_P2.ravel() for counts in read_counts(data, settings)])
    assert np.sort(seen[seen >= 0]).tolist() == list(range(len(documents.lengths)))


def test_a_pair_of_two_epochs_in_one_block_is_two_pairs():
    """A source with a single row repeats its pair in both rows of a block."""
    settings = test_loader.settings_of(rows_per_step=8)
    sources = [make_records([[3, 4]]), make_records([[20, 20]] * 12)]
    documents = Documents(sources, source_names=["a", "b"], row_tokens=ROW)
    data = test_loader.pack(documents, settings, digests=["x", "y"], source_weights=[1.0, 1.0])
    loader = test_loader.load(data, settings, num_steps=4)
    for step in range(4):
        counts = loader.read_step(step).counts
        assert (counts.documents_P2 >= 0).all()
        assert counts.documents_P2.size == len(counts.segment_lengths)


def test_after_a_change_of_the_data_steps_have_whole_pairs():
    settings = test_loader.settings_of(rows_per_step=4)
    documents = Documents([make_records([[20, 20]] * 12)], row_tokens=ROW)
    data = test_loader.pack(documents, settings)
    loader = test_loader.load(data, settings, consumed=3, num_steps=3)
    for step in range(3):
        assert (loader.read_step(step).counts.documents_P2 >= 0).all()
