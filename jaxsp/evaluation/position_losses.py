"""Loss by position in the document: a model that uses its context has a loss that falls with it.

Positions are in buckets that double: 0 to 127, 128 to 255, 256 to 511, ... Far buckets have tokens
of long documents only, which may be easier or harder ones. So a bucket is also compared with the
one before it over the same documents: those that fill both.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxsp.evaluation.token_losses import TokenLosses

FIRST_BUCKET = 128
"""Tokens of the first bucket."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionFields:
    """Fields of a line of eval.jsonl, by the first position of each bucket that has tokens."""

    loss_by_position: dict[str, float | None]
    """Mean loss of tokens by their position in the document, in buckets 0 to 127, 128 to 255, 256
    to 511 and so on. Keys are the first positions. Empty with objectives of pairs."""
    token_accuracy_by_position: dict[str, float]
    """token_accuracy of the same tokens."""
    num_loss_tokens_by_position: dict[str, int]
    """Number of these tokens."""
    loss_of_filled_by_position: dict[str, float | None]
    """loss_by_position over the documents that fill the bucket."""
    loss_change_by_position: dict[str, float | None]
    """Loss in the bucket minus the loss in the one before it: mean over the documents that fill
    both and have loss tokens in both, each by the means of its tokens. It is negative if the model
    makes use of its context. Only buckets that a row holds: data.long_documents=split cuts longer
    documents, and attention does not see across a cut."""
    loss_per_doubling: float | None
    """Mean of loss_change_by_position, weighted by the number of documents. null without any, as
    with rows of fewer than 256 tokens."""


_NUM_BUCKETS = 19
"""Up to position `batch.POSITION_LIMIT`, 2**25."""

_ENDS = FIRST_BUCKET << np.arange(_NUM_BUCKETS)


def find_buckets(positions: np.ndarray) -> np.ndarray:
    """Number of the bucket of each position."""
    return np.searchsorted(_ENDS, positions, side="right")


class PositionSums:
    """Sums over the loss tokens of each document of a data set in each bucket that it reaches.

    Dims: C cells, those of a document one after another; D documents.
    """

    def __init__(self, lengths: np.ndarray, *, row_tokens: int):
        """Args: lengths: number of tokens of each document."""
        num_reached_D = find_buckets(lengths - 1) + 1
        self._first_cell_D = np.cumsum(num_reached_D) - num_reached_D
        firsts_C = np.repeat(self._first_cell_D, num_reached_D)
        self._bucket_C = np.arange(num_reached_D.sum()) - firsts_C
        self._is_in_row_C = self._bucket_C < find_buckets(np.array(row_tokens))
        self._is_filled_C = np.repeat(find_buckets(lengths), num_reached_D) > self._bucket_C
        self._losses_C = np.zeros(len(self._bucket_C))
        self._num_tokens_C = np.zeros(len(self._bucket_C), np.int64)
        self._num_correct_C = np.zeros(len(self._bucket_C), np.int64)

    def add(self, tokens: TokenLosses) -> None:
        cell_T = self._first_cell_D[tokens.document_T] + find_buckets(tokens.position_T)
        np.add.at(self._losses_C, cell_T, tokens.losses_T)
        np.add.at(self._num_tokens_C, cell_T, 1)
        np.add.at(self._num_correct_C, cell_T, tokens.is_correct_T)

    def make_fields(self) -> PositionFields:
        """Means over the tokens of each bucket that has some."""
        has_tokens_C = self._num_tokens_C > 0
        counts = self._sum_buckets(self._num_tokens_C, has_tokens_C)
        losses = self._sum_buckets(self._losses_C, has_tokens_C)
        correct = self._sum_buckets(self._num_correct_C, has_tokens_C)
        is_filled_C = has_tokens_C & self._is_filled_C
        filled_counts = self._sum_buckets(self._num_tokens_C, is_filled_C)
        filled_losses = self._sum_buckets(self._losses_C, is_filled_C)
        with np.errstate(invalid="ignore"):  # NaN from infinite losses
            mean_C = self._losses_C / np.maximum(self._num_tokens_C, 1)
            change_C = np.diff(mean_C, prepend=0)
        is_compared_C = is_filled_C & self._is_in_row_C & (self._bucket_C > 0)
        is_compared_C[1:] &= has_tokens_C[:-1]
        change_sums = self._sum_buckets(change_C, is_compared_C)
        weights = self._sum_buckets(is_compared_C.astype(np.int64), is_compared_C)
        changes = {bucket: change_sums[bucket] / weights[bucket] for bucket in weights}
        slope = None
        if changes:
            slope = np.average([*changes.values()], weights=[*weights.values()]).item()
        divide = lambda sums, counts: _name({b: sums[b] / counts[b] for b in counts})
        return PositionFields(
            loss_by_position=divide(losses, counts),
            token_accuracy_by_position=divide(correct, counts),
            num_loss_tokens_by_position=_name(counts),
            loss_of_filled_by_position=divide(filled_losses, filled_counts),
            loss_change_by_position=_name(changes),
            loss_per_doubling=None if slope is None else _or_none(slope),
        )

    def _sum_buckets(self, values_C: np.ndarray, is_chosen_C: np.ndarray) -> dict[int, Any]:
        """Sum of the values of the chosen cells of each bucket that has some."""
        bucket_C = self._bucket_C[is_chosen_C]
        sums = np.zeros(_NUM_BUCKETS + 1, values_C.dtype)
        np.add.at(sums, bucket_C, values_C[is_chosen_C])
        return {bucket: sums[bucket].item() for bucket in np.unique(bucket_C).tolist()}


def _name(values: dict[int, Any]) -> dict[str, Any]:
    """Values by the first position of their bucket."""
    return {
        str(_ENDS[bucket - 1] if bucket else 0): _or_none(value) for bucket, value in values.items()
    }


def _or_none(value: Any) -> Any:
    """The number, or None if it is not finite, as for an undefined number in a file."""
    return value if math.isfinite(value) else None
