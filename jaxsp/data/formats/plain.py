"""Formats without messages: text, and token ids.

Source: as in chats.py. Differs: padding at either end of token ids is dropped, and several
    documents in one record are refused (TRL and transformers' collators would train on them).
"""

import contextlib
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import numpy as np

from jaxsp.core.errors import UserError
from jaxsp.data.formats.records import Record, parse_if_string, type_name
from jaxsp.data.formats.source import Source, SourceRecord, suggest_ignoring

_LOSS_MASK_FIELDS = ("completion_mask", "assistant_masks", "loss_mask")
"""Fields of pre-tokenized records: 1 for a token with loss, 0 for one without."""

_DOCUMENT_BORDER_FIELDS = ("seq_lengths", "position_ids")
"""Fields of pre-tokenized records that may put several documents into one record."""


class Text(Source):
    """`text`."""

    format: Literal["text"] = "text"
    required: ClassVar[tuple[str, ...]] = ("text",)
    other_fields: ClassVar[tuple[str, ...]] = ("title",)  # it may be left out
    input_field: ClassVar[str | None] = "text"
    column: ClassVar[str] = "text"
    bytes_per_worker: ClassVar[int] = 2**27

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


class Tokens(Source):
    """`input_ids` and optionally `labels` (not shifted; -100: no loss) or a mask."""

    format: Literal["tokens"] = "tokens"
    required: ClassVar[tuple[str, ...]] = ("input_ids",)
    optional: ClassVar[tuple[str, ...]] = ("labels",)
    other_fields: ClassVar[tuple[str, ...]] = (
        "attention_mask",
        *_LOSS_MASK_FIELDS,
        *_DOCUMENT_BORDER_FIELDS,
    )
    column: ClassVar[str] = "input_ids"
    needs_tokenizer: ClassVar[bool] = False

    def stored_columns(self, first_records: Iterable[Record]) -> Record:
        """Adds `labels` if the first record or `fields` has them."""
        first = SourceRecord(next(iter(first_records), {}), self)
        has_labels = "labels" in self.fields or _list_label_fields(first)
        names = ("input_ids", "labels") if has_labels else ("input_ids",)
        return dict.fromkeys(names, np.zeros(0, np.int32))

    def check(self, record: SourceRecord, *, has_labels: bool) -> Record:
        """Returns the ids of a record without padding, and its labels if the source has some."""
        from jaxsp.core.batch import NO_LABEL

        name = record.name("input_ids")
        ids = _parse_ids(record.get("input_ids"), name)
        label_fields = _list_label_fields(record)
        if label_fields and not has_labels:
            raise UserError(
                f"has {label_fields[0]}, but the source's first record has none: all must have "
                "them or none. Make two sources."
            )
        kept = _find_content(record, len(ids))
        _check_one_document(record, kept)
        if not has_labels:
            return {"input_ids": ids[kept]}
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
        return {"input_ids": ids[kept], "labels": labels[kept]}


def _list_label_fields(record: SourceRecord) -> list[str]:
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


def _find_content(record: SourceRecord, num_tokens: int) -> slice:
    """Returns the tokens that are not padding."""
    name = "attention_mask"
    if not record.has(name):
        return slice(0, num_tokens)
    seen = np.flatnonzero(_parse_mask(record, name, num_tokens))
    if not len(seen):
        return slice(0, 0)
    if seen[-1] - seen[0] + 1 != len(seen):
        raise UserError(
            f"{name} has zeros between ones: only padding at the ends can be masked. Remove these "
            f"tokens, or set {suggest_ignoring(name)}."
        )
    return slice(int(seen[0]), int(seen[-1]) + 1)


def _check_one_document(record: SourceRecord, kept: slice) -> None:
    """Raises: UserError if lengths or positions are those of several documents."""
    num_tokens = kept.stop - kept.start
    expected = {"seq_lengths": [num_tokens], "position_ids": range(num_tokens)}
    for name in filter(record.has, _DOCUMENT_BORDER_FIELDS):
        values = _parse_ids(record.values[name], name)
        if name == "position_ids":
            values = values[kept]
        if not np.array_equal(values, expected[name]):
            raise UserError(
                f"{name} does not match one document of {num_tokens} tokens, and a record must be "
                "one document. Write one record per document, without padding: jaxsp packs them "
                f"into rows. Or set {suggest_ignoring(name)}."
            )
