"""Every token once, in full rows, in an order that only the seed decides."""

import concurrent.futures
import time

import numpy as np
import pytest

from jaxsp.data import packing
from jaxsp.data.packing import PackedEpochs, RowSchedule, RowStream, Segments


def mixed_lengths(count, *, mean=1000, seed=0):
    spread = 1.2
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.maximum(drawn.astype(np.int64), 1)


def segments(row):
    return list(zip(row.document.tolist(), row.offset.tolist(), row.length.tolist(), strict=True))


def plan_rows(lengths, *, row_tokens, **options):
    cut = packing.split_documents(lengths, row_tokens)
    return packing.plan_rows(cut, row_tokens=row_tokens, **options)


def test_every_token_lies_in_one_row():
    lengths = np.array([5, 3, 11, 2, 8, 16, 1, 17, 40])
    plan = plan_rows(lengths, row_tokens=8, max_segments=3, seed=1)
    seen = [
        (document, first + k)
        for row in range(len(plan))
        for document, first, n in segments(plan.row(row))
        for k in range(n)
    ]
    assert sorted(seen) == [(document, k) for document, n in enumerate(lengths) for k in range(n)]
    for row in range(len(plan)):
        assert plan.row(row).length.sum() <= 8
        assert len(plan.row(row).length) <= 3
        assert plan.row(row).starts.tolist() == [
            sum(plan.row(row).length[:k]) for k in range(len(plan.row(row).length))
        ]


def test_a_document_is_put_into_the_row_with_the_least_space():
    assert packing._best_fit(np.array([5, 6, 3, 2, 1]), 8, 9).tolist() == [0, 1, 0, 1, 2]
    assert packing._best_fit(np.array([5, 6, 2, 3, 8]), 8, 9).tolist() == [0, 1, 1, 0, 2]
    assert packing._best_fit(np.array([1, 1, 1, 1, 1]), 8, 2).tolist() == [0, 0, 1, 1, 2], (
        "two segments at most"
    )


def test_only_the_seed_decides():
    lengths = mixed_lengths(500)
    one, same, other = (
        plan_rows(lengths, row_tokens=4096, max_segments=64, seed=(seed, 0)) for seed in (3, 3, 4)
    )
    assert all(
        np.array_equal(getattr(one, name), getattr(same, name))
        for name in ("document", "offset", "length", "row_starts")
    )
    assert not np.array_equal(one.document, other.document)


def test_rows_are_shuffled():
    """Best fit opens rows one after another, and the last ones are the emptiest."""
    plan = plan_rows(mixed_lengths(3000), row_tokens=8192, max_segments=64, seed=0)
    filled = np.add.reduceat(plan.length, plan.row_starts[:-1])
    emptiest = np.argsort(filled)[:20]
    assert len(plan) * 0.25 < emptiest.mean() < len(plan) * 0.75


def test_mixed_lengths_fill_the_rows():
    lengths = mixed_lengths(100_000)
    started = time.perf_counter()
    plan = plan_rows(lengths, row_tokens=32768, max_segments=64, seed=0)
    seconds = time.perf_counter() - started
    assert lengths.sum() / (len(plan) * 32768) >= 0.999
    assert seconds < 3, "1M documents in 3 s is the aim; ten times that is a wrong algorithm"


def test_rows_left_half_empty_do_not_slow_the_plan():
    # nothing fits beside them: 400,000 open rows, which took 13 s when they stood in one list
    lengths = np.random.default_rng(0).integers(16_400, 20_000, 400_000)
    started = time.perf_counter()
    plan = plan_rows(lengths, row_tokens=32768, max_segments=64, seed=0)
    assert time.perf_counter() - started < 5
    assert len(plan) == len(lengths)


def epochs(lengths=(5, 3, 11, 2, 8, 16, 1, 17, 40, 6, 6, 6, 7, 2, 3), seed=0):
    cut = packing.split_documents(np.array(lengths), 8)
    return PackedEpochs(cut, row_tokens=8, max_segments=3, seed=seed)


