"""Rows of sources are mixed by weight, and steps by row length, in an order that can be cut."""

import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.data.packing import mixing, packing
from jaxsp.data.packing.mixing import RowStream
from jaxsp.data.packing.packing import PackedEpochs

FRACTIONS = (0.55, 0.3, 0.15)


def parts(*num_rows, row_tokens=8):
    """Sources of `num_rows` full rows; the rows of source s are documents from 100 * s on."""
    return [
        PackedEpochs(
            packing.split_documents(np.full(count, row_tokens), None).renumber(100 * source),
            row_tokens=row_tokens,
            max_segments=1,
            seed=0,
        )
        for source, count in enumerate(num_rows)
    ]


def stream_of(*num_rows, shares=FRACTIONS):
    return RowStream(parts(*num_rows), shares, row_tokens=8, sources=range(len(num_rows)))


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
    part_of_row, index_in_part = only._locate_rows(0, 5000)
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
    stream = RowStream([only], [1.0], row_tokens=8)
    assert [stream.row(index).document[0] for index in range(12)] == [
        only.row(index).document[0] for index in range(12)
    ]
    assert [stream.find_epoch(index) for index in (0, 4, 5)] == [0, 0, 1]
    assert stream.count_rows(3) == 15
    assert stream_of(5, 5, 5).find_epoch(3) is None


def schedule(**changed):
    fields = {
        "begin_rows": (0, 0),
        "rows_per_step": (8, 2),
        "fractions": (0.75, 0.25),
        "seed": 0,
        "num_steps": 400,
    }
    return mixing.build_schedule(**fields | changed)


def laid_out(found):
    """Stream, first row and number of rows of each step. Shapes: [steps]."""
    return (
        np.array([found.step_rows(step) for step in range(len(found))], np.int64).reshape(-1, 3).T
    )


def test_steps_of_each_length_come_in_proportion_and_in_an_order_that_the_seed_decides():
    stream, _, _ = laid_out(schedule())
    for end in range(1, 401):
        assert abs(int((stream[:end] == 1).sum()) - end / 4) < 2
    streams = stream.tolist()
    assert streams == laid_out(schedule())[0].tolist()
    assert streams != laid_out(schedule(seed=1))[0].tolist()
    assert len({tuple(streams[place : place + 4]) for place in range(0, 400, 4)}) == 4, (
        "not one pattern again and again"
    )


def test_a_stream_s_steps_follow_each_other_without_a_gap():
    streams, firsts, num_rows = laid_out(schedule())
    for stream, per_step in ((0, 8), (1, 2)):
        first = firsts[streams == stream]
        assert first.tolist() == [per_step * number for number in range(len(first))]
    assert set(num_rows.tolist()) == {8, 2}


@pytest.mark.parametrize("many", [{"num_steps": 60}, {"num_steps": None, "end_rows": (301, 33)}])
def test_a_schedule_continues_from_the_consumed_rows(many):
    straight = schedule(**many)
    for done in range(len(straight) + 1):
        rest = many if many.get("end_rows") else {"num_steps": 60 - done}
        after = schedule(**rest, begin_rows=straight.rows_consumed(done))
        np.testing.assert_array_equal(laid_out(after), laid_out(straight)[:, done:])


def test_at_the_end_of_the_data_every_row_was_there_once():
    actual = schedule(num_steps=None, end_rows=(301, 33))
    assert len(actual) == 38 + 17
    assert actual.rows_consumed(len(actual)) == (301, 33)
    assert actual.num_rows == 301 + 33
    for stream, end in ((0, 301), (1, 33)):
        steps = [
            rows
            for rows in map(actual.step_rows, range(len(actual)))
            if rows.stream_index == stream
        ]
        assert [
            index
            for rows in steps
            for index in range(rows.first_row, rows.first_row + rows.num_rows)
        ] == list(range(end))


def test_one_length_is_one_integer():
    actual = mixing.build_schedule(
        begin_rows=[10], rows_per_step=[4], fractions=[1.0], seed=0, end_rows=[19]
    )
    assert laid_out(actual).tolist() == [[0, 0, 0], [10, 14, 18], [4, 4, 1]]
    assert [actual.rows_consumed(step) for step in range(4)] == [(10,), (14,), (18,), (19,)]
    assert (
        len(
            mixing.build_schedule(
                begin_rows=[20], rows_per_step=[4], fractions=[1.0], seed=0, end_rows=[19]
            )
        )
        == 0
    )


def test_a_schedule_of_one_length_takes_no_memory_for_its_steps():
    actual = mixing.build_schedule(
        begin_rows=[5], rows_per_step=[4], fractions=[1.0], seed=0, num_steps=10**9
    )
    assert actual.step_rows(10**9 - 1) == (0, 5 + 4 * (10**9 - 1), 4)
    assert (actual.rows_consumed(10**9), actual.num_rows) == ((5 + 4 * 10**9,), 4 * 10**9)
    for fields in (
        {"begin_rows": [0], "rows_per_step": [4], "fractions": [1.0], "num_steps": 10**20},
        {"num_steps": 10**9},
    ):
        with pytest.raises(UserError, match=r"^run\.steps: .*\b1[0,]{9,} .*\b1[0,]+"):
            schedule(**fields)
