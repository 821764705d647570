"""Selection of documents from tokenized sources: held-out ones, long ones, and their counts."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data.ingest import record_cache
from jaxsp.data.ingest.token_stats import CheckedIds, TokenStats

if TYPE_CHECKING:
    import datasets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Documents that are stored together; document d begins at tokens[starts[d]]."""

    starts: np.ndarray
    lengths: np.ndarray
    tokens: CheckedIds
    labels: CheckedIds
    """Targets of the tokens before: the tokens themselves unless the records have labels."""
    weights: np.ndarray | None
    """Weight of the loss of predicting each token."""


def read_chunks(dataset: "datasets.Dataset", stats: TokenStats | None = None) -> list[Chunk]:
    """Returns the stored documents of a dataset. Args: stats: checksums of the ids, if known."""
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
    checked_tokens = _check_ids("tokens", tokens, stats)
    checked_labels = checked_tokens if labels is tokens else _check_ids("labels", labels, stats)
    return [
        Chunk(
            starts=offsets[:-1],
            lengths=np.diff(offsets),
            tokens=chunk_tokens,
            labels=chunk_labels,
            weights=chunk_weights,
        )
        for (offsets, _), chunk_tokens, chunk_labels, chunk_weights in zip(
            tokens, checked_tokens, checked_labels, weights, strict=True
        )
    ]


def _check_ids(
    column: str, lists: list[tuple[np.ndarray, np.ndarray]], stats: TokenStats | None
) -> list[CheckedIds]:
    ids = [values for _, values in lists]
    return list(map(CheckedIds, ids)) if stats is None else stats.check_blocks(column, ids)


def choose_lengths(stored: np.ndarray, longest_row: int | None, long_documents: str) -> np.ndarray:
    """Number of tokens to use of each document; 0: none.

    Args:
        stored: number of tokens of each document.
        longest_row: tokens of the longest row; None: documents have any length.
        long_documents: data.long_documents.
    """
    if longest_row is not None and long_documents == "truncate":
        return np.minimum(stored, longest_row)
    if longest_row is not None and long_documents == "drop":
        return np.where(stored > longest_row, 0, stored)
    return stored


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
    num_held_out: int
    num_tokens_held_out: int

    def has_long_documents(self) -> bool:
        """True if there are documents longer than a row."""
        return bool(self.num_split or self.num_truncated or self.num_dropped)


def count_source(
    name: str,
    dataset: "datasets.Dataset",
    chunks: Sequence[Chunk],
    *,
    used: np.ndarray,
    is_in_split: np.ndarray,
    longest_row: int | None,
    count_held_out: bool,
) -> SourceCounts:
    """Counts the documents of a source.

    Args:
        chunks: the stored documents of the dataset.
        used: for each record, the number of tokens that are used.
        is_in_split: for each record, True if it belongs to this split.
        longest_row: tokens of the longest row; None: documents have any length.
        count_held_out: True for a training set; of an evaluation set, the others are not held out.
    """
    stored = np.concatenate([chunk.lengths for chunk in chunks])
    is_split = used > (used.max() if longest_row is None else longest_row)
    is_truncated = (used > 0) & (used < stored)
    left_out = stored[is_in_split & (used == 0)]
    num_empty = int(np.sum(left_out == 0))
    held_out = stored[~is_in_split & count_held_out]
    num_skipped = 0
    skipped: list[tuple[str, str]] = []
    # a bad record has no tokens, and records without tokens are never held out
    if num_empty and "problem" in dataset.column_names:
        num_skipped, skipped = record_cache.find_bad_records(
            dataset, max_examples=_MAX_NAMED_RECORDS
        )
    return SourceCounts(
        name=name,
        num_documents=int(np.count_nonzero(used)),
        num_tokens=int(used.sum()),
        num_loss_tokens=_count_loss_tokens(chunks, used),
        num_skipped=num_skipped,
        skipped_examples=tuple(f"{location}: {problem}" for location, problem in skipped),
        num_empty=num_empty - num_skipped,
        num_split=int(np.count_nonzero(is_split)),
        num_truncated=int(np.count_nonzero(is_truncated)),
        num_tokens_truncated=int((stored - used)[is_truncated].sum()),
        num_dropped=int(np.count_nonzero(left_out)),
        num_tokens_dropped=int(left_out.sum()),
        num_held_out=len(held_out),
        num_tokens_held_out=int(held_out.sum()),
    )


