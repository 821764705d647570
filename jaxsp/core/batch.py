"""The arrays that go from the data room to the training step, and what each number in them means.

One row of 8 tokens holding a document of 3 tokens (7 8 9), one of 4 (4 5 6 7) and one token of padding, M = 3:

    tokens     7  8  9  4  5  6  7  0
    labels     8  9 -1  5  6  7 -1 -1      (-1 stands for -100 here)
    positions  0  1  2  0  1  2  3  0
    starts     0  3  0                     (unused slots are (0, 0), at the end)
    lengths    3  4  0
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from jaxsp.core import axes

NO_LABEL = -100
"""A token whose next token is not learned from."""

POSITION_LIMIT = 2**25
"""Positions are below this: the longest document, in tokens, that the model has angles for (33,554,432)."""


if TYPE_CHECKING:
    Leaf = jax.Array
else:
    # JAX also makes such records of shapes, shardings and specs, so what they hold cannot be checked when they are made
    Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one step: turns, one after another, each of B rows over the whole mesh.

    Shapes: [turns, B, L] and [turns, B, M], int32. Inside the step's scan `turns` is gone, and inside shard_map B and L
        are this device's.
    Contract: labels are already the *next* token, made on whole documents before any cut; starts count from the row's
        first token, strictly increasing; a token of no piece is padding (token 0, label -100, position 0).
    """

    tokens_BL: Leaf
    labels_BL: Leaf
    positions_BL: Leaf
    starts_BM: Leaf
    lengths_BM: Leaf
    weights_BL: Leaf | None = None
    """Weight of each label's loss, float32, finite and at least 0; None: all 1. The step's loss is
    sum(weight * loss) / sum(weight) over all tokens with a label."""


PER_TOKEN = PartitionSpec(None, axes.GROUPS, axes.SEQ)
PER_ROW = PartitionSpec(None, axes.GROUPS)

SPECS = {
    "tokens_BL": PER_TOKEN,
    "labels_BL": PER_TOKEN,
    "positions_BL": PER_TOKEN,
    "starts_BM": PER_ROW,
    "lengths_BM": PER_ROW,
}
"""PartitionSpecs of the arrays [turns, B, ...] of a step; `weights_BL` is split like the labels."""


def partition_specs(batch: Batch) -> Batch:
    """PartitionSpec of each array of a batch."""
    weights = None if batch.weights_BL is None else PER_TOKEN
    return Batch(**SPECS, weights_BL=weights)  # type: ignore[arg-type]  # specs in place of arrays


def num_microbatches(*, rows_per_step: int, global_microbatch_rows: int) -> int:
    """How often a step goes through the model: each turn takes `rows_per_turn` rows over the whole mesh."""
    assert rows_per_step % global_microbatch_rows == 0, (rows_per_step, global_microbatch_rows)
    return rows_per_step // global_microbatch_rows


def step_row_index(microbatch: int, slot: int, *, num_groups: int, rows_per_microbatch: int) -> int:
    """Which row of the step lies in `slot` of a turn's B rows.

    Rows are dealt to the groups in turn: row i goes to group i % num_groups, as its (i // num_groups)-th row. Slot
    b of group g is slot g * rows_per_microbatch + b of the turn, because B is split over the groups in contiguous blocks.
    """
    group, place = divmod(slot, rows_per_microbatch)
    return (microbatch * rows_per_microbatch + place) * num_groups + group
