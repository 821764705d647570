"""Formats without messages: text, token ids, and trajectories with numbers of tokens.

Source: as in chat_formats.py. Differs: padding at either end of token ids is dropped, and several
    documents in one record are refused (TRL and transformers' collators would train on them).
"""

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from jaxsp.core.errors import UserError
from jaxsp.core.units import format_count
from jaxsp.data.source import (
    TOKEN_NUMBERS,
    Record,
    Source,
    SourceRecord,
    parse_if_string,
    suggest_ignoring,
    type_name,
)

_LOSS_MASK_FIELDS = ("completion_mask", "assistant_masks", "loss_mask", "response_mask")
"""Fields of pre-tokenized records: 1 for a token with loss, 0 for one without."""

_DOCUMENT_BORDER_FIELDS = ("seq_lengths", "position_ids")
"""Fields of pre-tokenized records that may put several documents into one record."""


class Text(Source):
    """`text`."""

    format: Literal["text"] = "text"
    required = ("text",)
    other_fields = ("title",)  # it may be left out
    column = "text"
    bytes_per_worker = 2**27

    def check(self, record: SourceRecord) -> Record:
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

    def read_tokens(self, record: SourceRecord) -> tuple[slice, Record]:
        """Returns the ids of a record, its labels if it has some, and the place of those that are
        no padding."""
        from jaxsp.core.batch import NO_LABEL

        name = record.name("input_ids")
        ids = _parse_ids(record.get("input_ids"), name)
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
        label_fields = list_label_fields(record)
        if not label_fields:
            return kept, {"input_ids": ids}
        labels = ids.copy()
        for field in label_fields:
            if field in _LOSS_MASK_FIELDS:
                labels[_parse_mask(record, field, len(ids)) == 0] = NO_LABEL
                continue
            given = _parse_ids(record.get("labels"), field)
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

    def check(self, record: SourceRecord) -> Record:
        """Returns the ids of a record without padding, and its labels if it has some."""
        kept, columns = self.read_tokens(record)
        return {name: values[kept] for name, values in columns.items()}


class Trajectories(TokenIds):
    """`input_ids`, `loss_mask` (1: sampled by the model), `advantages` (one number, or one for each
    token), `old_logps` and optionally `ref_logps`."""

    format: Literal["trajectories"] = "trajectories"
    required = ("input_ids", "advantages", "old_logps")
    optional = ("labels", "ref_logps")
    numbers: ClassVar[tuple[str, ...]] = TOKEN_NUMBERS

    hints: ClassVar[Mapping[str, str]] = {
        "prompt_ids completion_ids": "Write both one after the other as input_ids, and a "
        "loss_mask: 0 for those of the prompt, 1 for others",
        "old_log_probs": "Name them in the source: fields: {old_logps: old_log_probs}",
        "old_per_token_logps": "Name them in the source: fields: {old_logps: old_per_token_logps}",
        "reward": "Compute advantages from the rewards",
        "rewards": "Compute advantages from the rewards",
    }

    def check(self, record: SourceRecord) -> Record:
        """Returns ids, labels and numbers of each token; NaN for missing `ref_logps`.

        Numbers are those of the tokens with a loss, or of all tokens, of which the others' are
        ignored. Those of tokens without a loss become 0.
        """
        from jaxsp.core.batch import NO_LABEL

        for name in self.required:
            record.get(name)  # raises: it is missing
        if not list_label_fields(record):
            raise UserError("has no loss_mask: 1 for tokens that the model sampled, 0 for others.")
        kept, columns = self.read_tokens(record)
        has_loss = np.zeros(len(columns["labels"]), bool)
        has_loss[kept] = columns["labels"][kept] != NO_LABEL
        num_loss = int(has_loss.sum())
        for name in self.numbers:
            own = record.name(name)
            given = record.find(name) if name == "ref_logps" else record.get(name)
            values = np.asarray(np.nan if given is None else _parse_numbers(given, own))
            if name == "advantages" and values.ndim == 0:
                values = np.full(num_loss, values)
            if given is not None and values.shape not in ((num_loss,), has_loss.shape):
                raise UserError(
                    f"{own} has {format_count(values.size, 'number')} for {num_loss:,} tokens with "
                    "a loss and "
                    f"{len(has_loss):,} tokens. Give one for each token with a loss, or for each "
                    "token."
                )
            if values.shape == has_loss.shape:
                values = values[has_loss]
            if given is not None and not (np.abs(values) <= np.finfo(np.float32).max).all():
                raise UserError(f"{own} has numbers that are not finite in float32.")
            if given is not None and name.endswith("_logps") and (values > 1e-3).any():
                raise UserError(f"{own} has {values.max():g}: log-probabilities are at most 0.")
            columns[name] = np.zeros(len(has_loss), np.float32)
            columns[name][has_loss] = values
        return {name: values[kept] for name, values in columns.items()}


def list_label_fields(record: SourceRecord) -> list[str]:
    """Returns the fields of a record that limit which of its tokens have a loss."""
    is_given = "labels" in record.source.fields or record.find("labels") is not None
    given = [record.name("labels")] if is_given else []
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


def _parse_numbers(value: Any, name: str) -> np.ndarray:
    """A number or a list of numbers, float64."""
    value = parse_if_string(value, name)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray("")
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iuf"):
        expected = "a number or a list" if name == "advantages" else "a list"
        raise UserError(f"{name} is not {expected} of numbers.")
    return array.astype(np.float64)