def _count_loss_tokens(chunks: Sequence[Chunk], used: np.ndarray) -> int:
    """Number of loss tokens in the used tokens; a document's first token is never a target."""
    count = 0
    for chunk, lengths in zip(chunks, split_by_chunk(chunks, used), strict=True):
        indices = np.flatnonzero(lengths)
        if chunk.labels is chunk.tokens:
            count += int((lengths[indices] - 1).sum())
            continue
        num_before = np.concatenate(
            [[0], np.cumsum(chunk.labels.read_all() != NO_LABEL, dtype=np.int32)]
        )
        starts = chunk.starts[indices]
        count += int((num_before[starts + lengths[indices]] - num_before[starts + 1]).sum())
    return count


def split_by_chunk(chunks: Sequence[Chunk], values: np.ndarray) -> list[np.ndarray]:
    """Splits an array with a value for each record."""
    return np.split(values, np.cumsum([len(chunk.lengths) for chunk in chunks])[:-1])


EVAL_SET_NAME = "held_out"


def select_records(
    tokenized: "Sequence[datasets.Dataset]",
    *,
    source_names: Sequence[str],
    fraction: float,
    seed: int,
) -> list[np.ndarray]:
    """Selects the records of each source that are held out.

    Each document has a number that depends only on the seed, the source's name and the record's
    index. Those with the smallest numbers are held out, `fraction` of all documents rounded up, so
    the choice is the same on every mesh, in every process and after a resume. Records without
    tokens are never held out.

    Raises: UserError if every document would be held out.
    """
    draws = [
        _draw_numbers(len(dataset), seed=seed, name=name)
        for dataset, name in zip(tokenized, source_names, strict=True)
    ]
    lengths = [
        np.concatenate(
            [np.diff(offsets) for offsets, _ in record_cache.read_lists(dataset, "tokens")]
        )
        for dataset in tokenized
    ]
    # a document of one token has no loss
    usable = np.sort(np.concatenate(draws)[np.concatenate(lengths) > 1])
    num_held_out = max(1, math.ceil(round(fraction * len(usable), 9)))
    if num_held_out < len(usable):
        highest = usable[num_held_out - 1]
        return [
            (draw <= highest) & (length > 0) for draw, length in zip(draws, lengths, strict=True)
        ]
    raise UserError(
        f"data.eval_fraction = {fraction:g}: must leave at least one document of data.train, which "
        f"has {len(usable):,}. {_suggest_fraction(len(usable))}"
    )


def digest_split(source: str, is_chosen: np.ndarray, *, is_held_out: bool) -> str:
    """Digest of one of the two parts of a source.

    Args:
        source: digest of the whole source.
        is_chosen: for each record, True if it is held out.
    """
    if not is_chosen.any() and not is_held_out:
        return source  # nothing is held out
    content = f"{source} {is_held_out} ".encode() + np.packbits(is_chosen).tobytes()
    return hashlib.sha256(content).hexdigest()


def _draw_numbers(num_records: int, *, seed: int, name: str) -> np.ndarray:
    """A number in [0, 1) for each record, by a hash of the seed, the name and the record's index.

    Philox is a counter-based generator: its n-th number is a hash of key and counter. NumPy
    guarantees its stream (NEP 19), unlike those of the distributions.
    """
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:16]
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_records)
    return (raw >> np.uint64(11)) * 2.0**-53


def _suggest_fraction(num_documents: int) -> str:
    if num_documents < 2:
        return "Name data sets in data.eval instead."
    fraction = min(0.1, 1 / num_documents)
    return f"Use data.eval_fraction={fraction:.1g}, or name data sets in data.eval."
