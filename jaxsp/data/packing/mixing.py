"""Which rows come when: sources take turns by weight, and rows of several lengths step by step.

Rows of two sources a and b, of which a is to give 3 tokens of 4, and whose rows are equally full:

    a a b a a a b a a a b a ...     row j of a source stands at (j + 1/2) / share: a at 0.7, 2, 3.3 ..., b at 2, 6, 10 ...

Steps of rows of two lengths, where three quarters of all row space are rows of the first:

    0 0 1 0 | 0 1 0 0 | 1 0 0 0     step j of a length stands anywhere between j / share and (j + 1) / share, by the seed

Both orders can be cut anywhere, and go on from what was consumed of each without knowing how that was done.
"""

import bisect
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxsp.core.errors import UserError
from jaxsp.data.packing.packing import PackedEpochs, PackedRow


class RowStream:
    """The endless sequence of rows of one length, in which the parts take turns. Thread-safe.

    Args:
        shares: of the rows, for each part; they add up to 1.
        sources: which source each part is, where they are mixed by weight.
    """

    def __init__(
        self,
        parts: Sequence[PackedEpochs],
        fractions: Sequence[float],
        *,
        row_tokens: int,
        sources: Sequence[int] = (),
    ):
        assert len(parts) == len(fractions) > 0, "a share for each part"
        assert len(sources) in (0, len(parts)), "a source for each part"
        self.parts, self.sources, self.row_tokens = tuple(parts), tuple(sources), row_tokens
        self._fractions = np.array(fractions)
        self._lock = threading.Lock()
        # of the rows so far: the part, and which of the part's rows it is
        self._part_of_row, self._index_in_part = np.zeros(0, np.int16), np.zeros(0, np.int64)

    def row(self, index: int) -> PackedRow:
        """The row that comes after `index` others since step 0."""
        part, place = self._locate_row(index)
        return self.parts[part].row(place)

    def find_epoch(self, index: int) -> int | None:
        """The epoch of a row, from 0; None where sources go at paces of their own."""
        return None if self.sources else self.parts[0].find_epoch(index)

    def count_rows(self, epochs: int) -> int:
        """Rows of the first `epochs` epochs of the only part."""
        (only,) = self.parts
        return only.count_rows(epochs)

    def count_rows_by_part(self, end: int) -> list[int]:
        """Number of the first `end` rows that each part has; approximate to one row for large `end`."""
        if len(self.parts) == 1:
            return [end]
        if end > _MAX_COUNTED_ROWS:
            return [round(end * share) for share in self._fractions.tolist()]
        self._locate_row(max(end - 1, 0))
        return np.bincount(self._part_of_row[:end], minlength=len(self.parts)).tolist()

    def _locate_row(self, index: int) -> tuple[int, int]:
        if len(self.parts) == 1:
            return 0, index
        with self._lock:
            if index >= len(self._part_of_row):
                self._part_of_row, self._index_in_part = _interleave_parts(
                    self._fractions, max(2 * index, 1024)
                )
            return int(self._part_of_row[index]), int(self._index_in_part[index])


_MAX_COUNTED_ROWS = 10**6
"""Rows that are laid out only to count those of each part."""


