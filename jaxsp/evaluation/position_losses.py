"""Loss by position in the document: a model that uses its context has a loss that falls with it.

Positions are in buckets that double: 0 to 127, 128 to 255, 256 to 511, ... Far buckets have tokens
of long documents only, which may be easier or harder ones. So a bucket is also compared with the
one before it over the same documents: those that fill both.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxsp.evaluation.token_losses import TokenLosses

FIRST_BUCKET = 128
"""Tokens of the first bucket."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionFields:
    """Fields of a line of eval.jsonl, by the first position of each bucket that has tokens."""

    loss_by_position: dict[str, float]
    """Mean loss of tokens by their position in the document, in buckets 0 to 127, 128 to 255, 256
    to 511 and so on. Keys are the first positions. Empty with an objective other than sft."""
    token_accuracy_by_position: dict[str, float]
    """token_accuracy of the same tokens."""
    num_loss_tokens_by_position: dict[str, int]
    """Number of these tokens."""
    loss_of_filled_by_position: dict[str, float]
    """loss_by_position over the documents that fill the bucket."""
    loss_change_by_position: dict[str, float]
    """Loss in the bucket minus the loss in the one before it, over the documents that fill both. It
    is negative if the model makes use of its context."""
    loss_per_doubling: float | None
    """Mean of loss_change_by_position, weighted by the documents that fill the bucket. null if none
    fills two."""


_NUM_BUCKETS = 19
"""Up to position `batch.POSITION_LIMIT`, 2**25."""

_ENDS = FIRST_BUCKET << np.arange(_NUM_BUCKETS)
"""End of each bucket."""


def find_buckets(positions: np.ndarray) -> np.ndarray:
    """Number of the bucket of each position."""
    return np.searchsorted(_ENDS, positions, side="right")


class PositionSums:
    """Sums over the loss tokens of a data set by bucket, for documents that fill as many buckets.

    Dims: P buckets, F number of buckets that a document fills.
    """

    def __init__(self, lengths: np.ndarray):
        """Starts at 0. Args: lengths: number of tokens of each document."""
        self._num_filled_D = find_buckets(lengths)
        self._documents_F = np.bincount(self._num_filled_D, minlength=_NUM_BUCKETS + 1)
        shape = (_NUM_BUCKETS, _NUM_BUCKETS + 1)
        self._losses_PF = np.zeros(shape)
        self._num_tokens_PF = np.zeros(shape, np.int64)
        self._num_correct_PF = np.zeros(shape, np.int64)

    def add(self, tokens: TokenLosses) -> None:
        """Adds the tokens of a batch."""
        shape = self._losses_PF.shape
        cell_T = np.ravel_multi_index(
            (find_buckets(tokens.position_T), self._num_filled_D[tokens.document_T]), shape
        )
        count = functools.partial(np.bincount, minlength=self._losses_PF.size)
        self._losses_PF += count(cell_T, tokens.losses_T).reshape(shape)
        self._num_tokens_PF += count(cell_T).reshape(shape)
        self._num_correct_PF += count(cell_T[tokens.is_correct_T]).reshape(shape)

    def make_fields(self) -> "PositionFields":
        """Means over the tokens of each bucket that has some."""
        all_documents = self._select(lambda bucket: slice(None))
        filled = self._select(lambda bucket: slice(bucket + 1, None))
        before = self._select(lambda bucket: slice(bucket + 2, None))
        changes = {
            bucket: filled[bucket].loss - before[bucket - 1].loss
            for bucket in filled
            if bucket - 1 in before
        }
        weights = [self._documents_F[bucket + 1 :].sum() for bucket in changes]
        slope = np.average(list(changes.values()), weights=weights) if changes else None
        return PositionFields(
            loss_by_position=_name({b: mean.loss for b, mean in all_documents.items()}),
            token_accuracy_by_position=_name(
                {b: mean.num_correct / mean.num_tokens for b, mean in all_documents.items()}
            ),
            num_loss_tokens_by_position=_name(
                {b: mean.num_tokens for b, mean in all_documents.items()}
            ),
            loss_of_filled_by_position=_name({b: mean.loss for b, mean in filled.items()}),
            loss_change_by_position=_name(changes),
            loss_per_doubling=None if slope is None else float(slope),
        )

    def _select(self, choose: Callable[[int], slice]) -> dict[int, "_Bucket"]:
        """Sums of the buckets that have tokens, over the documents that `choose` selects."""
        buckets = {}
        for bucket in range(_NUM_BUCKETS):
            cells = (bucket, choose(bucket))
            num_tokens = int(self._num_tokens_PF[cells].sum())
            if num_tokens:
                loss = float(self._losses_PF[cells].sum()) / num_tokens
                buckets[bucket] = _Bucket(loss, int(self._num_correct_PF[cells].sum()), num_tokens)
        return buckets


class _Bucket(NamedTuple):
    loss: float
    num_correct: int
    num_tokens: int


def _name(values: dict[int, Any]) -> dict[str, Any]:
    """Values by the first position of their bucket."""
    return {str(_ENDS[bucket - 1] if bucket else 0): value for bucket, value in values.items()}
