"""Which pieces of which documents lie in which row, planned from the lengths alone.

Four documents of 5, 3, 11 and 2 tokens in rows of 8 (a letter is a token, a dot is padding):

    document 0   a a a a a
    document 1   b b b
    document 2   c c c c c c c c | c c c      longer than a row: a piece of 8 and a piece of 3
    document 3   d d

    row 0        c c c c c c c c
    row 1        d d c c c . . .
    row 2        a a a a a b b b

is the plan  document    2 | 3 2 | 0 1
             first       0 | 0 8 | 0 0      the piece's first token within its document
             length      8 | 2 3 | 5 3
             row_starts  0   1     3     5   row r is the entries from row_starts[r] to row_starts[r + 1]
"""

import bisect
import dataclasses
import functools
import threading

import numpy as np

_PLAN_CACHE_SIZE = 4

_NUM_PACKINGS = 4
"""Epochs that are packed anew. Each later one has the rows of one of them in another order, so that
the rows of any number of epochs are counted after four plans (1.6 s each for a million documents)."""

FULL_FRACTION = 0.99
"""Share of the tokens that rows can hold from which on they count as full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRow:
    """The pieces of one row, one after another from its first token."""

    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Where in the row each piece begins."""
        return np.cumsum(self.length) - self.length


EMPTY_ROW = PackedRow(
    document=np.zeros(0, np.int32), offset=np.zeros(0, np.int32), length=np.zeros(0, np.int32)
)
"""A row of padding, for the places of a run's last step that no row is left for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """A plan: every piece once, by rows."""

    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    row_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def row(self, index: int) -> PackedRow:
        """The pieces of one row."""
        part = slice(self.row_starts[index], self.row_starts[index + 1])
        return PackedRow(
            document=self.document[part], offset=self.offset[part], length=self.length[part]
        )


def plan_rows(
    lengths: np.ndarray, *, row_tokens: int, max_segments: int, seed: int | tuple[int, ...]
) -> PackingPlan:
    """All documents of these lengths, packed into rows: best fit in random order, then the rows in random order.

    Source: best fit as in TRL's `bfd`, without the decreasing order: under a cap on pieces that leaves rows of only
        short documents (91 % full at 64 pieces, against 99.9 %).
    """
    random = np.random.default_rng(seed)
    document, first, length = _split_documents(lengths, row_tokens)
    order = random.permutation(len(length))
    if len(length) * row_tokens <= length.sum() * max_segments / 4:
        # Pieces of more than half a row need a row each in any case. When they open theirs first, shorter ones fill what they
        # leave: lengths drawn evenly from all up to a row fill 99.8 % instead of 99.5 %. Not where the cap is nearer: short
        # pieces would run out of rows to go to.
        order = order[np.argsort(length[order] <= row_tokens // 2, kind="stable")]
    row_of_piece = _best_fit(length[order], row_tokens, max_segments)
    num_rows = int(row_of_piece.max(initial=-1)) + 1
    row_of_piece = random.permutation(num_rows)[row_of_piece]
    by_row = order[np.argsort(row_of_piece, kind="stable")]
    document, first, length = (
        pieces[by_row].astype(np.int32) for pieces in (document, first, length)
    )
    row_starts = np.concatenate([[0], np.cumsum(np.bincount(row_of_piece, minlength=num_rows))])
    return PackingPlan(document=document, offset=first, length=length, row_starts=row_starts)


class PackedEpochs:
    """The endless sequence of rows of some documents, epoch after epoch, each in a new order. Thread-safe.

    Args: documents: which these are, where they are but some of all; the rows name them so.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        row_tokens: int,
        max_segments: int,
        seed: int,
        documents: np.ndarray | None = None,
    ):
        assert lengths.sum() > 0, "no document, no row"

        @functools.lru_cache(_PLAN_CACHE_SIZE)
        def packed(epoch: int) -> PackingPlan:
            rows = plan_rows(
                lengths, row_tokens=row_tokens, max_segments=max_segments, seed=(seed, epoch)
            )
            return (
                rows
                if documents is None
                else dataclasses.replace(rows, document=documents[rows.document])
            )

        @functools.lru_cache(_PLAN_CACHE_SIZE)
        def planned(epoch: int) -> PackingPlan:
            rows = packed(epoch % _NUM_PACKINGS)
            return rows if epoch < _NUM_PACKINGS else _shuffle_rows(rows, seed=(seed, epoch))

        self._plan_epoch = planned
        self._row_tokens, self._max_segments = row_tokens, max_segments
        self.num_tokens = int(lengths.sum())
        """Of one epoch."""
        self._epoch_ends = [0]
        self._lock = threading.RLock()

    def count_rows(self, epochs: int) -> int:
        """Rows of the first `epochs` epochs. Packs those that were not packed yet."""
        with self._lock:
            while len(self._epoch_ends) <= min(epochs, _NUM_PACKINGS):
                self._epoch_ends.append(
                    self._epoch_ends[-1] + len(self._plan_epoch(len(self._epoch_ends) - 1))
                )
            cycles, rest = divmod(epochs, _NUM_PACKINGS)
            return (cycles * self._epoch_ends[_NUM_PACKINGS] if cycles else 0) + self._epoch_ends[
                rest
            ]

    def suggest_limits(self) -> "PackingAdvice | None":
        """What would fill the rows of the first epoch, if they stay empty because of the cap on pieces."""
        return suggest_limits(
            self._plan_epoch(0), row_tokens=self._row_tokens, max_segments=self._max_segments
        )

    def find_epoch(self, index: int) -> int:
        """The epoch, from 0, of the row that comes after `index` others since step 0."""
        with self._lock:
            while self._epoch_ends[-1] <= index and len(self._epoch_ends) <= _NUM_PACKINGS:
                self.count_rows(len(self._epoch_ends))
            cycles, rest = (
                divmod(index, self._epoch_ends[-1])
                if len(self._epoch_ends) > _NUM_PACKINGS
                else (0, index)
            )
            return cycles * _NUM_PACKINGS + bisect.bisect_right(self._epoch_ends, rest) - 1

    def row(self, index: int) -> PackedRow:
        """The row that comes after `index` others since step 0."""
        with self._lock:
            epoch = self.find_epoch(index)
            return self._plan_epoch(epoch).row(index - self.count_rows(epoch))


