"""Tokens, labels and positions of any part of any row, read from memory-mapped documents."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxsp.core.batch import NO_LABEL, POSITION_LIMIT
from jaxsp.core.errors import UserError
from jaxsp.data.ingest import bad_records, record_cache
from jaxsp.data.packing.packing import PackedRow

if TYPE_CHECKING:
    import datasets


_MAX_NAMED_RECORDS = 3
"""Bad records of a source that are said to be skipped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSlice:
    """A range of a row's tokens. Shapes: [tokens of the range], int32."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    weights: np.ndarray | None = None
    """Weight of each label's loss, float32, where the documents have weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentSlots:
    """Where a row's pieces begin and how long they are; unused slots are (0, 0). Shapes: [max_pieces], int32."""

    starts: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """What became of one source: how many documents and tokens it gives, and what it does not."""

    name: str
    num_documents: int
    num_tokens: int
    num_loss_tokens: int
    num_skipped: int
    """Bad records left out."""
    skipped_examples: tuple[str, ...]
    """The first of them: where they stand, and why."""
    num_empty: int
    """Records without a token, left out."""
    num_split: int
    """Documents longer than a row, in pieces."""
    num_truncated: int
    """Documents longer than a row, of which the beginning is here."""
    num_tokens_truncated: int
    """Tokens that are not here because of that."""
    num_dropped: int
    """Documents longer than a row, left out."""
    num_tokens_dropped: int
    num_held_out: int
    """Documents held out for evaluation (data.eval_fraction)."""
    num_tokens_held_out: int

    def has_long_documents(self) -> bool:
        """Whether there were documents longer than a row."""
        return bool(self.num_split or self.num_truncated or self.num_dropped)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentOrigin:
    """Where a document is from."""

    source: str
    """The name of its source."""
    record_index: int
    """Its number among the records of the source, from 0, those that are left out counted."""
    location: str
    """File, and line or row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Documents that lie together on disk: document d begins at tokens[starts[d]]."""

    starts: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    """What the token before should say: the tokens themselves unless the records have labels."""
    weights: np.ndarray | None
    """Weight of the loss of predicting each token."""

    def num_loss_tokens(self, places: np.ndarray, lengths: np.ndarray) -> int:
        """Loss tokens of some of the documents, as far as they are used: the first token is nobody's next."""
        if self.labels is self.tokens:
            return int((lengths - 1).sum())
        before = np.concatenate([[0], np.cumsum(self.labels != NO_LABEL, dtype=np.int32)])
        starts = self.starts[places]
        return int((before[starts + lengths] - before[starts + 1]).sum())


