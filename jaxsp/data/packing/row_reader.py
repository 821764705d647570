"""Reads tokens, labels and positions of any part of any row from memory-mapped documents."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxsp.core import errors
from jaxsp.core.batch import NO_LABEL, POSITION_LIMIT
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.data.formats.records import FIRST_REFERENCE, IS_DESIRABLE, SECOND_REFERENCE
from jaxsp.data.ingest.cache import TokenStats
from jaxsp.data.packing import document_selection
from jaxsp.data.packing.document_selection import Chunk
from jaxsp.data.packing.packing import Segments

if TYPE_CHECKING:
    import datasets


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSlice:
    """A range of a row's tokens. Shapes: [tokens of the range], int32."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    weights: np.ndarray | None = None
    """Weight of each label's loss, float32; None if the documents have no weights."""


class Documents:
    """Documents of tokenized datasets, one dataset after another.

    Documents and segments without a loss token are left out.

    Args:
        source_names: names of the sources of the datasets.
        held_out: for each dataset, True for the documents that are held out for evaluation. They
            are left out, or with `use_held_out` the others are. None: no document is held out.
        row_tokens: tokens of a row; None: documents have any length.
        long_documents: data.long_documents, what to do with documents longer than `row_tokens`.
        stats: statistics of the datasets, with checksums of what is read; None: not checked.
        has_scores: give the last token of each document a label, 0, and no other token: a reward
            model scores documents there.
    Reads: only the requested tokens, from the Arrow files that `datasets` maps into memory.
    Raises:
        UserError for a document that is too long for a row or for the model's positions, and if no
        token has a label; DamagedCacheError.
    """

    def __init__(
        self,
        tokenized: "Sequence[datasets.Dataset]",
        *,
        source_names: Sequence[str] | None = None,
        held_out: Sequence[np.ndarray] | None = None,
        use_held_out: bool = False,
        row_tokens: int | None = None,
        long_documents: Literal["split", "truncate", "drop", "error"] = "split",
        stats: Sequence[TokenStats] | None = None,
        has_scores: bool = False,
    ):
        self._max_id = np.iinfo(np.int32).max
        """Highest id of all tokens and labels, if it is known."""
        if stats is not None:
            extremes = [ends for source in stats for ends in source.extreme_ids.values()]
            self._max_id = max((highest for _, (highest, _) in extremes), default=0)
        self._tokenized = tokenized
        self._has_scores = has_scores
        self.per_record = document_selection.count_documents_per_record(tokenized[0])
        """Number of documents of a record: 2 for pairs, which are documents 2p and 2p + 1."""
        self._chunks: list[Chunk] = []
        for number, dataset in enumerate(tokenized):
            chunks = document_selection.read_chunks(dataset, stats[number] if stats else None)
            lengths = np.concatenate([chunk.lengths for chunk in chunks])
            _check_lengths(dataset, lengths, row_tokens, long_documents)
            self._chunks += chunks
        stored = np.concatenate([chunk.lengths for chunk in self._chunks])
        is_in_split = np.ones(len(stored), bool)
        if held_out is not None:
            is_in_split = np.repeat(np.concatenate(held_out) == use_held_out, self.per_record)
        used = stored * is_in_split
        if row_tokens is not None and long_documents == "truncate":
            used = np.minimum(used, row_tokens)
        if row_tokens is not None and long_documents == "drop":  # a pair is used as a whole
            is_long = (stored.reshape(-1, self.per_record) > row_tokens).any(1)
            used *= ~np.repeat(is_long, self.per_record)
        is_kept, self.segments, self.sources = document_selection.select_documents(
            source_names or [str(number) for number in range(len(tokenized))],
            tokenized,
            self._chunks,
            used=used,
            is_in_split=is_in_split,
            row_tokens=row_tokens,
            count_held_out=not use_held_out,
        )
        self._stored_index = np.flatnonzero(is_kept)
        """Index among the stored documents of each document."""
        self.lengths = used[is_kept].astype(np.int64)
        """Number of tokens of each document, up to which it has segments."""
        self.long_documents = long_documents
        self._record_ends = np.cumsum([len(dataset) for dataset in tokenized])
        self._chunk_ends = np.cumsum([len(chunk.lengths) for chunk in self._chunks])
        self.is_desirable = self._read_column(IS_DESIRABLE)
        """Label of each pair's record; None if the records have none."""
        self.references = self._read_references()
        """Log-probability of each document by the reference model, float64; None if it is unknown:
        jaxsp then computes it before it trains."""
        self.has_given_references = self.references is not None
        """True if the records have the log-probabilities of the reference model."""
        self._check_documents(row_tokens, long_documents)

    def _read_column(self, name: str) -> np.ndarray | None:
        """Value of each pair's record in a column; None if the tokenized records do not have it."""
        if not all(name in dataset.column_names for dataset in self._tokenized):
            return None
        values = [dataset.data.column(name).to_numpy() for dataset in self._tokenized]
        return np.concatenate(values)[self._stored_index[::2] // 2]

    def _read_references(self) -> np.ndarray | None:
        """Log-probabilities of the reference model that the records have: all, or none."""
        first, second = map(self._read_column, (FIRST_REFERENCE, SECOND_REFERENCE))
        if first is None or second is None:
            return None
        references = np.stack([first, second], axis=1).ravel()
        is_known = np.isfinite(references)
        if not is_known.any():
            return None
        if not is_known.all():
            raise UserError(
                f"{np.sum(is_known) // 2:,} of {len(references) // 2:,} records have "
                "ref_chosen_logps and ref_rejected_logps. Give them to all records, or put both "
                "names into ignore_fields: jaxsp then computes them."
            )
        return references

    def _check_documents(self, row_tokens: int | None, long_documents: str) -> None:
        longest = int(self.lengths.max(initial=0))
        if longest > POSITION_LIMIT:
            raise UserError(
                f"a document has {longest:,} tokens, but must have at most "
                f"{POSITION_LIMIT:,}, the number of positions. Cut it into shorter documents, or "
                "set data.long_documents to truncate or drop."
            )
        if self.num_loss_tokens > 0:
            return
        longest = max(int(chunk.lengths.max(initial=0)) for chunk in self._chunks)
        is_cut = row_tokens is not None and longest > row_tokens and long_documents != "split"
        if is_cut and any((chunk.labels.read_all() != NO_LABEL).any() for chunk in self._chunks):
            split = "data.long_documents=split, or " if self.per_record == 1 else ""
            raise UserError(
                f"data.long_documents = {long_documents} leaves no token with a loss: "
                f"rows have {row_tokens:,} tokens, and documents up to {longest:,}. Use "
                f"{split}a data.row_tokens of at least {longest:,}."
            )
        raise UserError(
            "at least one token must have a label. Give documents of two tokens or more, "
            "with labels that are not all -100."
        )

    @functools.cached_property
    def has_weights(self) -> bool:
        return any(chunk.weights is not None for chunk in self._chunks)

    @property
    def num_loss_tokens(self) -> int:
        if self._has_scores:
            return len(self.lengths)
        return sum(counts.num_loss_tokens for counts in self.sources)

    def find_sources(self, documents: np.ndarray) -> np.ndarray:
        records = self._stored_index[documents] // self.per_record
        return np.searchsorted(self._record_ends, records, side="right")

    def find_origin(self, document: int) -> dict[str, Any]:
        """Returns the source of a document, and index and location of its record there. Records
        that are left out are counted."""
        number = int(self.find_sources(np.array(document)))
        record = int(self._stored_index[document]) // self.per_record
        record -= int(self._record_ends[number]) - len(self._tokenized[number])
        location = self._tokenized[number][record]["place"]
        source = self.sources[number].name
        return {"source": source, "record_index": record, "location": location}

    def read_slice(self, row: Segments, begin: int, end: int) -> RowSlice:
        """Returns the tokens `begin` to `end` of a row. Labels and positions are those of the whole
        document: a token before a cut has its label, and positions continue after the cut. After
        the last segment is padding: token 0, label -100, position 0."""
        part = RowSlice(
            tokens=np.zeros(end - begin, np.int32),
            labels=np.full(end - begin, NO_LABEL, np.int32),
            positions=np.zeros(end - begin, np.int32),
            weights=np.zeros(end - begin, np.float32) if self.has_weights else None,
        )
        starts = row.starts
        ends = starts + row.length
        touched = slice(np.searchsorted(ends, begin, side="right"), np.searchsorted(starts, end))
        left = np.maximum(starts[touched], begin)
        right = np.minimum(ends[touched], end)
        num_tokens = right - left
        document = row.document[touched]
        first_token = row.offset[touched] + left - starts[touched]
        num_filled = right.max(initial=begin) - begin
        part.positions[:num_filled] = np.repeat((first_token - left).astype(np.int32), num_tokens)
        part.positions[:num_filled] += np.arange(begin, begin + num_filled, dtype=np.int32)
        # a document's last token has no label
        num_labels = np.minimum(self.lengths[document] - 1 - first_token, num_tokens)
        # Arithmetic is vectorized over the segments: a row of 468 takes 2 ms instead of 3.3 (2
        # cores, both busy).
        stored = self._stored_index[document]
        segments = zip(
            np.searchsorted(self._chunk_ends, stored, side="right").tolist(),
            stored.tolist(),
            first_token.tolist(),
            (left - begin).tolist(),
            num_tokens.tolist(),
            num_labels.tolist(),
            strict=True,
        )
        for chunk_number, index, skipped, at, count, label_count in segments:
            chunk = self._chunks[chunk_number]
            start = int(chunk.starts[index - self._chunk_ends[chunk_number]]) + skipped
            part.tokens[at : at + count] = chunk.tokens.read(start, start + count)
            first = start + 1
            end = first + label_count
            part.labels[at : at + label_count] = chunk.labels.read(first, end)
            if part.weights is not None and chunk.weights is not None:
                part.weights[at : at + label_count] = chunk.weights[first:end]
        if self._has_scores:
            part.labels[:] = NO_LABEL
            last = left - begin + self.lengths[document] - 1 - first_token
            part.labels[last[last < left - begin + num_tokens]] = 0
        # Training on an id out of range corrupts weights. The check takes 1 % of the time.
        for ids, lowest in ((part.tokens, 0), (part.labels, NO_LABEL)):
            if len(ids) and not lowest <= ids.min() <= ids.max() <= self._max_id:
                raise NeedsAttentionError(
                    f"data: a row has ids from {ids.min()} to {ids.max()}, but the highest id in "
                    f"the documents is {self._max_id}: this machine's memory may be faulty."
                )
        return part


def concatenate_slices(slices: Sequence[RowSlice]) -> RowSlice:
    if len(slices) == 1:
        return slices[0]
    names = [name for name, values in vars(slices[0]).items() if values is not None]
    return RowSlice(
        **{name: np.concatenate([getattr(part, name) for part in slices]) for name in names}
    )


def make_slots(
    row: Segments, max_segments: int, documents: np.ndarray | Sequence[int] = ()
) -> dict[str, np.ndarray]:
    """Returns the starts, lengths and documents of a row's segments; unused slots are 0, 0 and -1.
    Args: documents: number in the step of each segment's document; empty without pairs.
    Shapes: [max_segments], int32."""
    padding = (0, max_segments - len(row.length))
    numbers = np.full(max_segments, -1, np.int32)
    numbers[: len(documents)] = documents
    return {
        "starts": np.pad(row.starts, padding).astype(np.int32),
        "lengths": np.pad(row.length, padding).astype(np.int32),
        "documents": numbers,
    }


def _check_lengths(
    dataset: "datasets.Dataset", lengths: np.ndarray, row_tokens: int | None, long_documents: str
) -> None:
    """Checks that no document is longer than a row, unless it may be split. The documents of a pair
    are not split, because attention would not see the whole of them."""
    per_record = document_selection.count_documents_per_record(dataset)
    may_be_long = ("truncate", "drop") if per_record == 2 else ("split", "truncate", "drop")
    if row_tokens is None or long_documents in may_be_long:
        return
    too_long = np.flatnonzero(lengths > row_tokens)
    if not len(too_long):
        return
    first = int(too_long[0])
    place = dataset[first // per_record]["place"]
    others = ""
    if num_others := len(too_long) - 1:
        noun = "document is" if num_others == 1 else "documents are"
        others = f" {num_others:,} other {noun} too long."
    raise UserError(
        f"data.long_documents = {long_documents}: {place} has {lengths[first]:,} tokens, "
        f"but a row has {row_tokens:,}.{others} Use {errors.format_choices(may_be_long)}, or a "
        f"data.row_tokens of at least {lengths.max():,}.",
        is_named=True,
    )
