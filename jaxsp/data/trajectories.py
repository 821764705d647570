"""Format of trajectories: token ids of a prompt and of what a model sampled, with numbers."""

from typing import Any, ClassVar, Literal

import numpy as np

from jaxsp.core.errors import UserError
from jaxsp.core.units import format_count
from jaxsp.data import plain
from jaxsp.data.plain import TokenIds
from jaxsp.data.records import TOKEN_NUMBERS, Record, parse_if_string
from jaxsp.data.source import SourceRecord


class Trajectories(TokenIds):
    """`input_ids`, `loss_mask` (1: sampled by the model), `advantages` (one number, or one for each
    token), `old_logps` and optionally `ref_logps`."""

    format: Literal["trajectories"] = "trajectories"
    required = ("input_ids", "advantages", "old_logps")
    optional = ("labels", "ref_logps")
    numbers: ClassVar[tuple[str, ...]] = TOKEN_NUMBERS

    def has_labels(self, first: Record) -> bool:
        return True

    def check(self, record: SourceRecord, *, has_labels: bool) -> Record:
        """Returns ids, labels and numbers of each token; NaN for missing `ref_logps`.

        Numbers are those of the tokens with a loss, or of all tokens, of which the others' are
        ignored. Those of tokens without a loss become 0.
        """
        from jaxsp.core.batch import NO_LABEL

        for name in self.required:
            record.get(name)  # raises: it is missing
        if not plain.list_label_fields(record):
            raise UserError("has no loss_mask: 1 for tokens that the model sampled, 0 for others.")
        kept, columns = self.read_tokens(record, has_labels=True)
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