def _shuffle_rows(rows: PackingPlan, *, seed: tuple[int, ...]) -> PackingPlan:
    """The same rows in another random order."""
    order = np.random.default_rng(seed).permutation(len(rows))
    num_pieces = np.diff(rows.row_starts)[order]
    row_starts = np.concatenate([[0], np.cumsum(num_pieces)])
    pieces = np.repeat(rows.row_starts[order] - row_starts[:-1], num_pieces) + np.arange(
        len(rows.document)
    )
    return PackingPlan(
        document=rows.document[pieces],
        offset=rows.offset[pieces],
        length=rows.length[pieces],
        row_starts=row_starts,
    )


def _split_documents(
    lengths: np.ndarray, row_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Document, first token and length of every piece; only the last piece of a document is shorter than a row."""
    num_pieces = -(-lengths // row_tokens)
    document = np.repeat(np.arange(len(lengths)), num_pieces)
    first = (
        np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    ) * row_tokens
    return document, first, np.minimum(lengths[document] - first, row_tokens)


def _best_fit(lengths: np.ndarray, row_tokens: int, max_segments: int) -> np.ndarray:
    """The row of each piece: the one with the least space that is enough, or a new one."""
    # Spaces are sorted and each stands once, so that a million rows left half empty are found as fast as ten
    spaces: list[int] = []
    rows_with: dict[int, list[int]] = {}
    num_pieces: list[int] = []
    row_of_piece = []
    for length in lengths.tolist():
        place = bisect.bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del rows_with[space], spaces[place]
        else:
            space, row = row_tokens, len(num_pieces)
            num_pieces.append(0)
        row_of_piece.append(row)
        num_pieces[row] += 1
        left = space - length
        if left and num_pieces[row] < max_segments:
            if left not in rows_with:
                rows_with[left] = []
                bisect.insort(spaces, left)
            rows_with[left].append(row)
    return np.array(row_of_piece, dtype=np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingAdvice:
    """What would fill rows that stay empty because they may not hold more pieces; either of the two is enough."""

    filled_fraction: float
    """Of the rows as planned: tokens over the tokens that they could hold."""
    max_segments: int
    """The cap that fills rows as long as these; a multiple of 16."""
    row_tokens: int | None
    """The longest rows that the cap as it is fills; None if no length of at least a thirty-second does."""
    num_cut: int
    """Documents that rows of `row_tokens` would cut, and rows as long as these do not."""


def suggest_limits(
    plan: PackingPlan, *, row_tokens: int, max_segments: int
) -> PackingAdvice | None:
    """What would fill the rows of a plan; None if they are FULL, or if the cap on pieces is not the main reason why not.

    Filled is FULL, or as full as without a cap where lengths allow no more. It is found by packing a part of the documents, a
    hundred thousand or a hundred rows of them, because their mean says too little: where 117 of them make a row, a cap of 128
    leaves 1 % of the rows empty if they spread like chats, and 4 % if they spread a little more (lognormal, sigma 1 and 1.5).
    """
    fullness = int(plan.length.sum()) / (max(len(plan), 1) * row_tokens)
    if (
        fullness >= FULL_FRACTION
        or len(plan) == 1
        or np.diff(plan.row_starts).max(initial=0) < max_segments
    ):
        return None
    lengths = np.bincount(plan.document, plan.length).astype(np.int64)
    lengths = np.sort(lengths[lengths > 0])
    # One of every so many, by length: drawn at random, the mean of a hundred thousand chats is off by 0.6 %
    every = max(1, min(len(lengths) // 100_000, int(lengths.sum()) // (100 * row_tokens)))
    some = lengths[every // 2 :: every]
    total = int(some.sum())

    def slots(size: int, cap: int) -> int:
        return len(plan_rows(some, row_tokens=size, max_segments=cap, seed=0)) * size

    free = plan_rows(some, row_tokens=row_tokens, max_segments=total, seed=0)
    least, capped = len(free) * row_tokens, slots(row_tokens, max_segments)
    if total < row_tokens:  # all pieces fit into one row
        return PackingAdvice(
            filled_fraction=fullness,
            max_segments=-(-len(free.length) // 16) * 16,
            row_tokens=None,
            num_cut=0,
        )
    if capped - least <= (capped - total) / 2:
        return None
    enough = max(
        least, total / (FULL_FRACTION + 0.002)
    )  # a little fuller than promised: each epoch has another plan
    mean = len(free.length) * row_tokens / enough
    # with so many `plan` takes the order, and makes the rows, that it does without a cap
    ample = max(int(np.diff(free.row_starts).max()), -(-4 * len(free.length) * row_tokens // total))
    caps = range(int(max(max_segments, mean)) // 16 * 16 + 16, ample + 16, 16)
    cap = bisect.bisect_left(caps, True, key=lambda cap: slots(row_tokens, cap) <= enough)
    step = 2 ** max(0, (row_tokens // 32).bit_length() - 1)
    sizes = range((row_tokens - 1) // step * step, 0, -step)
    size = bisect.bisect_left(sizes, True, key=lambda size: slots(size, max_segments) <= enough)
    shorter = sizes[size] if size < len(sizes) else None
    cut = 0 if shorter is None else int(np.sum((lengths > shorter) & (lengths <= row_tokens)))
    return PackingAdvice(
        filled_fraction=fullness, max_segments=caps[cap], row_tokens=shorter, num_cut=cut
    )