class Documents:
    """The documents of tokenised datasets, one dataset after another; those without tokens are left out.

    Args:
        names: of the sources that the datasets are.
        held_out: for each dataset, which of its documents are held out for evaluation; None: none.
            They are left out, or with `use_held_out` the others are.
        longest: tokens of the longest row. long_documents: what becomes of documents longer than that, as in the config.
    Reads:  nothing but the tokens asked for, from the Arrow files that `datasets` maps into memory.
    Raises: UserError for a document that the model has no positions for or that is too long, and where no token has a label.
    """

    def __init__(
        self,
        tokenized: "Sequence[datasets.Dataset]",
        *,
        source_names: Sequence[str] | None = None,
        held_out: Sequence[np.ndarray] | None = None,
        use_held_out: bool = False,
        longest_row: int | None = None,
        long_documents: Literal["split", "truncate", "drop", "error"] = "split",
        field: str = "data.train",
    ):
        source_names = (
            [str(number) for number in range(len(tokenized))]
            if source_names is None
            else source_names
        )
        self._tokenized = tokenized
        self._chunks: list[_Chunk] = []
        # of each chunk: the dataset it is of, and which of its records is the chunk's first
        self._chunk_origins: list[tuple[int, int]] = []
        self.sources: tuple[SourceCounts, ...] = ()
        lengths, chunk_of, place_of = [], [], []
        for number, (name, dataset) in enumerate(zip(source_names, tokenized, strict=True)):
            chunks, found, record = _read_chunks(dataset), [], 0
            for chunk, all_lengths in chunks:
                used = (
                    all_lengths
                    if longest_row is None
                    else _used_lengths(all_lengths, longest_row, long_documents)
                )
                inside = np.ones(len(used), bool)
                if held_out is not None:
                    inside = held_out[number][record : record + len(used)] == use_held_out
                used = np.where(inside, used, 0)
                places = np.flatnonzero(used)
                found.append((chunk, all_lengths, inside, places, used[places]))
                lengths.append(used[places])
                chunk_of.append(np.full(len(places), len(self._chunks), np.int32))
                place_of.append(places)
                self._chunks.append(chunk)
                self._chunk_origins.append((number, record))
                record += len(all_lengths)
            if long_documents == "error" and longest_row is not None:
                _check_lengths(
                    dataset, [all_lengths for _, all_lengths in chunks], longest_row, field
                )
            source = _count_source(name, dataset, found, longest_row)
            if use_held_out:  # the rest is not held out
                source = dataclasses.replace(source, num_held_out=0, num_tokens_held_out=0)
            self.sources += (source,)
        self.has_weights = any(chunk.weights is not None for chunk in self._chunks)
        """True if the documents have a weight for each token's loss."""
        self.lengths = np.concatenate(lengths).astype(np.int64)
        # where document d is: in which chunk, and as which of its documents
        self._chunk_of_document, self._index_in_chunk = (
            np.concatenate(chunk_of),
            np.concatenate(place_of),
        )
        self._source_ends = np.cumsum([source.num_documents for source in self.sources])
        most = int(self.lengths.max(initial=0))
        if most > POSITION_LIMIT:
            raise UserError(
                f"{field}: a document has {most:,} tokens, and positions end at {POSITION_LIMIT:,}. "
                "Cut it into shorter documents, or set data.long_documents to truncate or drop."
            )
        if self.num_loss_tokens == 0:
            dropped = sum(source.num_dropped for source in self.sources)
            longer = (
                f" ({dropped:,} longer than a row of {longest_row:,} tokens were dropped)"
                if dropped
                else ""
            )
            raise UserError(
                f"{field}: no token has a label, there is nothing to learn from{longer}. "
                "Give documents of two tokens or more, with labels that are not all -100."
            )

    @property
    def num_loss_tokens(self) -> int:
        return sum(source.num_loss_tokens for source in self.sources)

    def find_sources(self, documents: np.ndarray) -> np.ndarray:
        """Which of the sources each of some documents is from."""
        return np.searchsorted(self._source_ends, documents, side="right")

    def find_origin(self, document: int) -> DocumentOrigin:
        """Where a document is from."""
        number, first = self._chunk_origins[self._chunk_of_document[document]]
        record = first + int(self._index_in_chunk[document])
        place = self._tokenized[number][record]["place"]
        return DocumentOrigin(source=self.sources[number].name, record_index=record, location=place)

    def read_slice(self, row: PackedRow, begin: int, end: int) -> RowSlice:
        """The tokens `begin` to `end` of a row.

        Labels and positions are those of the whole document, so a token before a cut has its label, and the first one
        after it goes on counting. Behind the last piece is padding: token 0, label -100, position 0.
        """
        share = RowSlice(
            tokens=np.zeros(end - begin, np.int32),
            labels=np.full(end - begin, NO_LABEL, np.int32),
            positions=np.zeros(end - begin, np.int32),
            weights=np.zeros(end - begin, np.float32) if self.has_weights else None,
        )
        starts = row.starts
        touched = slice(
            np.searchsorted(starts + row.length, begin, side="right"), np.searchsorted(starts, end)
        )
        left, right = (
            np.maximum(starts[touched], begin),
            np.minimum((starts + row.length)[touched], end),
        )
        document, first = row.document[touched], row.offset[touched] + left - starts[touched]
        behind = right.max(initial=begin)
        share.positions[: behind - begin] = np.repeat((first - left).astype(np.int32), right - left)
        share.positions[: behind - begin] += np.arange(begin, behind, dtype=np.int32)
        # What can be is done for all pieces at once: a row of 468 takes 2 ms instead of 3.3 (2 cores, both busy)
        chunks, places = (
            self._chunk_of_document[document].tolist(),
            self._index_in_chunk[document].tolist(),
        )
        lasts = np.minimum(self.lengths[document] - 1, first + right - left).tolist()
        pieces = zip(
            chunks,
            places,
            first.tolist(),
            lasts,
            (left - begin).tolist(),
            (right - begin).tolist(),
            strict=True,
        )
        for number, place, skipped, last, at, end_at in pieces:
            chunk = self._chunks[number]
            start = int(chunk.starts[place])
            share.tokens[at:end_at] = chunk.tokens[start + skipped : start + skipped + end_at - at]
            share.labels[at : at + last - skipped] = chunk.labels[
                start + skipped + 1 : start + last + 1
            ]
            if share.weights is not None and chunk.weights is not None:
                share.weights[at : at + last - skipped] = chunk.weights[
                    start + skipped + 1 : start + last + 1
                ]
        return share


