"""Documents: those of tokenized sources that are used, and the tokens of any part of any row."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxsp.core import errors
from jaxsp.core.batch import NO_LABEL, POSITION_LIMIT, PREDICTIONS
from jaxsp.core.errors import UserError
from jaxsp.data import packing
from jaxsp.data.packing import Segments
from jaxsp.data.source import (
    BARE_ANSWERS,
    FIRST_REFERENCE,
    IS_DESIRABLE,
    SECOND_REFERENCE,
)
from jaxsp.data.store import CheckedIds, TokenizedSource, list_bad_records

EVAL_SET_NAME = "held_out"


def select_records(
    tokenized: Sequence[TokenizedSource],
    *,
    source_names: Sequence[str],
    fraction: float,
    seed: int,
) -> list[np.ndarray]:
    """Selects the records of each source that are held out.

    Each record has a number in [0, 1) that depends only on the seed, the source's name and the
    record's index, so the choice is the same on every mesh and after a resume. Those with the
    smallest numbers are held out, `fraction` of all rounded up; records without tokens never are.

    Raises: UserError if every document would be held out.
    """
    draws = []
    lengths = [each.num_tokens for each in tokenized]
    for length, name in zip(lengths, source_names, strict=True):
        # Philox is a counter-based generator: its n-th number is a hash of key and counter. NumPy
        # guarantees its stream (NEP 19), unlike those of the distributions.
        key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:16]
        raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(len(length))
        draws.append((raw >> np.uint64(11)) * 2.0**-53)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """Documents and tokens of one source that are used, and those that are not."""

    name: str
    num_documents: int
    num_tokens: int
    num_loss_tokens: int
    num_skipped: int
    """Bad records."""
    first_skipped: str
    """Place and problem of the first of them."""
    num_empty: int
    """Records without a token."""
    num_long: int
    """Documents longer than a row, which are split, truncated or dropped."""
    num_tokens_cut: int
    """Tokens that truncation leaves out, or tokens of dropped documents."""
    num_without_loss: int
    """Documents without a loss token, which are left out."""
    num_tokens_without_loss: int
    """Tokens of these documents, and of segments of others without a loss token."""
    num_bare_answers: int
    """Answers whose thinking the chat template dropped: see data.earlier_reasoning."""
    num_held_out: int


class StoredPredictions(NamedTuple):
    """A teacher's predictions after each token of all documents: see `run.predictions`."""

    values: CheckedIds
    """int32[tokens * width], the values of a token beside each other."""
    width: int
    """Number of values of a token: see `core.batch.PREDICTIONS`."""


_SLAB_TOKENS = 2**22
"""Labels to count together, in about 20 MB of memory."""


