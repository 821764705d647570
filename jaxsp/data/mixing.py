"""Order of rows: sources are mixed by weight, and steps take the rows in turn.

Rows of two sources a and b, where a has 3 of 4 tokens and the rows are equally full:

    a a b a a a b a a a b a ...

Row j of a source is at (j + 1/2) / fraction: a at 0.7, 2, 3.3 ..., b at 2, 6, 10 ...

The order can be cut anywhere. It continues from the number of rows that were consumed, whatever the
mesh and the rows per step were.
"""

import functools
from collections.abc import Sequence

import numpy as np

from jaxsp.data import packing
from jaxsp.data.packing import PackedEpochs, PackedRows, Segments


class RowStream:
    """Endless sequence of rows, interleaved from several parts. Thread-safe.
    Args: parts: the rows of all documents, or those of each source if sources are mixed by weight;
        fractions: fraction of the rows that each part has; they add up to 1."""

    def __init__(self, parts: Sequence[PackedEpochs], fractions: Sequence[float]):
        assert len(parts) == len(fractions) > 0, "a fraction for each part"
        self.parts = tuple(parts)
        self.row_tokens = parts[0].row_tokens
        self.max_segments = parts[0].max_segments
        self.fractions = np.array(fractions)
        self.block_rows = max(part.block_rows for part in parts)
        """Number of consecutive rows that belong together: see `PackedEpochs`."""
        self._interleave = functools.lru_cache(maxsize=2)(
            lambda num_rows: _interleave_parts(self.fractions, num_rows, self.block_rows)
        )

    def row(self, index: int) -> Segments:
        return self.rows(index, index + 1).row(0)

    def rows(self, begin: int, end: int) -> PackedRows:
        """Returns the rows `begin` to `end`."""
        if len(self.parts) == 1:
            return self.parts[0].rows(begin, end)
        # the order of the first rows is that of any longer sequence
        laid_out = self._interleave(max(1024, 1 << end.bit_length()))
        part_of_row, index_in_part = (each[begin:end] for each in laid_out)
        rows_by_part = []
        for part in np.unique(part_of_row):
            indices = index_in_part[part_of_row == part].tolist()  # consecutive
            rows_by_part.append(self.parts[part].rows(indices[0], indices[-1] + 1))
        by_part = np.argsort(part_of_row, kind="stable")
        return packing.concatenate_rows(rows_by_part).select_rows(np.argsort(by_part))

    def find_epoch(self, index: int) -> int | None:
        """The epoch of a row, from 0; None if sources are mixed by weight."""
        return None if len(self.parts) > 1 else self.parts[0].find_epoch(index)

    def count_rows(self, epochs: int) -> int:
        """Number of rows in the first `epochs` epochs of the only part."""
        (part,) = self.parts
        return part.count_rows(epochs)


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
    rows = indices[order][:, None] * block_rows + np.arange(block_rows)
    return np.repeat(parts[order], block_rows), rows.ravel()


class RowSchedule:
    """The rows of each remaining step: of `num_steps` steps, or of all until the data end.
    Args: begin_row: number of rows that were consumed before; end_row: number after which the data
        end."""

    def __init__(
        self,
        *,
        begin_row: int,
        rows_per_step: int,
        num_steps: int | None = None,
        end_row: int | None = None,
    ):
        if num_steps is None:
            assert end_row is not None, "either steps or rows limit a schedule"
            num_steps = -(-max(end_row - begin_row, 0) // rows_per_step)
        self.begin_row = begin_row
        self.rows_per_step = rows_per_step
        self.num_rows = num_steps * rows_per_step
        if end_row is not None:
            self.num_rows = min(self.num_rows, max(end_row - begin_row, 0))
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def step_rows(self, step: int) -> tuple[int, int]:
        """Returns the first row of a step, by its index in the stream, and their number."""
        first = step * self.rows_per_step
        return self.begin_row + first, min(self.rows_per_step, self.num_rows - first)

    def rows_consumed(self, num_steps: int) -> int:
        """Rows consumed after `num_steps` steps: the whole state of the data."""
        return self.begin_row + min(num_steps * self.rows_per_step, self.num_rows)