def test_epochs_follow_each_other_without_a_gap():
    sequence = epochs()
    expected = []
    for epoch in range(4):
        plan = plan_rows(
            np.array((5, 3, 11, 2, 8, 16, 1, 17, 40, 6, 6, 6, 7, 2, 3)),
            row_tokens=8,
            max_segments=3,
            seed=(0, epoch),
        )
        expected += [(epoch, segments(plan.row(row))) for row in range(len(plan))]
    assert [
        (sequence.find_epoch(i), segments(sequence.row(i))) for i in range(len(expected))
    ] == expected
    assert sequence.count_rows(0) == 0
    assert sequence.count_rows(4) == len(expected)
    first, second = ([row for epoch, row in expected if epoch == wanted] for wanted in (0, 1))
    assert first != second, "each epoch has a plan of its own"


def test_rows_can_be_read_in_any_order():
    straight = [segments(row) for i in range(60) for row in [epochs().row(i)]]
    jumping = epochs()
    for i in np.random.default_rng(0).permutation(60):
        assert segments(jumping.row(int(i))) == straight[i]
    # the first three epochs, each with a plan of its own
    rows = epochs().rows(7, 50).append_empty(45)
    assert [segments(rows.row(i)) for i in range(45)] == [*straight[7:50], [], []]
    starts = [start for i in range(43) for start in rows.row(i).starts.tolist()]
    assert rows.starts.tolist() == starts
    order = np.random.default_rng(0).permutation(45)
    assert [segments(rows.select_rows(order).row(k)) for k in range(45)] == [
        segments(rows.row(i)) for i in order
    ]


