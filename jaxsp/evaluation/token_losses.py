"""Losses of single tokens on the host, and their sums over documents and positions.

A program returns the loss of each token of a batch to every process: 5 bytes for each, where its
logits would be hundreds of thousands. All sums are made here, in float64, so that they are the same
on every mesh up to the rounding of single losses.

A model that uses its context has a loss that falls with the position in the document. Positions are
in buckets that double: 0 to 127, 128 to 255, 256 to 511, ... Far buckets have tokens of long
documents only, which may be easier or harder ones. So a bucket is also compared with the one before
it over the same documents: those that fill both.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxsp.core.layout import Layout
from jaxsp.data.loader import StepCounts
from jaxsp.training.step_gradients import BatchLosses


class TokenLosses(NamedTuple):
    """The loss tokens of a batch. T: their number."""

    document_T: np.ndarray
    """Document of each token, as a number in its data set."""
    position_T: np.ndarray
    """Number of tokens of the document before it."""
    losses_T: np.ndarray
    """float64."""
    is_correct_T: np.ndarray
    """True where the label is the likeliest token."""


AddTokens = Callable[[TokenLosses], None]
"""Function that takes the loss tokens of each batch."""

_find_places = functools.lru_cache(maxsize=2)(Layout.place_of_token)


def find_tokens(losses: BatchLosses, counts: StepCounts, layout: Layout) -> TokenLosses:
    """The loss tokens of a batch, by document and position. Args: losses: arrays of the host."""
    index_T, document_T, position_T = find_places(
        counts, layout, row_tokens=losses.losses_BL.shape[-1]
    )
    outcomes_T = np.asarray(losses.outcomes_BL).ravel()[index_T]
    has_label_T = outcomes_T >= 0
    return TokenLosses(
        document_T=document_T[has_label_T],
        position_T=position_T[has_label_T],
        losses_T=np.asarray(losses.losses_BL).ravel()[index_T][has_label_T].astype(np.float64),
        is_correct_T=outcomes_T[has_label_T] > 0,
    )


def find_places(
    counts: StepCounts, layout: Layout, *, row_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Index among all places of a batch, document and position of each token of a segment."""
    rows = counts.rows
    slot_of_row = np.argsort(counts.places.ravel())
    slot_T, place_T = _expand(slot_of_row[rows.row_of_segment], rows.starts, rows.length)
    if not layout.keeps_order:
        place_T = _find_places(layout, row_tokens)[place_T]
    index_T = slot_T * row_tokens + place_T
    return index_T, *_expand(rows.document, rows.offset, rows.length)


def _expand(
    values: np.ndarray, firsts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Value of each token of some ranges, and its number: `first`, `first + 1`, ..."""
    begins = np.cumsum(lengths) - lengths
    numbers = np.arange(lengths.sum()) + np.repeat(firsts - begins, lengths)
    return np.repeat(values, lengths), numbers


class DocumentSums:
    """Sums over the loss tokens of each document of a data set. D: number of documents."""

    def __init__(self, num_documents: int):
        self.losses_D = np.zeros(num_documents)
        self.num_tokens_D = np.zeros(num_documents, np.int64)
        self.num_correct_D = np.zeros(num_documents, np.int64)

    def add(self, tokens: TokenLosses) -> None:
        np.add.at(self.losses_D, tokens.document_T, tokens.losses_T)
        np.add.at(self.num_tokens_D, tokens.document_T, 1)
        np.add.at(self.num_correct_D, tokens.document_T, tokens.is_correct_T)


class DocumentLosses:
    """Loss of every token of a data set."""

    def __init__(self, lengths: np.ndarray):
        """Args: lengths: number of tokens of each document."""
        self._firsts = np.cumsum(lengths) - lengths
        self._losses_T = np.full(int(lengths.sum()), np.nan)

    def add(self, tokens: TokenLosses) -> None:
        self._losses_T[self._firsts[tokens.document_T] + tokens.position_T] = tokens.losses_T

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        """Losses of some tokens of a document, float64; NaN without a label."""
        first = self._firsts[document] + offset
        return self._losses_T[first : first + length]


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
