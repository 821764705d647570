"""Order of rows and steps: sources are mixed by weight, and steps alternate between row lengths.

Rows of two sources a and b, where a has 3 of 4 tokens and the rows are equally full:

    a a b a a a b a a a b a ...

Row j of a source is at (j + 1/2) / fraction: a at 0.7, 2, 3.3 ..., b at 2, 6, 10 ...

Steps with rows of two lengths, where the first length has three quarters of all row space:

    0 0 1 0 | 0 1 0 0 | 1 0 0 0

Step j of a length is at a place between j / fraction and (j + 1) / fraction that the seed decides.

Both orders can be cut anywhere. They continue from the number of rows that were consumed of each
part, whatever the mesh and the rows per step were.
"""

import bisect
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxsp.core.errors import UserError
from jaxsp.data.packing import packing
from jaxsp.data.packing.packing import PackedEpochs, PackedRows, Segments


class RowStream:
    """Endless sequence of rows of one length, interleaved from several parts. Thread-safe.

    Args:
        fractions: fraction of the rows that each part has; they add up to 1.
        sources: source of each part, if sources are mixed by weight.
    """

    def __init__(
        self,
        parts: Sequence[PackedEpochs],
        fractions: Sequence[float],
        *,
        row_tokens: int,
        sources: Sequence[int] = (),
    ):
        assert len(parts) == len(fractions) > 0, "a fraction for each part"
        assert len(sources) in (0, len(parts)), "a source for each part"
        self.parts = tuple(parts)
        self.sources = tuple(sources)
        self.row_tokens = row_tokens
        self.fractions = np.array(fractions)
        self.block_rows = max(part.block_rows for part in parts)
        """Number of consecutive rows that belong together: see `PackedEpochs`."""
        self._lock = threading.Lock()
        # for the rows laid out so far: the part, and the index among the part's rows
        self._part_of_row = np.zeros(0, np.int16)
        self._index_in_part = np.zeros(0, np.int64)

    def row(self, index: int) -> Segments:
        return self.rows(index, index + 1).row(0)

    def rows(self, begin: int, end: int) -> PackedRows:
        """Returns the rows `begin` to `end`."""
        if len(self.parts) == 1:
            return self.parts[0].rows(begin, end)
        part_of_row, index_in_part = self._locate_rows(begin, end)
        rows_by_part = []
        for part in np.unique(part_of_row):
            indices = index_in_part[part_of_row == part].tolist()  # consecutive
            rows_by_part.append(self.parts[part].rows(indices[0], indices[-1] + 1))
        by_part = np.argsort(part_of_row, kind="stable")
        return packing.concatenate_rows(rows_by_part).select_rows(np.argsort(by_part))

    def find_epoch(self, index: int) -> int | None:
        """The epoch of a row, from 0; None if sources are mixed by weight."""
        return None if self.sources else self.parts[0].find_epoch(index)

    def count_rows(self, epochs: int) -> int:
        """Number of rows in the first `epochs` epochs of the only part."""
        (part,) = self.parts
        return part.count_rows(epochs)

    def _locate_rows(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The part of each row from `begin` to `end`, and its index among the part's rows."""
        with self._lock:
            if end > len(self._part_of_row):
                self._part_of_row, self._index_in_part = _interleave_parts(
                    self.fractions, max(2 * end, 1024), self.block_rows
                )
            return self._part_of_row[begin:end], self._index_in_part[begin:end]


def _interleave_parts(
    fractions: np.ndarray, num_rows: int, block_rows: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The part of each of the first rows, and its index among the part's rows.

    Args: block_rows: number of consecutive rows that stay together.
    Source:
        Webster's divisor method (Sainte-Laguë), which spreads each part's rows evenly. Of k parts,
        one can be ahead of its fraction of n rows by fraction * k / 2 + 1/2.
    """
    counts = [int(np.ceil((num_rows + len(fractions)) * fraction)) + 1 for fraction in fractions]
    parts = np.repeat(np.arange(len(fractions), dtype=np.int16), counts)
    indices = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((indices + 0.5) / fractions[parts], kind="stable")[:num_rows]
    if block_rows == 1:
        return parts[order], indices[order]
    rows = indices[order][:, None] * block_rows + np.arange(block_rows)
    return np.repeat(parts[order], block_rows), rows.ravel()


class StepRows(NamedTuple):
    """The rows of a step."""

    stream_index: int
    """Index of the stream that they are from."""
    first_row: int
    """Index of the first of them within the stream."""
    num_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSchedule:
    """The rows of each remaining step.

    With a single stream they follow from the step's number, so that a billion steps take no memory.
    """

    num_steps: int
    begin_rows: tuple[int, ...]
    """Number of rows of each stream that were consumed before."""
    end_rows: tuple[int, ...]
    """Number of rows of each stream after which the data ends."""
    rows_per_step: tuple[int, ...]
    """Number of rows of a step with rows of each stream."""
    stream_of_step: np.ndarray | None = None
    """The stream of each step; None if there is only one."""

    def __len__(self) -> int:
        return self.num_steps

    def step_rows(self, step: int) -> StepRows:
        stream = 0
        steps_before = step
        if self.stream_of_step is not None:
            stream = int(self.stream_of_step[step])
            steps_before = int(self._steps_before[step])
        first = self.begin_rows[stream] + steps_before * self.rows_per_step[stream]
        num_rows = min(self.rows_per_step[stream], self.end_rows[stream] - first)
        return StepRows(stream, first, num_rows)

    @functools.cached_property
    def _steps_before(self) -> np.ndarray:
        assert self.stream_of_step is not None, "there are several streams"
        before = np.zeros(self.num_steps, np.int64)
        for stream in range(len(self.begin_rows)):
            steps = np.flatnonzero(self.stream_of_step == stream)
            before[steps] = np.arange(len(steps))
        return before

    def rows_consumed(self, num_steps: int) -> tuple[int, ...]:
        """Rows of each stream consumed after `num_steps` steps: the whole state of the data."""
        if self.stream_of_step is None:
            steps = [min(num_steps, self.num_steps)]
        else:
            num_streams = len(self.begin_rows)
            steps = np.bincount(self.stream_of_step[:num_steps], minlength=num_streams).tolist()
        streams = zip(self.begin_rows, steps, self.rows_per_step, self.end_rows, strict=True)
        return tuple(
            max(begin, min(begin + count * per_step, end))
            for begin, count, per_step, end in streams
        )

    @property
    def num_rows(self) -> int:
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
    """Builds a schedule of `num_steps` steps, or until each stream has come to its end.

    Args:
        begin_rows, end_rows: number of rows of each stream.
        fractions: fraction of the steps that each stream has.
    Raises: UserError for more steps than a schedule can have.
    """
    assert (num_steps is None) != (end_rows is None), "either steps or rows limit a schedule"
    limits = [_UNLIMITED_ROWS] * len(begin_rows) if end_rows is None else list(end_rows)
    if num_steps is None:
        streams = zip(begin_rows, limits, rows_per_step, strict=True)
        num_steps = sum(-(-max(end - begin, 0) // per_step) for begin, end, per_step in streams)
    is_mixed = len(begin_rows) > 1
    max_steps = _MAX_MIXED_STEPS if is_mixed else _MAX_STEPS
    if num_steps > max_steps:
        field = "run.steps" if end_rows is None else "run.epochs"
        condition = " with rows of several lengths" if is_mixed else ""
        raise UserError(
            f"{field}: makes {num_steps:,} steps, but a run has at most {max_steps:,}{condition}. "
            "Use fewer."
        )
    stream_of_step = None
    if is_mixed:
        stream_of_step = _interleave_streams(
            list(begin_rows), rows_per_step, fractions, seed, num_steps, limits
        )
    return RowSchedule(
        num_steps=num_steps,
        begin_rows=tuple(begin_rows),
        end_rows=tuple(limits),
        rows_per_step=tuple(rows_per_step),
        stream_of_step=stream_of_step,
    )


_UNLIMITED_ROWS = 2**63 - 1

_MAX_STEPS = 10**12
"""Maximum number of steps; grain and jaxsp count their rows in 64 bits."""

_MAX_MIXED_STEPS = 10**7
"""Maximum number of steps with rows of several lengths, laid out before step 0 in 5 us each."""


def _interleave_streams(
    consumed: list[int],
    rows_per_step: Sequence[int],
    fractions: Sequence[float],
    seed: int,
    num_steps: int,
    limits: Sequence[int],
) -> np.ndarray:
    """The stream of each step."""

    def next_place(stream: int) -> float:
        row = consumed[stream]
        jitter = np.random.default_rng((seed, stream, row)).random()
        return (row / rows_per_step[stream] + jitter) / fractions[stream]

    waiting = sorted(
        (next_place(stream), stream)
        for stream in range(len(consumed))
        if consumed[stream] < limits[stream]
    )
    streams = np.zeros(num_steps, np.int8)
    for step in range(num_steps):
        _, stream = waiting.pop(0)
        streams[step] = stream
        consumed[stream] += rows_per_step[stream]
        if consumed[stream] < limits[stream]:
            bisect.insort(waiting, (next_place(stream), stream))
    return streams
