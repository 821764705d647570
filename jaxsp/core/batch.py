"""Batch of a training step: tokens, labels, positions and segments.

Example: one row of 8 tokens with room for M = 3 segments. It holds a segment of 3 tokens (7 8 9),
one of 4 (4 5 6 7) and one token of padding:

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

NO_LABEL = -100  # label of tokens that have no loss

POSITION_LIMIT = 2**25
"""Maximum number of tokens in a document (33,554,432): the RoPE tables end there."""


if TYPE_CHECKING:
    Leaf = jax.Array
else:
    # JAX also fills pytree classes with shapes, shardings and specs, which jaxtyping would reject
    Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of documents of one step, the same on all devices. Unused places are at the end.
    P is the largest possible number of pairs, `max_pairs`."""

    references_P2: Any
    """Log-probability of each document by the reference model, float32; 0 if none is used."""
    is_desirable_P: Any
    """Label of the records that have one; False for others."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one step, as consecutive microbatches of B rows across the whole mesh.

    Shapes: [microbatches, B, L] and [microbatches, B, M], int32. Inside the step's scan there is no
        microbatch dimension, and inside shard_map B and L are this device's.
    Contract: labels are already shifted: a token's label is the *next* token of its document. If a
        document is split into segments, labels and positions are those of the whole document.
        Starts count from the row's first token and are strictly increasing. Tokens outside all
        segments are padding (token 0, label -100, position 0).
    """

    tokens_BL: Leaf
    labels_BL: Leaf
    positions_BL: Leaf
    starts_BM: Leaf
    lengths_BM: Leaf
    weights_BL: Leaf | None = None
    """Weight of each label's loss, float32, finite and at least 0. None: all 1. The step's loss is
    sum(weight * loss) / sum(weight) over all tokens with a label."""
    numbers_BL: dict[str, Leaf] | None = None
    """Numbers of each label that the objective needs, float32 by name, and PREDICTIONS; None
    without any."""
    documents_BM: Leaf | None = None
    """Number in the step of each segment's document, int32: documents 2p and 2p + 1 are pair p of
    `pairs`; -1 for unused slots. None: no pairs."""
    pairs: Pairs | None = None
    """Pairs of the whole step, in all microbatches."""

    def without_pairs(self) -> "Batch":
        """The arrays of microbatches only."""
        return dataclasses.replace(self, pairs=None)


PREDICTIONS = "predictions"
"""Name, among the numbers of tokens, of a teacher's stored predictions, int32[..., 2 k + 1]: k ids,
and the bits of the float32 log-probabilities of these and of all other tokens together."""

PER_TOKEN = PartitionSpec(None, axes.GROUPS, axes.SEQ)
PER_ROW = PartitionSpec(None, axes.GROUPS)

SPECS = {
    "tokens_BL": PER_TOKEN,
    "labels_BL": PER_TOKEN,
    "positions_BL": PER_TOKEN,
    "starts_BM": PER_ROW,
    "lengths_BM": PER_ROW,
}
"""PartitionSpecs of a step's arrays [microbatches, B, ...] that every batch has; `weights_BL` is
sharded like labels, and `documents_BM` like starts."""


def partition_specs(batch: Batch) -> Batch:
    """Returns the PartitionSpec of each array of a batch."""
    specs: dict[str, Any] = dict(SPECS)
    if batch.weights_BL is not None:
        specs["weights_BL"] = PER_TOKEN
    if batch.numbers_BL is not None:
        specs["numbers_BL"] = dict.fromkeys(batch.numbers_BL, PER_TOKEN)
    if batch.pairs is not None:
        whole: Any = PartitionSpec()
        specs["documents_BM"] = PER_ROW
        specs["pairs"] = Pairs(references_P2=whole, is_desirable_P=whole)
    return Batch(**specs)


def max_pairs(*, rows_per_step: int, max_segments: int) -> int:
    """Largest number of pairs of a step. A row has at most one document whose partner is in
    another row. In an evaluation, that row may belong to another step."""
    return rows_per_step * ((max_segments + 1) // 2)


def step_row_index(microbatch: Any, slot: Any, *, num_groups: int, rows_per_microbatch: int) -> Any:
    """Index in the step of the row in `slot` of a microbatch's B rows; of integers or arrays.

    Rows are dealt to the groups round-robin: row i is row i // num_groups of group i % num_groups.
    Row b of group g is in slot g * rows_per_microbatch + b of its microbatch, because B is split
    over the groups in contiguous blocks.
    """
    group, group_row = divmod(slot, rows_per_microbatch)
    return (microbatch * rows_per_microbatch + group_row) * num_groups + group
