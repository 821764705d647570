"""Counts of the documents of one source: used, split, truncated, dropped, skipped, held out."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.data.ingest import bad_records
from jaxsp.data.packing.document_chunks import ChunkSelection

if TYPE_CHECKING:
    import datasets

_MAX_NAMED_RECORDS = 3
"""Maximum number of skipped records of a source that are named."""


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
    """Tokens of truncated documents that are left out."""
    num_dropped: int
    """Documents longer than a row that are left out."""
    num_tokens_dropped: int
    num_held_out: int
    """Documents held out for evaluation (data.eval_fraction)."""
    num_tokens_held_out: int

    def has_long_documents(self) -> bool:
        """True if there are documents longer than a row."""
        return bool(self.num_split or self.num_truncated or self.num_dropped)


def count_source(
    name: str,
    dataset: "datasets.Dataset",
    selections: Sequence[ChunkSelection],
    *,
    longest_row: int | None,
    count_held_out: bool,
) -> SourceCounts:
    """Counts the documents of a source.

    Args:
        selections: the dataset's chunks with their used documents.
        longest_row: tokens of the longest row; None: documents have any length.
        count_held_out: True for a training set; of an evaluation set, the others are not held out.
    """
    names = [field.name for field in dataclasses.fields(SourceCounts)]
    counts = dict.fromkeys([name for name in names if name.startswith("num_")], 0)
    for selection in selections:
        chunk = selection.chunk
        used = selection.lengths
        whole = chunk.lengths[selection.indices]
        is_left_out = selection.is_in_split.copy()
        is_left_out[selection.indices] = False
        dropped = chunk.lengths[is_left_out]
        counts["num_documents"] += len(used)
        counts["num_tokens"] += int(used.sum())
        counts["num_loss_tokens"] += chunk.num_loss_tokens(selection.indices, used)
        counts["num_empty"] += int(np.sum(dropped == 0))
        if longest_row is not None:
            counts["num_split"] += int(np.sum(used > longest_row))
        counts["num_truncated"] += int(np.sum(used < whole))
        counts["num_tokens_truncated"] += int((whole - used).sum())
        counts["num_dropped"] += int(np.sum(dropped > 0))
        counts["num_tokens_dropped"] += int(dropped.sum())
        if count_held_out:
            held_out = chunk.lengths[~selection.is_in_split]
            counts["num_held_out"] += len(held_out)
            counts["num_tokens_held_out"] += int(held_out.sum())
    skipped: list[tuple[str, str]] = []
    # a bad record has no tokens, and records without tokens are never held out
    if counts["num_empty"] and "problem" in dataset.column_names:
        counts["num_skipped"], skipped = bad_records.find_bad_records(
            dataset, max_examples=_MAX_NAMED_RECORDS
        )
    counts["num_empty"] -= counts["num_skipped"]
    examples = tuple(f"{location}: {problem}" for location, problem in skipped)
    return SourceCounts(name=name, skipped_examples=examples, **counts)
