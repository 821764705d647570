"""Losses of single tokens on the host, and their sums over documents.

A program returns the loss of each token of a batch to every process: 5 bytes for each, where its
logits would be hundreds of thousands. All sums are made here, in float64, so that they are the same
on every mesh up to the rounding of single losses.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

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
