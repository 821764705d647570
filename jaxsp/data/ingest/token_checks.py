"""Checks of records of token ids, with their labels, masks and padding.

Source: pre-tokenized data of TRL 1.16 and of transformers' collators. Differs: padding at either
    end is dropped, and several documents in one record are refused (both would train on them).
"""

import contextlib
from typing import Any

import numpy as np

from jaxsp.config.data_schema import SourceConfig
from jaxsp.core.batch import NO_LABEL
from jaxsp.data.chat.template_text import RecordError
from jaxsp.data.ingest import known_fields, record_checks
from jaxsp.data.ingest.known_fields import Record


def has_labels(record: Record, source: SourceConfig) -> bool:
    """Returns True if a record limits which of its tokens have a loss."""
    return bool(_list_label_fields(record, source))


def _list_label_fields(record: Record, source: SourceConfig) -> list[str]:
    labels = source.names.get("labels", "labels")
    given = [labels] if record_checks.has_field(record, labels) else []
    masks = known_fields.LOSS_MASK_FIELDS
    return given + [name for name in masks if known_fields.is_given(record, name, source)]


def check_tokens(record: Record, source: SourceConfig, expects_labels: bool) -> Record:
    """Returns the ids of a record without padding, and its labels if the source has some."""
    known_fields.refuse_fields(record, known_fields.REFUSED_MEDIA, source)
    name, value = record_checks.get_field(record, "input_ids", source)
    ids = _parse_ids(value, name)
    label_fields = _list_label_fields(record, source)
    if label_fields and not expects_labels:
        raise RecordError(
            f"has {label_fields[0]}, but the source's first record has none: all must have them or "
            "none. Make two sources"
        )
    kept = _find_content(record, source, len(ids))
    _check_one_document(record, source, kept)
    if not expects_labels:
        return {"input_ids": ids[kept]}
    if not label_fields:
        record_checks.get_field(record, "labels", source)  # raises: there are none
    labels = ids.copy()
    for field in label_fields:
        if field in known_fields.LOSS_MASK_FIELDS:
            labels[_parse_mask(record, field, len(ids)) == 0] = NO_LABEL
            continue
        given = _parse_ids(record[field], field)
        if len(given) != len(ids):
            raise RecordError(
                f"{len(given)} {field} for {len(ids)} {name}: there must be one for each, not "
                "shifted, -100 where there is no loss"
            )
        labels = given.copy()
    return {"input_ids": ids[kept], "labels": labels[kept]}


def _parse_ids(value: Any, name: str) -> np.ndarray:
    value = record_checks.parse_if_string(value, name)
    with contextlib.suppress(ValueError):  # lists of different lengths
        array = np.asarray(value)
        if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
            ids = array.astype(np.int32)
            if np.array_equal(ids, array):
                return ids
    raise RecordError(f"{name} is not a list of whole numbers below 2,147,483,648")


def _parse_mask(record: Record, name: str, num_tokens: int) -> np.ndarray:
    value = np.asarray(record_checks.parse_if_string(record[name], name))
    if value.shape != (num_tokens,) or not np.isin(value, (0, 1)).all():
        raise RecordError(f"{name} is not a list of {num_tokens} zeros and ones, one for each id")
    return value


def _find_content(record: Record, source: SourceConfig, num_tokens: int) -> slice:
    """Returns the tokens that are not padding.

    Raises: RecordError if an attention mask has zeros between ones.
    """
    name = "attention_mask"
    if not known_fields.is_given(record, name, source):
        return slice(0, num_tokens)
    seen = np.flatnonzero(_parse_mask(record, name, num_tokens))
    if not len(seen):
        return slice(0, 0)
    if seen[-1] - seen[0] + 1 != len(seen):
        raise RecordError(
            f"{name} has zeros between ones: only padding at the ends can be masked. Remove these "
            f"tokens, or set {known_fields.suggest_ignoring(name)}"
        )
    return slice(int(seen[0]), int(seen[-1]) + 1)


def _check_one_document(record: Record, source: SourceConfig, kept: slice) -> None:
    """Raises: RecordError if lengths or positions are those of several documents."""
    num_tokens = kept.stop - kept.start
    expected = {"seq_lengths": [num_tokens], "position_ids": range(num_tokens)}
    for name in known_fields.DOCUMENT_BORDER_FIELDS:
        if not known_fields.is_given(record, name, source):
            continue
        values = _parse_ids(record[name], name)
        if name == "position_ids":
            values = values[kept]
        if not np.array_equal(values, expected[name]):
            raise RecordError(
                f"{name} does not match one document of {num_tokens} tokens, and a record must be "
                "one document. Write one record per document, without padding: jaxsp packs them "
                f"into rows. Or set {known_fields.suggest_ignoring(name)}"
            )
