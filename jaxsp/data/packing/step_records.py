"""Arrays and counts of one step."""

import dataclasses

import numpy as np

from jaxsp.core.batch import Pairs
from jaxsp.data.packing.packing import PackedRows

BlockSpan = tuple[tuple[int, int], ...]
"""Begin and end of a block of a global array, per dim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Counts of a step over the whole mesh, computed from the packing plan only."""

    rows: PackedRows
    """The step's rows and their segments, in the order of `places`."""
    places: np.ndarray
    """[microbatches, B]: number in `rows` of each row of the batch."""
    num_rows: int
    """Number of rows with at least one segment."""
    epoch: int | None
    """Epoch of the step's last row, from 0; None if sources are mixed by weight."""
    tokens_per_source: tuple[int, ...]
    documents_P2: np.ndarray
    """Documents of each pair of the step, in the order of `Batch.pairs`; -1 for one that is in
    another step, which only evaluations have. Empty without pairs."""
    imbalance: float
    """Attention work of the slowest devices over the mean: see `balance.compute_imbalance`."""

    @property
    def segment_lengths(self) -> np.ndarray:
        """Tokens of each segment."""
        return self.rows.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBatch:
    """Blocks of a step for this process's devices, by Batch field and span.

    A block that several devices hold is there once.
    """

    blocks: dict[str, dict[BlockSpan, np.ndarray]]
    pairs: Pairs | None
    """Pairs of the step, as arrays of the host."""
    counts: StepCounts