def _count_loss_tokens(segments: Segments, used: np.ndarray, source: TokenizedSource) -> np.ndarray:
    """Number of loss tokens of each segment. Args: used: number of tokens of each document."""
    # targets are first + 1 to last: a document's first token is never one
    last = np.minimum(segments.offset + segments.length, used[segments.document] - 1)
    num_loss = last - segments.offset
    labels = source.arrays.get("labels")
    if labels is None or not len(num_loss):
        return num_loss
    begin = source.starts[segments.document] + segments.offset + 1
    end = begin + num_loss
    for part in np.array_split(np.arange(len(begin)), 1 + end[-1] // _SLAB_TOKENS):
        if len(part):
            first = begin[part[0]]
            is_target = labels.read(int(first), int(end[part[-1]])) != NO_LABEL
            num_before = np.append(np.int32(0), np.cumsum(is_target, dtype=np.int32))
            num_loss[part] = num_before[end[part] - first] - num_before[begin[part] - first]
    return num_loss


class Documents:
    """Documents of tokenized sources, one source after another.

    Documents and segments without a loss token are left out: they would cost steps and teach
    nothing. The loss of the token before a cut is in the segment that ends there.

    Args:
        held_out: for each source, True for the records that are held out for evaluation. They are
            left out, or with `use_held_out` the others are. None: no record is held out.
        row_tokens: tokens of a row; None: documents have any length.
        has_scores: give the last token of each document a label, 0, and no other token: a reward
            model scores documents there.
        numbers: names of the numbers of tokens that records have. Documents are then not cut.
        equal_numbers: those that must be equal for all loss tokens of a document.
    Reads: only the requested tokens, from the files that are mapped into memory.
    Raises:
        UserError for a document that is too long for a row or for the model's positions, and if no
        token has a label; DamagedCacheError.
    """

    def __init__(
        self,
        tokenized: Sequence[TokenizedSource],
        *,
        source_names: Sequence[str] | None = None,
        held_out: Sequence[np.ndarray] | None = None,
        use_held_out: bool = False,
        row_tokens: int | None = None,
        long_documents: Literal["split", "truncate", "drop", "error"] = "split",
        has_scores: bool = False,
        numbers: Sequence[str] = (),
        equal_numbers: Sequence[str] = (),
    ):
        self._tokenized = tokenized
        # labels are targets of the tokens before
        self._arrays = [{"labels": each.arrays["tokens"], **each.arrays} for each in tokenized]
        self._has_scores = has_scores
        self.numbers = numbers
        """Names of the numbers of tokens that batches have."""
        self.long_documents = long_documents
        self.per_record = tokenized[0].per_record
        """Number of documents of a record: 2 for pairs, which are documents 2p and 2p + 1."""
        self._source_ends = np.cumsum([len(each.lengths) for each in tokenized])
        self.sources: list[SourceCounts] = []
        kept_segments: list[Segments] = []
        used_tokens: list[np.ndarray] = []
        kept: list[np.ndarray] = []
        for number, source in enumerate(tokenized):
            stored = source.lengths
            _check_lengths(source, row_tokens, long_documents, is_whole=bool(numbers))
            if numbers:
                _check_numbers(source, numbers, equal_numbers)
            is_in_split = np.ones(len(stored), bool)
            if held_out is not None:
                is_in_split = np.repeat(held_out[number] == use_held_out, self.per_record)
            used = stored * is_in_split
            if row_tokens is not None and long_documents == "truncate":
                used = np.minimum(used, row_tokens)
            if row_tokens is not None and long_documents == "drop":  # a pair is used as a whole
                is_long = (stored.reshape(-1, self.per_record) > row_tokens).any(1)
                used *= ~np.repeat(is_long, self.per_record)
            segments = packing.split_documents(used, row_tokens)
            num_loss = _count_loss_tokens(segments, used, source)
            is_kept = np.bincount(segments.document, num_loss > 0, minlength=len(used)) > 0
            is_kept = np.repeat(is_kept.reshape(-1, self.per_record).all(1), self.per_record)
            has_loss = (num_loss > 0) & is_kept[segments.document]
            is_cut = is_in_split & (used < stored)
            is_empty = is_in_split & (stored == 0)
            records = source.records
            # a bad record has no tokens, and records without tokens are never held out
            bad = list_bad_records(records) if is_empty.any() else []
            bare_answers = np.zeros(1, np.int32)
            if BARE_ANSWERS in records.column_names:
                bare_answers = records[BARE_ANSWERS].to_numpy()
            is_split = np.bincount(segments.document, minlength=len(used)) > 1

            def count(mask: np.ndarray, numbers: np.ndarray | int = 1) -> int:
                return int(np.sum(mask * numbers))

            self.sources.append(
                SourceCounts(
                    name=source_names[number] if source_names else str(number),
                    num_documents=count(is_kept),
                    num_tokens=count(has_loss, segments.length),
                    num_loss_tokens=count(has_loss, num_loss),
                    num_skipped=len(bad),
                    first_skipped=bad[0] if bad else "",
                    num_empty=count(is_empty) // self.per_record - len(bad),
                    num_long=count(is_cut | is_split),
                    num_tokens_cut=count(is_cut, stored - used),
                    num_without_loss=count((used > 0) & ~is_kept),
                    num_tokens_without_loss=count(~has_loss, segments.length),
                    num_bare_answers=count(is_kept[:: self.per_record], bare_answers),
                    num_held_out=0 if use_held_out else count(~is_in_split),
                )
            )
            segments = segments.select(has_loss)
            new = np.cumsum(is_kept) - 1 + sum(map(np.count_nonzero, kept))
            kept_segments.append(dataclasses.replace(segments, document=new[segments.document]))
            used_tokens.append(used)
            kept.append(is_kept)
        self.segments = packing.concatenate(kept_segments)
        """Segments of the documents, which are numbered from 0."""
        is_kept = np.concatenate(kept)
        self.lengths = np.concatenate(used_tokens)[is_kept].astype(np.int64)
        """Number of tokens of each document, up to which it has segments."""
        self._index = np.flatnonzero(is_kept)
        """Index among the stored documents of each document."""
        self._source = self._find_source(self._index)
        self._start = np.concatenate([each.starts for each in tokenized])[is_kept]
        """First token of each document in its source."""
        self.is_desirable = self._read_column(IS_DESIRABLE)
        """Label of each pair's record; None if the records have none."""
        self.references = self._read_references()
        """Log-probability of each document by the reference model, float64; None if it is unknown:
        jaxsp then computes it before it trains."""
        self.has_given_references = self.references is not None
        """True if the records have the log-probabilities of the reference model."""
        self.has_weights = any("weights" in arrays for arrays in self._arrays)
        self.predictions: StoredPredictions | None = None
        """A teacher's stored predictions."""
        self._check_documents(row_tokens)

    def _find_source(self, index: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._source_ends, index, side="right")

    def _read_column(self, name: str) -> np.ndarray | None:
        """Value of each pair's record in a column; None if the tokenized records do not have it."""
        tables = [each.records for each in self._tokenized]
        if not all(name in table.column_names for table in tables):
            return None
        values = np.concatenate([table[name].to_numpy() for table in tables])
        return values[self._index[::2] // 2]

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

    def _check_documents(self, row_tokens: int | None) -> None:
        longest = int(self.lengths.max(initial=0))
        if longest > POSITION_LIMIT:
            raise UserError(
                f"a document has {longest:,} tokens, but must have at most "
                f"{POSITION_LIMIT:,}, the number of positions. Cut it into shorter documents, or "
                "set data.long_documents to truncate or drop."
            )
        if self.num_loss_tokens > 0:
            return
        longest = max(int(each.lengths.max(initial=0)) for each in self._tokenized)
        if row_tokens is not None and longest > row_tokens and self.long_documents != "split":
            can_split = self.per_record == 1 and not self.numbers
            split = "data.long_documents=split, or " if can_split else ""
            raise UserError(
                f"data.long_documents = {self.long_documents} leaves no token with a loss: "
                f"rows have {row_tokens:,} tokens, and documents up to {longest:,}. Use "
                f"{split}a data.row_tokens of at least {longest:,}."
            )
        raise UserError(
            "at least one token must have a label. Give documents of two tokens or more, "
            "with labels that are not all -100."
        )

    @functools.cached_property
    def first_tokens(self) -> np.ndarray:
        """First token of each document among those of all documents."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def number_names(self) -> list[str]:
        """Names of the numbers of tokens that batches have."""
        return [*self.numbers, *([] if self.predictions is None else [PREDICTIONS])]

    @property
    def num_loss_tokens(self) -> int:
        if self._has_scores:
            return len(self.lengths)
        return sum(counts.num_loss_tokens for counts in self.sources)

    def find_sources(self, documents: np.ndarray) -> np.ndarray:
        """Number of each document's source."""
        return self._source[documents]

    def find_origin(self, document: int) -> dict[str, Any]:
        """Returns the source of a document, and index and location of its record there. Records
        that are left out are counted."""
        number = int(self._source[document])
        source = self._tokenized[number]
        index = int(self._index[document] - self._source_ends[number]) + len(source.lengths)
        return {
            "source": self.sources[number].name,
            "record_index": index // self.per_record,
            "location": source.find_place(index),
        }

    def read_slice(self, row: Segments, begin: int, end: int) -> dict[str, np.ndarray]:
        """Returns tokens, labels and positions of the tokens `begin` to `end` of a row, int32.

        They are those of the whole document: a token before a cut has its label, and positions
        continue after the cut. After the last segment is padding: token 0, label -100, position 0.
        Also `weights` and the `numbers` of the labels, float32, and a teacher's PREDICTIONS after
        each token, [tokens, width], if the documents have them.
        """
        size = end - begin
        part = {name: np.zeros(size, np.int32) for name in ("tokens", "labels", "positions")}
        part["labels"][:] = NO_LABEL
        numbers = [*self.numbers, *(["weights"] if self.has_weights else [])]
        part |= {name: np.zeros(size, np.float32) for name in numbers}
        starts = row.starts
        ends = starts + row.length
        touched = slice(np.searchsorted(ends, begin, side="right"), np.searchsorted(starts, end))
        left = np.maximum(starts[touched], begin)
        right = np.minimum(ends[touched], end)
        num_tokens = right - left
        document = row.document[touched]
        first_token = row.offset[touched] + left - starts[touched]
        num_filled = right.max(initial=begin) - begin
        positions = part["positions"][:num_filled]
        positions[:] = np.repeat((first_token - left).astype(np.int32), num_tokens)
        positions += np.arange(begin, begin + num_filled, dtype=np.int32)
        # a document's last token has no label
        num_labels = np.minimum(self.lengths[document] - 1 - first_token, num_tokens)
        # Arithmetic is vectorized over the segments: a row of 468 takes 2 ms instead of 3.3 (2
        # cores, both busy).
        segments = zip(
            self._source[document].tolist(),
            (self._start[document] + first_token).tolist(),
            (left - begin).tolist(),
            num_tokens.tolist(),
            num_labels.tolist(),
            strict=True,
        )
        for source, start, at, count, label_count in segments:
            arrays = self._arrays[source]
            part["tokens"][at : at + count] = arrays["tokens"].read(start, start + count)
            first = start + 1
            for name in ("labels", *numbers):
                part[name][at : at + label_count] = arrays[name].read(first, first + label_count)
        if self.predictions is not None:
            stored, width = self.predictions
            part[PREDICTIONS] = np.zeros((size, width), np.int32)
            firsts = self.first_tokens[document] + first_token
            for first, at, count in zip(firsts, left - begin, num_tokens, strict=True):
                values = stored.read(first * width, (first + count) * width)
                part[PREDICTIONS][at : at + count] = values.reshape(-1, width)
        if self._has_scores:
            part["labels"][:] = NO_LABEL
            last = left - begin + self.lengths[document] - 1 - first_token
            part["labels"][last[last < left - begin + num_tokens]] = 0
        return part


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
    source: TokenizedSource, row_tokens: int | None, long_documents: str, *, is_whole: bool
) -> None:
    """Checks that no document is longer than a row, unless it may be split. The documents of a pair
    are not split, because attention would not see the whole of them.
    Args: is_whole: True if documents are not cut at all, because their losses depend on it."""
    may_be_long: tuple[str, ...] = ("split", "truncate", "drop")
    if is_whole or source.per_record == 2:
        may_be_long = ("drop",) if is_whole else ("truncate", "drop")
    if row_tokens is None or long_documents in may_be_long:
        return
    too_long = np.flatnonzero(source.lengths > row_tokens)
    if len(too_long):
        first = int(too_long[0])
        raise UserError(
            f"data.long_documents = {long_documents}: {source.find_place(first)} has "
            f"{source.lengths[first]:,} tokens, but a row has {row_tokens:,}. Of this source, "
            f"{len(too_long):,} are too long. Use {errors.format_choices(may_be_long)}, or a "
            f"data.row_tokens of at least {source.lengths.max():,}.",
            is_named=True,
        )


def _check_numbers(
    source: TokenizedSource, numbers: Sequence[str], equal_numbers: Sequence[str]
) -> None:
    """Checks that all loss tokens have these numbers, and those of a document the same
    `equal_numbers`."""
    total = int(source.lengths.sum())
    labels = source.arrays.get("labels", source.arrays["tokens"])
    targets = np.flatnonzero(labels.read(0, total) != NO_LABEL)
    document = np.searchsorted(source.starts, targets, side="right") - 1
    for name in numbers:
        values = source.arrays[name].read(0, total)[targets]
        wrong = document[~np.isfinite(values)]
        problem = f"has no {name}, which the objective needs. Add them, or leave it out."
        if name in equal_numbers and not len(wrong):
            wrong = document[1:][(np.diff(values) != 0) & (np.diff(document) == 0)]
            problem = f"has different {name} of its tokens, and with ratios of trajectories "
            problem += "(objective.importance_sampling_level) must have one. Give one number."
        if len(wrong):
            raise UserError(f"{source.find_place(int(wrong[0]))}: {problem}", is_named=True)
