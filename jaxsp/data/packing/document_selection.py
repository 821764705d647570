"""Selection of documents from tokenized sources: held-out ones, long ones, and their counts."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data.formats.records import BARE_ANSWERS, FIRST_TOKENS, RecordEntry
from jaxsp.data.ingest import cache
from jaxsp.data.ingest.cache import CheckedIds, TokenStats
from jaxsp.data.packing import packing
from jaxsp.data.packing.packing import Segments

if TYPE_CHECKING:
    import datasets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Documents that are stored together; document d begins at tokens[starts[d]]. Documents 2p and
    2p + 1 are a pair, if records have two: see `records.FIRST_TOKENS`."""

    starts: np.ndarray
    lengths: np.ndarray
    tokens: CheckedIds
    labels: CheckedIds
    """Targets of the tokens before: the tokens themselves unless the records have labels."""
    weights: np.ndarray | None
    """Weight of the loss of predicting each token."""


def read_chunks(dataset: "datasets.Dataset", stats: TokenStats | None = None) -> list[Chunk]:
    """Returns the stored documents of a dataset. Args: stats: checksums of the ids, if known."""
    lists = {
        name: list(cache.read_lists(dataset, name))
        for name in ("tokens", "labels", "weights")
        if name in dataset.column_names
    }
    ids = {}
    for name in lists.keys() - {"weights"}:
        arrays = [values for _, values in lists[name]]
        ids[name] = [*map(CheckedIds, arrays)]
        if stats is not None:
            ids[name] = stats.check_blocks(name, arrays)
    has_pairs = count_documents_per_record(dataset) == 2
    first_tokens = dataset.data.column(FIRST_TOKENS).to_numpy() if has_pairs else None
    chunks = []
    for number, parts in enumerate(zip(*lists.values(), strict=True)):
        offsets = parts[0][0]
        assert all(np.array_equal(offsets, other) for other, _ in parts), "a label for each token"
        if first_tokens is not None:
            first, first_tokens = np.split(first_tokens, [len(offsets) - 1])
            starts = np.stack([offsets[:-1], offsets[:-1] + first], axis=1)
            offsets = np.append(starts.ravel(), offsets[-1])
        chunk = Chunk(
            starts=offsets[:-1],
            lengths=np.diff(offsets),
            tokens=ids["tokens"][number],
            labels=ids.get("labels", ids["tokens"])[number],
            weights=lists["weights"][number][1] if "weights" in lists else None,
        )
        chunks.append(chunk)
    return chunks


