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
    if long_documents == "truncate":
        return np.minimum(lengths, longest_row)
    if long_documents == "drop":
        return np.where(lengths > longest_row, 0, lengths)
    return lengths


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
        counts["num_skipped"], skipped = record_cache.find_bad_records(
            dataset, max_examples=_MAX_NAMED_RECORDS
        )
    counts["num_empty"] -= counts["num_skipped"]
    examples = tuple(f"{location}: {problem}" for location, problem in skipped)
    return SourceCounts(name=name, skipped_examples=examples, **counts)


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
