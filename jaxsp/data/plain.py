"""Formats without messages: text, and token ids.

Source: as in chats.py. Differs: padding at either end of token ids is dropped, and several
    documents in one record are refused (TRL and transformers' collators would train on them).
"""

import contextlib
from typing import Any, Literal

import numpy as np

from jaxsp.core.errors import UserError
from jaxsp.data.records import Record, parse_if_string, type_name
from jaxsp.data.source import Source, SourceRecord, suggest_ignoring

_LOSS_MASK_FIELDS = ("completion_mask", "assistant_masks", "loss_mask", "response_mask")
"""Fields of pre-tokenized records: 1 for a token with loss, 0 for one without."""

_DOCUMENT_BORDER_FIELDS = ("seq_lengths", "position_ids")
"""Fields of pre-tokenized records that may put several documents into one record."""


class Text(Source):
    """`text`."""

    format: Literal["text"] = "text"
    required = ("text",)
    other_fields = ("title",)  # it may be left out
    input_field = "text"
    column = "text"
    bytes_per_worker = 2**27

    def check(self, record: SourceRecord, *, has_labels: bool) -> Record:
        value = record.get("text")
        name = record.name("text")
        if not isinstance(value, str):
            raise UserError(f"{name} is {type_name(value)}, not a string.")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{name} is not Unicode ({error}).") from None
        return {self.column: value}


class TokenIds(Source):
    """Base class of formats of token ids."""

    other_fields = (
        "attention_mask",
        *_LOSS_MASK_FIELDS,
        *_DOCUMENT_BORDER_FIELDS,
    )
    column = "input_ids"
    needs_tokenizer = False

    def read_tokens(self, record: SourceRecord, *, has_labels: bool) -> tuple[slice, Record]:
        """Returns the ids of a record, its labels if the source has some, and the place of those
        that are no padding."""
        from jaxsp.core.batch import NO_LABEL

        name = record.name("input_ids")
        ids = _parse_ids(record.get("input_ids"), name)
        label_fields = list_label_fields(record)
        if label_fields and not has_labels:
            raise UserError(
                f"has {label_fields[0]}, but the source's first record has none: all must have "
                "them or none. Make two sources."
            )
        kept = slice(0, len(ids))
        mask = "attention_mask"
        if record.has(mask):
            seen = np.flatnonzero(_parse_mask(record, mask, len(ids)))
            kept = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)
            if kept.stop - kept.start != len(seen):
                raise UserError(
                    f"{mask} has zeros between ones: only padding at the ends can be masked. "
                    f"Remove these tokens, or set {suggest_ignoring(mask)}."
                )
        num_tokens = kept.stop - kept.start
        for field in filter(record.has, _DOCUMENT_BORDER_FIELDS):
            values = _parse_ids(record.values[field], field)
            is_one_document = np.array_equal(values, [num_tokens])
            if field == "position_ids":
                is_one_document = np.array_equal(values[kept], range(num_tokens))
            if not is_one_document:
                raise UserError(
                    f"{field} does not match one document of {num_tokens} tokens, and a record "
                    "must be one document. Write one record per document, without padding: jaxsp "
                    f"packs them into rows. Or set {suggest_ignoring(field)}."
                )
        if not has_labels:
            return kept, {"input_ids": ids}
        if not label_fields:
            record.get("labels")  # raises: there are none
        labels = ids.copy()
        for field in label_fields:
            if field in _LOSS_MASK_FIELDS:
                labels[_parse_mask(record, field, len(ids)) == 0] = NO_LABEL
                continue
            given = _parse_ids(record.values[field], field)
            if len(given) != len(ids):
                raise UserError(
                    f"{len(given)} {field} for {len(ids)} {name}: there must be one for each, not "
                    "shifted, -100 where there is no loss."
                )
            labels = given.copy()
        return kept, {"input_ids": ids, "labels": labels}


class Tokens(TokenIds):
    """`input_ids` and optionally `labels` (not shifted; -100: no loss) or a mask."""

    format: Literal["tokens"] = "tokens"
    required = ("input_ids",)
    optional = ("labels",)

    def has_labels(self, first: Record) -> bool:
        return "labels" in self.fields or bool(list_label_fields(SourceRecord(first, self)))

    def check(self, record: SourceRecord, *, has_labels: bool) -> Record:
        """Returns the ids of a record without padding, and its labels if the source has some."""
        kept, columns = self.read_tokens(record, has_labels=has_labels)
        return {name: values[kept] for name, values in columns.items()}


def list_label_fields(record: SourceRecord) -> list[str]:
    """Returns the fields of a record that limit which of its tokens have a loss."""
    given = [] if record.find("labels") is None else [record.name("labels")]
    return given + [name for name in _LOSS_MASK_FIELDS if record.has(name)]


def _parse_ids(value: Any, name: str) -> np.ndarray:
    value = parse_if_string(value, name)
    with contextlib.suppress(ValueError):  # lists of different lengths
        array = np.asarray(value)
        if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
            ids = array.astype(np.int32)
            if np.array_equal(ids, array):
                return ids
    raise UserError(f"{name} is not a list of whole numbers below 2,147,483,648.")


def _parse_mask(record: SourceRecord, name: str, num_tokens: int) -> np.ndarray:
    value = np.asarray(parse_if_string(record.values[name], name))
    if value.shape != (num_tokens,) or not np.isin(value, (0, 1)).all():
        raise UserError(f"{name} is not a list of {num_tokens} zeros and ones, one for each id.")
    return value