def test_threads_may_share_packed_epochs(monkeypatch):
    monkeypatch.setattr(packing, "_PLAN_CACHE_SIZE", 1)
    straight = epochs()
    shared = epochs()
    order = [int(i) for i in np.random.default_rng(1).permutation(100)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        actual = list(threads.map(lambda i: segments(shared.row(i)), order))
    assert actual == [segments(straight.row(i)) for i in order]


def test_many_epochs_are_counted_after_four_plans(monkeypatch):
    """Each epoch has another order; later ones have the rows of one of the first four."""
    plan = packing.plan_rows
    seeds = []
    monkeypatch.setattr(
        packing, "plan_rows", lambda *a, seed, **k: seeds.append(seed) or plan(*a, seed=seed, **k)
    )
    sequence = epochs()
    assert sequence.count_rows(1) > 0
    assert seeds == [(0, 0)]
    assert sequence.count_rows(1000) == 250 * sequence.count_rows(4)
    assert seeds == [(0, epoch) for epoch in range(4)]
    actual = []
    for epoch in range(20):
        numbers = range(sequence.count_rows(epoch), sequence.count_rows(epoch + 1))
        assert [sequence.find_epoch(number) for number in numbers] == [epoch] * len(numbers)
        actual.append([segments(sequence.row(number)) for number in numbers])
        assert sorted(map(str, actual[-1])) == sorted(map(str, actual[epoch % 4]))
    assert len({str(rows) for rows in actual}) == 20
    assert sequence.find_epoch(sequence.count_rows(10**6)) == 10**6
    assert len(seeds) == 4


def fullness(lengths, *, row_tokens, max_segments):
    plan = plan_rows(lengths, row_tokens=row_tokens, max_segments=max_segments, seed=9)
    return lengths.sum() / (len(plan) * row_tokens)


def test_segments_of_more_than_half_a_row_come_first():
    """In random order, often no short segment is left for the rest of its row."""
    lengths = np.random.default_rng(0).integers(1, 32769, 50_000)
    assert fullness(lengths, row_tokens=32768, max_segments=64) > 0.998, "0.993 in random order"


FRACTIONS = (0.55, 0.3, 0.15)


def parts(*num_rows, row_tokens=8):
    """Sources of `num_rows` full rows; the rows of source s are documents from 100 * s on."""
    return [
        PackedEpochs(
            Segments(
                document=100 * source + np.arange(count),
                offset=np.zeros(count, int),
                length=np.full(count, row_tokens),
            ),
            row_tokens=row_tokens,
            max_segments=1,
            seed=0,
        )
        for source, count in enumerate(num_rows)
    ]


def stream_of(*num_rows, shares=FRACTIONS):
    return RowStream(parts(*num_rows), shares)


def test_every_beginning_has_each_part_in_proportion():
    actual = np.array(
        [
            stream.row(index).document[0] // 100
            for stream in [stream_of(7, 5, 3)]
            for index in range(2000)
        ]
    )
    for end in range(1, 2000):
        counts = np.bincount(actual[:end], minlength=3)
        assert np.all(np.abs(counts - end * np.array(FRACTIONS)) < 1.5), end


def test_the_order_is_that_of_the_drawing():
    """The order at the top of the module; of two rows at the same place, the first comes first."""
    stream = stream_of(9, 9, shares=(0.75, 0.25))
    assert (
        "".join("ab"[stream.row(index).document[0] // 100] for index in range(12)) == "aabaaabaaaba"
    )


def test_each_part_has_its_own_rows_in_order_without_a_gap():
    stream = stream_of(7, 5, 3)
    expected = parts(7, 5, 3)
    taken = [0, 0, 0]
    for index in range(200):
        row = stream.row(index)
        part = int(row.document[0]) // 100
        assert row.document[0] == expected[part].row(taken[part]).document[0]
        taken[part] += 1


MANY = (0.9, *(0.001,) * 100)
"""The first part is up to 45 rows below its fraction: all others have a row early."""


@pytest.mark.parametrize("shares", [FRACTIONS, (0.9, *(0.01,) * 10), MANY])
def test_rows_of_a_mixture_can_be_read_in_any_order(shares):
    def stream():
        return stream_of(*(5,) * len(shares), shares=shares)

    only = stream()
    straight = [only.row(index).document[0] for index in range(5000)]
    part_of_row, index_in_part = (each[:5000] for each in only._interleave(8192))
    for part in range(len(shares)):
        places = index_in_part[part_of_row == part].tolist()
        assert places == list(range(len(places))), "each of a part's rows once, in order"
    jumping = stream()
    for index in np.random.default_rng(0).permutation(5000)[:300].tolist():
        assert jumping.row(index).document[0] == straight[index]
        assert jumping.rows(index, index + 9).document.tolist() == [
            only.row(other).document[0] for other in range(index, index + 9)
        ]


def test_one_part_is_its_own_sequence_with_epochs():
    (only,) = parts(5)
    stream = RowStream([only], [1.0])
    assert [stream.row(index).document[0] for index in range(12)] == [
        only.row(index).document[0] for index in range(12)
    ]
    assert [stream.find_epoch(index) for index in (0, 4, 5)] == [0, 0, 1]
    assert stream.count_rows(3) == 15
    assert stream_of(5, 5, 5).find_epoch(3) is None


def laid_out(schedule):
    """First row and number of rows of each step."""
    return [tuple(schedule.step_rows(step)) for step in range(len(schedule))]


@pytest.mark.parametrize("many", [{"num_steps": 5}, {"end_row": 19}])
def test_a_schedule_continues_from_the_consumed_rows(many):
    straight = RowSchedule(begin_row=1, rows_per_step=4, **many)
    for done in range(len(straight) + 1):
        rest = many if "end_row" in many else {"num_steps": 5 - done}
        begin = straight.rows_consumed(done)
        after = RowSchedule(begin_row=begin, rows_per_step=4, **rest)
        assert laid_out(after) == laid_out(straight)[done:]


def test_a_schedule_ends_with_the_last_row():
    actual = RowSchedule(begin_row=10, rows_per_step=4, end_row=19)
    assert laid_out(actual) == [(10, 4), (14, 4), (18, 1)]
    assert [actual.rows_consumed(step) for step in range(4)] == [10, 14, 18, 19]
    assert len(RowSchedule(begin_row=20, rows_per_step=4, end_row=19)) == 0


def test_a_schedule_takes_no_memory_for_its_steps():
    actual = RowSchedule(begin_row=5, rows_per_step=4, num_steps=10**9)
    assert actual.step_rows(10**9 - 1) == (5 + 4 * (10**9 - 1), 4)
    assert (actual.rows_consumed(10**9), actual.num_rows) == (5 + 4 * 10**9, 4 * 10**9)
