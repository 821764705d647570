"""Which rows come when: sources take turns by weight, and rows of several lengths step by step.

Rows of two sources a and b, of which a is to give 3 tokens of 4, and whose rows are equally full:

    a a b a a a b a a a b a ...     row j of a source stands at (j + 1/2) / share: a at 0.7, 2, 3.3 ..., b at 2, 6, 10 ...

Steps of rows of two lengths, where three quarters of all row space are rows of the first:

    0 0 1 0 | 0 1 0 0 | 1 0 0 0     step j of a length stands anywhere between j / share and (j + 1) / share, by the seed

Both orders can be cut anywhere, and go on from what was consumed of each without knowing how that was done.
"""

import bisect
import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from jaxsp.data import packing


class Stream:
    """The endless sequence of rows of one length, in which the parts take turns. Thread-safe.

    Args:
        shares: of the rows, for each part; they add up to 1.
        sources: which source each part is, where they are mixed by weight.
    """

    def __init__(
        self, parts: Sequence[packing.Epochs], shares: Sequence[float], *, row_tokens: int, sources: Sequence[int] = ()
    ):
        assert len(parts) == len(shares) > 0, "a share for each part"
        assert len(sources) in (0, len(parts)), "a source for each part"
        self.parts, self.sources, self.row_tokens = tuple(parts), tuple(sources), row_tokens
        self._shares = np.array(shares)
        self._lock = threading.Lock()
        # of the rows so far: the part, and which of the part's rows it is
        self._part, self._place = np.zeros(0, np.int16), np.zeros(0, np.int64)

    def row(self, index: int) -> packing.Row:
        """The row that comes after `index` others since step 0."""
        part, place = self._find(index)
        return self.parts[part].row(place)

    def epoch_of(self, index: int) -> int | None:
        """The epoch of a row, from 0; None where sources go at paces of their own."""
        return None if self.sources else self.parts[0].epoch_of(index)

    def rows_in(self, epochs: int) -> int:
        """Rows of the first `epochs` epochs of the only part."""
        (only,) = self.parts
        return only.rows_in(epochs)

    def num_rows(self, end: int) -> list[int]:
        """How many of the first `end` rows each part has."""
        if len(self.parts) == 1:
            return [end]
        self._find(max(end - 1, 0))
        return np.bincount(self._part[:end], minlength=len(self.parts)).tolist()

    def _find(self, index: int) -> tuple[int, int]:
        if len(self.parts) == 1:
            return 0, index
        with self._lock:
            if index >= len(self._part):
                self._part, self._place = _turns(self._shares, max(2 * index, 1024))
            return int(self._part[index]), int(self._place[index])


def _turns(shares: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of each of the first rows, and which of the part's rows it is.

    Source: divisor method of Webster (Sainte-Laguë): each part's rows are evenly spread. Of k parts, one can be ahead of its
        share of n rows by share * k / 2 + 1/2.
    """
    counts = [int(np.ceil((num_rows + len(shares)) * share)) + 1 for share in shares]
    parts = np.repeat(np.arange(len(shares), dtype=np.int16), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((places + 0.5) / shares[parts], kind="stable")[:num_rows]
    return parts[order], places[order]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rows of each step to come. Shapes: [steps]."""

    stream: np.ndarray
    """Which of the streams they are from."""
    first: np.ndarray
    """The first of them, by its number in the stream."""
    count: np.ndarray
    """How many there are; fewer than in other steps where the data ends."""
    begin: tuple[int, ...]
    """Rows of each stream consumed before."""

    def __len__(self) -> int:
        return len(self.stream)

    def consumed(self, num_steps: int) -> tuple[int, ...]:
        """Rows of each stream consumed after so many of the steps: the whole state of the data."""
        done = [np.flatnonzero(self.stream[:num_steps] == stream) for stream in range(len(self.begin))]
        return tuple(
            begin if not len(steps) else int(self.first[steps[-1]] + self.count[steps[-1]])
            for begin, steps in zip(self.begin, done, strict=True)
        )


def schedule(
    *,
    begin: Sequence[int],
    rows_per_step: Sequence[int],
    shares: Sequence[float],
    seed: int,
    num_steps: int | None = None,
    ends: Sequence[int] | None = None,
) -> Schedule:
    """The steps from where each stream begins: so many, or until each has come to its end.

    Args:
        begin, ends: rows of each stream.
        shares: of the steps, for each stream.
    """
    assert (num_steps is None) != (ends is None), "one of them says how long"
    limits = [np.iinfo(np.int64).max] * len(begin) if ends is None else list(ends)
    if len(begin) == 1:
        count = num_steps if num_steps is not None else -(-max(limits[0] - begin[0], 0) // rows_per_step[0])
        first = begin[0] + np.arange(count, dtype=np.int64) * rows_per_step[0]
        stream = np.zeros(count, np.int8)
    else:
        stream, first = _interleaved(list(begin), rows_per_step, shares, seed, num_steps, limits)
    most, limit = np.array(rows_per_step)[stream], np.array(limits)[stream]
    return Schedule(stream=stream, first=first, count=np.minimum(most, limit - first), begin=tuple(begin))


def _interleaved(
    consumed: list[int],
    rows_per_step: Sequence[int],
    shares: Sequence[float],
    seed: int,
    num_steps: int | None,
    limits: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    def due(stream: int) -> float:
        place = consumed[stream]
        anywhere = np.random.default_rng((seed, stream, place)).random()
        return (place / rows_per_step[stream] + anywhere) / shares[stream]

    waiting = sorted((due(stream), stream) for stream in range(len(consumed)) if consumed[stream] < limits[stream])
    streams: list[int] = []
    firsts: list[int] = []
    while waiting and len(streams) != num_steps:
        _, stream = waiting.pop(0)
        streams.append(stream)
        firsts.append(consumed[stream])
        consumed[stream] += rows_per_step[stream]
        if consumed[stream] < limits[stream]:
            bisect.insort(waiting, (due(stream), stream))
    return np.array(streams, np.int8), np.array(firsts, np.int64)