def _interleave_parts(fractions: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of each of the first rows, and which of the part's rows it is.

    Source: divisor method of Webster (Sainte-Laguë): each part's rows are evenly spread. Of k parts, one can be ahead of its
        share of n rows by share * k / 2 + 1/2.
    """
    counts = [int(np.ceil((num_rows + len(fractions)) * share)) + 1 for share in fractions]
    parts = np.repeat(np.arange(len(fractions), dtype=np.int16), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((places + 0.5) / fractions[parts], kind="stable")[:num_rows]
    return parts[order], places[order]


class StepRows(NamedTuple):
    """The rows of a step."""

    stream_index: int
    """The stream they are from."""
    first_row: int
    """The first of them, by its number in the stream."""
    num_rows: int
    """Number of the rows; smaller in the last step if the data ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSchedule:
    """The rows of each step to come.

    Those of a single stream follow from the step's number, so that a billion steps take no memory.
    """

    num_steps: int
    begin_rows: tuple[int, ...]
    """Rows of each stream consumed before."""
    end_rows: tuple[int, ...]
    """Rows of each stream after which the data ends."""
    rows_per_step: tuple[int, ...]
    """Numbers of rows of each stream."""
    stream_of_step: np.ndarray | None = None
    """The stream of each step; None if there is only one."""

    def __len__(self) -> int:
        return self.num_steps

    def step_rows(self, step: int) -> StepRows:
        """Returns the rows of a step, from 0."""
        stream = 0 if self.stream_of_step is None else int(self.stream_of_step[step])
        before = step if self.stream_of_step is None else int(self._steps_before[step])
        first = self.begin_rows[stream] + before * self.rows_per_step[stream]
        return StepRows(
            stream, first, min(self.rows_per_step[stream], self.end_rows[stream] - first)
        )

    @functools.cached_property
    def _steps_before(self) -> np.ndarray:
        """Steps of the same stream before each step."""
        assert self.stream_of_step is not None, "there are several streams"
        before = np.zeros(self.num_steps, np.int64)
        for stream in range(len(self.begin_rows)):
            steps = np.flatnonzero(self.stream_of_step == stream)
            before[steps] = np.arange(len(steps))
        return before

    def rows_consumed(self, num_steps: int) -> tuple[int, ...]:
        """Rows of each stream consumed after so many of the steps: the whole state of the data."""
        if self.stream_of_step is None:
            steps = [min(num_steps, self.num_steps)]
        else:
            steps = np.bincount(
                self.stream_of_step[:num_steps], minlength=len(self.begin_rows)
            ).tolist()
        return tuple(
            max(begin, min(begin + count * per_step, end))
            for begin, count, per_step, end in zip(
                self.begin_rows, steps, self.rows_per_step, self.end_rows, strict=True
            )
        )

    @property
    def num_rows(self) -> int:
        """Rows of all steps."""
        return sum(self.rows_consumed(self.num_steps)) - sum(self.begin_rows)


def build_schedule(
    *,
    begin_rows: Sequence[int],
    rows_per_step: Sequence[int],
    fractions: Sequence[float],
    seed: int,
    num_steps: int | None = None,
    end_rows: Sequence[int] | None = None,
) -> RowSchedule:
    """The steps from where each stream begins: so many, or until each has come to its end.

    Args:
        begin, ends: rows of each stream.
        shares: of the steps, for each stream.
    Raises: UserError for more steps than can be laid out.
    """
    assert (num_steps is None) != (end_rows is None), "one of them says how long"
    limits = [_UNLIMITED_ROWS] * len(begin_rows) if end_rows is None else list(end_rows)
    steps = num_steps
    if steps is None:
        each = zip(begin_rows, limits, rows_per_step, strict=True)
        steps = sum(-(-max(end - first, 0) // per_step) for first, end, per_step in each)
    most, of_lengths = (
        (_MAX_STEPS, "")
        if len(begin_rows) == 1
        else (_MAX_MIXED_STEPS, " with rows of several lengths")
    )
    if steps > most:
        field = "run.steps" if end_rows is None else "run.epochs"
        raise UserError(
            f"{field}: makes {steps:,} steps; there can be at most {most:,}{of_lengths}. Use fewer."
        )
    stream = None
    if len(begin_rows) > 1:
        stream = _interleave_streams(
            list(begin_rows), rows_per_step, fractions, seed, steps, limits
        )
    return RowSchedule(
        num_steps=steps,
        begin_rows=tuple(begin_rows),
        end_rows=tuple(limits),
        rows_per_step=tuple(rows_per_step),
        stream_of_step=stream,
    )


_UNLIMITED_ROWS = 2**63 - 1
"""Rows of a stream that does not end."""

_MAX_STEPS = 10**12
"""Their rows are counted in 64 bits, here and in grain."""

_MAX_MIXED_STEPS = 10**7
"""Steps with rows of several lengths are laid out before the first one, in about 5 us each."""


def _interleave_streams(
    consumed: list[int],
    rows_per_step: Sequence[int],
    fractions: Sequence[float],
    seed: int,
    num_steps: int,
    limits: Sequence[int],
) -> np.ndarray:
    """The stream of each step."""

    def due(stream: int) -> float:
        place = consumed[stream]
        anywhere = np.random.default_rng((seed, stream, place)).random()
        return (place / rows_per_step[stream] + anywhere) / fractions[stream]

    waiting = sorted(
        (due(stream), stream)
        for stream in range(len(consumed))
        if consumed[stream] < limits[stream]
    )
    streams = np.zeros(num_steps, np.int8)
    for step in range(num_steps):
        _, stream = waiting.pop(0)
        streams[step] = stream
        consumed[stream] += rows_per_step[stream]
        if consumed[stream] < limits[stream]:
            bisect.insort(waiting, (due(stream), stream))
    return streams