def concatenate_slices(shares: Sequence[RowSlice]) -> RowSlice:
    """Ranges of a row's tokens, one behind the other."""
    if len(shares) == 1:
        return shares[0]
    names = [
        field.name
        for field in dataclasses.fields(RowSlice)
        if getattr(shares[0], field.name) is not None
    ]
    return RowSlice(
        **{name: np.concatenate([getattr(share, name) for share in shares]) for name in names}
    )


def make_slots(row: PackedRow, max_segments: int) -> SegmentSlots:
    """The row's pieces for attention."""
    free = (0, max_segments - len(row.length))
    return SegmentSlots(
        starts=np.pad(row.starts, free).astype(np.int32),
        lengths=np.pad(row.length, free).astype(np.int32),
    )


def _read_chunks(dataset: "datasets.Dataset") -> list[tuple[_Chunk, np.ndarray]]:
    """The documents, with the length of each."""
    tokens = list(record_cache.read_lists(dataset, "tokens"))
    labels = (
        list(record_cache.read_lists(dataset, "labels"))
        if "labels" in dataset.column_names
        else tokens
    )
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(tokens, labels, strict=True)), (
        "a label for each token"
    )
    weights: list[np.ndarray] | list[None] = [None] * len(tokens)
    if "weights" in dataset.column_names:
        weights = [values for _, values in record_cache.read_lists(dataset, "weights")]
    return [
        (
            _Chunk(starts=offsets[:-1], tokens=values, labels=marks, weights=factors),
            np.diff(offsets),
        )
        for (offsets, values), (_, marks), factors in zip(tokens, labels, weights, strict=True)
    ]


def _used_lengths(lengths: np.ndarray, longest: int, long_documents: str) -> np.ndarray:
    """How much of each document is used."""
    if long_documents == "truncate":
        return np.minimum(lengths, longest)
    return np.where(lengths > longest, 0, lengths) if long_documents == "drop" else lengths


def _check_lengths(
    dataset: "datasets.Dataset", lengths: Sequence[np.ndarray], longest: int, field: str
) -> None:
    all_lengths = np.concatenate(lengths)
    too_long = np.flatnonzero(all_lengths > longest)
    if len(too_long):
        first, others = int(too_long[0]), len(too_long) - 1
        more = f", and {others:,} other{'s' * (others > 1)} longer than that" if others else ""
        raise UserError(
            f"data.long_documents = error: {field}: {dataset[first]['place']} has {all_lengths[first]:,} tokens, and a row "
            f"{longest:,}{more}. Use split, truncate or drop, or a data.row_tokens of at least {all_lengths.max():,}."
        )


def _count_source(
    name: str,
    dataset: "datasets.Dataset",
    found: Sequence[tuple[_Chunk, np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
    longest: int | None,
) -> SourceCounts:
    """Args: found: of each chunk, the length of all documents, which of them belong to this part of the source, which of
    those are used, and how much of each."""
    counts = dict.fromkeys(
        (field.name for field in dataclasses.fields(SourceCounts) if field.name.startswith("num_")),
        0,
    )
    for chunk, lengths, inside, places, used in found:
        whole = lengths[places]
        is_left_out = inside.copy()
        is_left_out[places] = False
        dropped, held_out = lengths[is_left_out], lengths[~inside]
        counts["num_documents"] += len(places)
        counts["num_tokens"] += int(used.sum())
        counts["num_loss_tokens"] += chunk.num_loss_tokens(places, used)
        counts["num_empty"] += int(np.sum(dropped == 0))
        counts["num_split"] += 0 if longest is None else int(np.sum(used > longest))
        counts["num_truncated"] += int(np.sum(used < whole))
        counts["num_tokens_truncated"] += int((whole - used).sum())
        counts["num_dropped"] += int(np.sum(dropped > 0))
        counts["num_tokens_dropped"] += int(dropped.sum())
        counts["num_held_out"] += len(held_out)
        counts["num_tokens_held_out"] += int(held_out.sum())
    num_skipped, skipped = 0, list[tuple[str, str]]()
    # a bad record has no tokens, and records without tokens are never held out
    if counts["num_empty"] and "problem" in dataset.column_names:
        num_skipped, skipped = bad_records.find_bad_records(
            dataset, max_examples=_MAX_NAMED_RECORDS
        )
    counts["num_empty"] -= num_skipped
    said = tuple(f"{place}: {problem}" for place, problem in skipped)
    return SourceCounts(name=name, skipped_examples=said, **counts | {"num_skipped": num_skipped})
