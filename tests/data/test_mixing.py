"""Rows of sources are mixed by weight, in an order that can be cut."""

import numpy as np
import pytest

from jaxsp.data.packing import PackedEpochs, RowSchedule, RowStream, Segments

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
