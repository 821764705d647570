"""Counts of the documents of a source that are used, and of those that are not."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.data.ingest import record_cache
from jaxsp.data.ingest.formats import BARE_ANSWERS
from jaxsp.data.ingest.record_cache import RecordEntry
from jaxsp.data.packing.document_selection import Chunk, ChunkSegments

if TYPE_CHECKING:
    import datasets

_MAX_NAMED_RECORDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """Documents and tokens of one source that are used, and those that are not."""

    name: str
    num_documents: int
    num_tokens: int
    num_loss_tokens: int
    num_skipped: int
    """Bad records that are left out."""
    skipped_examples: tuple[str, ...]
    """Location and problem of the first skipped records."""
    num_empty: int
    """Records without a token, which are left out."""
    num_split: int
    """Documents longer than a row that are split into segments."""
    num_truncated: int
    """Documents longer than a row of which only the beginning is used."""
    num_tokens_truncated: int
    num_dropped: int
    num_tokens_dropped: int
    num_without_loss: int
    """Documents without a loss token, which are left out."""
    num_segments_without_loss: int
    """Segments without a loss token of other documents, which are left out."""
    num_tokens_without_loss: int
    """Tokens of these documents and segments."""
    num_bare_answers: int
    """Answers whose thinking the chat template dropped: see data.earlier_reasoning."""
    num_held_out: int
    num_tokens_held_out: int

    def has_long_documents(self) -> bool:
        """True if there are documents longer than a row."""
        return bool(self.num_split or self.num_truncated or self.num_dropped)


def count_source(
    name: str,
    dataset: "datasets.Dataset",
    chunks: Sequence[Chunk],
    selected: Sequence[ChunkSegments],
    *,
    used: np.ndarray,
    is_in_split: np.ndarray,
    row_tokens: int | None,
    count_held_out: bool,
) -> SourceCounts:
    """Counts the documents of a source.

    Args:
        chunks: the stored documents of the dataset.
        selected: the segments of each chunk.
        used: for each document, the number of its tokens up to which segments are made.
        is_in_split: for each document, True if it belongs to this split.
        row_tokens: tokens of a row; None: documents have any length.
        count_held_out: True for a training set; of an evaluation set, the others are not held out.
    """
    stored = np.concatenate([chunk.lengths for chunk in chunks])
    has_loss = np.zeros(len(stored), bool)
    starts = np.cumsum([0, *(len(chunk.lengths) for chunk in chunks)])
    for start, chunk_segments in zip(starts, selected, strict=False):
        has_loss[start + chunk_segments.indices] = True
    is_split = used > (used.max() if row_tokens is None else row_tokens)
    is_truncated = (used > 0) & (used < stored)
    left_out = stored[is_in_split & (used == 0)]
    per_record = chunks[0].per_record
    num_empty = int(np.sum(left_out == 0)) // per_record
    held_out = stored[~is_in_split & count_held_out]
    # a bad record has no tokens, and records without tokens are never held out
    num_skipped = 0
    skipped: list[RecordEntry] = []
    if num_empty and "problem" in dataset.column_names:
        num_skipped, skipped = record_cache.find_bad_records(
            dataset, max_examples=_MAX_NAMED_RECORDS
        )
    num_bare_answers = 0
    if BARE_ANSWERS in dataset.column_names:
        num_bare_answers = int(
            dataset.data.column(BARE_ANSWERS).to_numpy()[has_loss[::per_record]].sum()
        )
    return SourceCounts(
        name=name,
        num_documents=int(np.count_nonzero(has_loss)),
        num_tokens=sum(int(chunk_segments.kept.length.sum()) for chunk_segments in selected),
        num_loss_tokens=sum(chunk_segments.num_loss_tokens for chunk_segments in selected),
        num_skipped=num_skipped,
        skipped_examples=tuple(f"{entry['place']}: {entry['problem']}" for entry in skipped),
        num_empty=num_empty - num_skipped,
        num_split=int(np.count_nonzero(is_split)),
        num_truncated=int(np.count_nonzero(is_truncated)),
        num_tokens_truncated=int((stored - used)[is_truncated].sum()),
        num_dropped=int(np.count_nonzero(left_out)),
        num_tokens_dropped=int(left_out.sum()),
        num_without_loss=int(np.count_nonzero((used > 0) & ~has_loss)),
        num_segments_without_loss=sum(chunk_segments.num_left_out for chunk_segments in selected),
        num_tokens_without_loss=sum(
            chunk_segments.num_tokens_left_out for chunk_segments in selected
        ),
        num_bare_answers=num_bare_answers,
        num_held_out=len(held_out),
        num_tokens_held_out=int(held_out.sum()),
    )
