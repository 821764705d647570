"""Tokenized documents as they are stored: chunks of Arrow files that are mapped into memory."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.data.ingest import record_cache

if TYPE_CHECKING:
    import datasets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Documents that are stored together; document d begins at tokens[starts[d]]."""

    starts: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    """Targets of the tokens before: the tokens themselves unless the records have labels."""
    weights: np.ndarray | None
    """Weight of the loss of predicting each token."""

    def num_loss_tokens(self, indices: np.ndarray, lengths: np.ndarray) -> int:
        """Number of loss tokens in the first `lengths` tokens of some documents.

        A document's first token is never a target.
        """
        if self.labels is self.tokens:
            return int((lengths - 1).sum())
        num_before = np.concatenate([[0], np.cumsum(self.labels != NO_LABEL, dtype=np.int32)])
        starts = self.starts[indices]
        return int((num_before[starts + lengths] - num_before[starts + 1]).sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkSelection:
    """Documents of a chunk that are used."""

    chunk: Chunk
    first_record: int
    """Index of the chunk's first record in its dataset."""
    is_in_split: np.ndarray
    """True for documents of this split: held out for evaluation, or not."""
    indices: np.ndarray
    """Indices of the used documents in the chunk."""
    lengths: np.ndarray
    """Number of tokens that are used of each of them."""


def select_documents(
    dataset: "datasets.Dataset",
    *,
    is_in_split: np.ndarray | None,
    longest_row: int | None,
    long_documents: str,
) -> list[ChunkSelection]:
    """Returns the chunks of a dataset with the documents that are used.

    Args:
        is_in_split: for each record, True if it belongs to this split; None: all do.
        longest_row: tokens of the longest row; None: documents have any length.
        long_documents: data.long_documents.
    """
    selections = []
    first_record = 0
    for chunk in _read_chunks(dataset):
        records = slice(first_record, first_record + len(chunk.lengths))
        if is_in_split is None:
            is_chosen = np.ones(len(chunk.lengths), bool)
        else:
            is_chosen = is_in_split[records]
        lengths = chunk.lengths
        if longest_row is not None:
            lengths = _used_lengths(lengths, longest_row, long_documents)
        lengths = np.where(is_chosen, lengths, 0)
        indices = np.flatnonzero(lengths)
        selections.append(
            ChunkSelection(
                chunk=chunk,
                first_record=first_record,
                is_in_split=is_chosen,
                indices=indices,
                lengths=lengths[indices],
            )
        )
        first_record = records.stop
    return selections


def _read_chunks(dataset: "datasets.Dataset") -> list[Chunk]:
    tokens = list(record_cache.read_lists(dataset, "tokens"))
    labels = tokens
    if "labels" in dataset.column_names:
        labels = list(record_cache.read_lists(dataset, "labels"))
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(tokens, labels, strict=True)), (
        "a label for each token"
    )
    weights: list[np.ndarray] | list[None] = [None] * len(tokens)
    if "weights" in dataset.column_names:
        weights = [values for _, values in record_cache.read_lists(dataset, "weights")]
    return [
        Chunk(
            starts=offsets[:-1],
            lengths=np.diff(offsets),
            tokens=chunk_tokens,
            labels=chunk_labels,
            weights=chunk_weights,
        )
        for (offsets, chunk_tokens), (_, chunk_labels), chunk_weights in zip(
            tokens, labels, weights, strict=True
        )
    ]


def _used_lengths(lengths: np.ndarray, longest_row: int, long_documents: str) -> np.ndarray:
    """Number of tokens that are used of each document."""
    if long_documents == "truncate":
        return np.minimum(lengths, longest_row)
    if long_documents == "drop":
        return np.where(lengths > longest_row, 0, lengths)
    return lengths