def count_documents_per_record(dataset: "datasets.Dataset") -> int:
    """Number of documents of each record of a tokenized dataset."""
    return 2 if FIRST_TOKENS in dataset.column_names else 1


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
    index, so the choice is the same on every mesh and after a resume. Those with the smallest
    numbers are held out, `fraction` of all rounded up; records without tokens never are.

    Raises: UserError if every document would be held out.
    """
    draws = [
        _draw_numbers(len(dataset), seed=seed, name=name)
        for dataset, name in zip(tokenized, source_names, strict=True)
    ]
    lengths = [
        np.concatenate([np.diff(offsets) for offsets, _ in cache.read_lists(dataset, "tokens")])
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
    """Digest of one of the two parts of a source, from its own and the mask of held-out records."""
    if not is_chosen.any() and not is_held_out:
        return source  # nothing is held out
    content = f"{source} {is_held_out} ".encode() + np.packbits(is_chosen).tobytes()
    return hashlib.sha256(content).hexdigest()


def _draw_numbers(num_records: int, *, seed: int, name: str) -> np.ndarray:
    """A number in [0, 1) for each record, by a hash of the seed, the name and the record's index.
    Philox is a counter-based generator: its n-th number is a hash of key and counter. NumPy
    guarantees its stream (NEP 19), unlike those of the distributions."""
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
    """Bad records."""
    skipped_examples: tuple[str, ...]
    num_empty: int
    """Records without a token."""
    num_split: int
    """Documents longer than a row that are split into segments."""
    num_truncated: int
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


def select_documents(
    names: Sequence[str],
    tokenized: "Sequence[datasets.Dataset]",
    chunks: Sequence[Chunk],
    *,
    used: np.ndarray,
    is_in_split: np.ndarray,
    row_tokens: int | None,
    count_held_out: bool,
) -> tuple[np.ndarray, Segments, tuple[SourceCounts, ...]]:
    """Selects the documents and the segments that have a loss token; the others would cost steps
    and teach nothing. The loss of the token before a cut is in the segment that ends there.

    Args:
        names: names of the sources.
        used: number of tokens that are used of each stored document.
        is_in_split: for each stored document, True if it belongs to this split.
        row_tokens: tokens of a row; None: no document is split.
        count_held_out: True for a training set; of an evaluation set, the others are not held out.
    Returns:
        True for each stored document with a loss token (of pairs, if both have one); the segments
        of these documents, which are numbered from 0; and counts of each source.
    """
    per_record = count_documents_per_record(tokenized[0])
    segments = packing.split_documents(used, row_tokens)
    document = segments.document
    # targets are first + 1 to last: a document's first token is never one
    first = segments.offset
    last = np.minimum(first + segments.length, used[document] - 1)
    num_loss = last - first
    chunk_begin = 0
    for chunk in chunks:
        chunk_end = chunk_begin + len(chunk.lengths)
        if chunk.labels is not chunk.tokens:
            num_before = np.concatenate(
                [[0], np.cumsum(chunk.labels.read_all() != NO_LABEL, dtype=np.int32)]
            )
            part = slice(*np.searchsorted(document, [chunk_begin, chunk_end]))
            target = chunk.starts[document[part] - chunk_begin] + 1
            num_loss[part] = num_before[target + last[part]] - num_before[target + first[part]]
        chunk_begin = chunk_end
    is_kept = np.bincount(document, num_loss > 0, minlength=len(used)) > 0
    if per_record == 2:
        is_kept = np.repeat(is_kept.reshape(-1, 2).all(1), 2)
    has_loss = (num_loss > 0) & is_kept[document]

    source = np.repeat(np.arange(len(names)), [per_record * len(each) for each in tokenized])
    source_of_segment = source[document]

    def total(values: np.ndarray, sources: np.ndarray = source) -> np.ndarray:
        """Total of each source, of a value of each document."""
        return np.bincount(sources, values, minlength=len(names)).astype(np.int64)

    stored = np.concatenate([chunk.lengths for chunk in chunks])
    is_truncated = (used > 0) & (used < stored)
    left_out = stored * (is_in_split & (used == 0))
    is_held_out = ~is_in_split & count_held_out
    num_empty = total(is_in_split & (stored == 0)) // per_record
    totals = {
        "num_documents": total(is_kept),
        "num_tokens": total(segments.length * has_loss, source_of_segment),
        "num_loss_tokens": total(num_loss, source_of_segment),
        "num_split": total(np.bincount(document, minlength=len(stored)) > 1),
        "num_truncated": total(is_truncated),
        "num_tokens_truncated": total((stored - used) * is_truncated),
        "num_dropped": total(left_out > 0),
        "num_tokens_dropped": total(left_out),
        "num_without_loss": total((used > 0) & ~is_kept),
        "num_segments_without_loss": total(~has_loss & is_kept[document], source_of_segment),
        "num_tokens_without_loss": total(segments.length * ~has_loss, source_of_segment),
        "num_held_out": total(is_held_out),
        "num_tokens_held_out": total(stored * is_held_out),
    }
    counts = []
    for number, (name, dataset) in enumerate(zip(names, tokenized, strict=True)):
        numbers = {field: int(values[number]) for field, values in totals.items()}
        # a bad record has no tokens, and records without tokens are never held out
        num_skipped = 0
        skipped: list[RecordEntry] = []
        if num_empty[number] and "problem" in dataset.column_names:
            num_skipped, skipped = cache.find_bad_records(dataset, max_examples=_MAX_NAMED_RECORDS)
        numbers |= {"num_skipped": num_skipped, "num_empty": int(num_empty[number]) - num_skipped}
        numbers["num_bare_answers"] = 0
        if BARE_ANSWERS in dataset.column_names:
            bare_answers = dataset.data.column(BARE_ANSWERS).to_numpy()
            is_record_kept = is_kept[source == number][::per_record]
            numbers["num_bare_answers"] = int(bare_answers[is_record_kept].sum())
        examples = tuple(f"{each['place']}: {each['problem']}" for each in skipped)
        counts.append(SourceCounts(name=name, skipped_examples=examples, **numbers))
    kept = segments.select(has_loss)
    renumbered = np.cumsum(is_kept)[kept.document] - 1
    return is_kept, dataclasses.replace(kept, document=renumbered), tuple(counts)
