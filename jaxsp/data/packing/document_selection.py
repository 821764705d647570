"""Selection of documents from tokenized sources: held-out ones, long ones, and their counts."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data.formats.records import BARE_ANSWERS, FIRST_TOKENS
from jaxsp.data.ingest import record_cache
from jaxsp.data.ingest.record_cache import RecordEntry
from jaxsp.data.ingest.token_stats import CheckedIds, TokenStats
from jaxsp.data.packing import packing
from jaxsp.data.packing.packing import Segments

if TYPE_CHECKING:
    import datasets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Documents that are stored together; document d begins at tokens[starts[d]].

    Documents 2p and 2p + 1 are a pair, if records have two: see `records.FIRST_TOKENS`.
    """

    starts: np.ndarray
    lengths: np.ndarray
    tokens: CheckedIds
    labels: CheckedIds
    """Targets of the tokens before: the tokens themselves unless the records have labels."""
    weights: np.ndarray | None
    """Weight of the loss of predicting each token."""
    per_record: int = 1
    """Number of documents of a record."""


def read_chunks(dataset: "datasets.Dataset", stats: TokenStats | None = None) -> list[Chunk]:
    """Returns the stored documents of a dataset. Args: stats: checksums of the ids, if known."""
    per_record = count_documents_per_record(dataset)
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

    def check_ids(column: str, lists: list[tuple[np.ndarray, np.ndarray]]) -> list[CheckedIds]:
        ids = [values for _, values in lists]
        return list(map(CheckedIds, ids)) if stats is None else stats.check_blocks(column, ids)

    checked_tokens = check_ids("tokens", tokens)
    checked_labels = checked_tokens if labels is tokens else check_ids("labels", labels)
    offsets_of_documents = [offsets for offsets, _ in tokens]
    if per_record == 2:
        firsts = dataset.data.column(FIRST_TOKENS).to_numpy()
        ends = np.cumsum([len(offsets) - 1 for offsets in offsets_of_documents])
        parts = np.split(firsts, ends[:-1])
        for chunk, (offsets, first) in enumerate(zip(offsets_of_documents, parts, strict=True)):
            starts = np.stack([offsets[:-1], offsets[:-1] + first], axis=1)
            offsets_of_documents[chunk] = np.append(starts.ravel(), offsets[-1])
    return [
        Chunk(
            starts=offsets[:-1],
            lengths=np.diff(offsets),
            per_record=per_record,
            tokens=chunk_tokens,
            labels=chunk_labels,
            weights=chunk_weights,
        )
        for offsets, chunk_tokens, chunk_labels, chunk_weights in zip(
            offsets_of_documents, checked_tokens, checked_labels, weights, strict=True
        )
    ]


def count_documents_per_record(dataset: "datasets.Dataset") -> int:
    """Number of documents of each record of a tokenized dataset."""
    return 2 if FIRST_TOKENS in dataset.column_names else 1


def choose_lengths(
    stored: np.ndarray, row_tokens: int | None, long_documents: str, per_record: int = 1
) -> np.ndarray:
    """Number of tokens to use of each document; 0: none. A pair is used as a whole.

    Args:
        stored: number of tokens of each document.
        row_tokens: tokens of a row; None: documents have any length.
        long_documents: data.long_documents.
    """
    if row_tokens is not None and long_documents == "truncate":
        return np.minimum(stored, row_tokens)
    if row_tokens is not None and long_documents == "drop":
        is_record_long = (stored.reshape(-1, per_record) > row_tokens).any(1)
        return np.where(np.repeat(is_record_long, per_record), 0, stored)
    return stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkSegments:
    """Segments of the documents of a chunk that are used, and those of them with a loss token."""

    indices: np.ndarray
    """Index in the chunk of each document with a loss token."""
    lengths: np.ndarray
    """Number of tokens that are used of each of these documents."""
    kept: Segments
    """Segments with a loss token; their documents are numbered as `indices`."""
    num_loss_tokens: int
    num_left_out: int
    """Segments of these documents without a loss token."""
    num_tokens_left_out: int
    """Tokens of all segments without a loss token."""


def select_segments(chunk: Chunk, used: np.ndarray, row_tokens: int | None) -> ChunkSegments:
    """Selects the segments that have a loss token: the others would cost steps and teach nothing.

    The loss of the token before a cut is in the segment that ends there.

    Args:
        used: number of tokens that are used of each document of the chunk.
        row_tokens: tokens of a row; None: no document is split.
    """
    indices = np.flatnonzero(used)
    lengths = used[indices]
    segments = packing.split_documents(lengths, row_tokens)
    # targets are first + 1 to last: a document's first token is never one
    first = segments.offset
    last = np.minimum(segments.offset + segments.length, lengths[segments.document] - 1)
    counts = last - first
    if chunk.labels is not chunk.tokens:
        num_before = np.concatenate(
            [[0], np.cumsum(chunk.labels.read_all() != NO_LABEL, dtype=np.int32)]
        )
        start = chunk.starts[indices][segments.document]
        counts = num_before[start + last + 1] - num_before[start + first + 1]
    has_loss = counts > 0
    is_document_kept = np.bincount(segments.document, has_loss, minlength=len(indices)) > 0
    if chunk.per_record == 2:
        is_document_kept = np.repeat(is_document_kept.reshape(-1, 2).all(1), 2)
        has_loss &= is_document_kept[segments.document]
    kept = segments.select(has_loss)
    left_out = is_document_kept[segments.document] & ~has_loss
    new_number = np.cumsum(is_document_kept) - 1
    return ChunkSegments(
        indices=indices[is_document_kept],
        lengths=lengths[is_document_kept],
        kept=dataclasses.replace(kept, document=new_number[kept.document]),
        num_loss_tokens=int(counts.sum()),
        num_left_out=int(left_out.sum()),
        num_tokens_left_out=int(segments.length[~has_loss].sum()),
    )


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
    suggestion = "Name data sets in data.eval instead."
    if len(usable) > 1:
        enough = min(0.1, 1 / len(usable))
        suggestion = f"Use data.eval_fraction={enough:.1g}, or name data sets in data.eval."
    raise UserError(
        f"data.eval_fraction = {fraction:g}: must leave at least one document of data.train, which "
        f"has {len(usable):,}. {suggestion}"
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
