"""Formats of records: required fields, checks, and how each format is stored and tokenized."""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxsp.config.data_schema import SourceConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.data.chat import template_text
from jaxsp.data.ingest import record_checks, record_fields
from jaxsp.data.ingest.columnar import RecordColumns
from jaxsp.data.ingest.record_cache import RecordEntry
from jaxsp.data.ingest.record_checks import FIRST_REFERENCE, IS_DESIRABLE, SECOND_REFERENCE
from jaxsp.data.ingest.record_fields import Record, SourceRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A format of records, as in TRL."""

    name: str
    """Value of `format` in the config."""
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    known: tuple[str, ...]
    """Other fields, which are read or refused because other systems give them a meaning."""
    check: Callable[[SourceRecord, bool], Record]
    """Converts (record, has_labels) to the columns to store. Raises UserError."""
    column: str = "record"
    """Stored column with the record's content."""
    bytes_per_worker: int = 2**25
    """Bytes of records that are worth a tokenization worker."""
    needs_template: bool = False
    num_documents: int = 1
    """Documents of a record."""
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Stored columns with one value for each record, with the value of a bad record."""
    connect: Callable[[Iterator[RecordEntry]], Iterator[RecordEntry]] = iter
    """Adds to the entries of a source what they take from each other."""
    has_common_loss_start: bool = False
    """The loss of all documents of a record begins at the same token."""

    @property
    def is_text(self) -> bool:
        return self.column == "text"

    @property
    def is_tokenized(self) -> bool:
        return self.column == "input_ids"

    @property
    def is_chat(self) -> bool:
        return self.column == "record"


BARE_ANSWERS = "bare_answers"
"""Column of tokenized chats: RenderedRecord.num_bare_answers of all documents of a record."""

FIRST_TOKENS = "first_tokens"
"""Column of tokenized records of two documents: number of tokens of the first; 0 if it is bad."""

REFERENCES = (FIRST_REFERENCE, SECOND_REFERENCE)
"""Columns of tokenized preference records: log-probabilities that the data give, or NaN."""

_CHAT_OPTIONAL = ("tools", "chat_template_kwargs")

# A worker takes 3 to 8 s to start. Without workers, the tokenizer's threads use all cores too,
# except for a tenth of the time with text, and longer with templates, which Python renders. (40 MB
# of text on 2 cores: 10 s without workers, 17 s with.)
FORMATS = {
    record_format.name: record_format
    for record_format in (
        Format(
            name="text",
            required=("text",),
            known=record_fields.IN_TEXTS,
            check=record_checks.check_text,
            column="text",
            bytes_per_worker=2**27,
        ),
        Format(
            name="messages",
            required=("messages",),
            optional=_CHAT_OPTIONAL,
            known=record_fields.IN_CHATS,
            check=record_checks.check_messages,
            needs_template=True,
        ),
        Format(
            name="prompt_completion",
            required=("prompt", "completion"),
            optional=_CHAT_OPTIONAL,
            known=record_fields.IN_CHATS,
            check=record_checks.check_completion,
        ),
        Format(
            name="preference",
            required=("chosen", "rejected"),
            optional=(*record_checks.PREFERENCE_OPTIONAL, *_CHAT_OPTIONAL),
            known=(
                *record_checks.PREFERENCE_OPTIONAL,
                *record_fields.IN_CHATS,
                *record_fields.REFUSED_IN_PREFERENCES,
            ),
            check=record_checks.check_preference,
            num_documents=2,
            values={FIRST_REFERENCE: math.nan, SECOND_REFERENCE: math.nan},
            has_common_loss_start=True,
        ),
        Format(
            name="unpaired",
            required=("prompt", "completion", "label"),
            optional=_CHAT_OPTIONAL,
            known=(*record_fields.IN_CHATS, *record_fields.REFUSED_IN_UNPAIRED),
            check=record_checks.check_unpaired,
            num_documents=2,
            values={IS_DESIRABLE: False},
            connect=record_checks.add_mismatched_completions,
        ),
        Format(
            name="tokens",
            required=("input_ids",),
            optional=("labels",),
            known=record_fields.IN_TOKENS,
            check=record_checks.check_tokens,
            column="input_ids",
        ),
    )
}


def resolve_columns(source: SourceConfig) -> RecordColumns:
    """Returns the fields to read from a source's records, under the source's names.

    Raises: UserError for unknown names in `fields`, for required ones in `ignore_fields`, for two
        fields read from one, and for `roles` of a format without roles.
    """
    record_format = FORMATS[source.format]
    fields = (*record_format.required, *record_format.optional)
    message_fields = record_fields.MESSAGE_FIELDS if record_format.is_chat else ()
    known = (*fields, *message_fields)
    for name in source.fields:
        if name not in known:
            raise UserError(
                f"fields: format {source.format} has no {name}. Use "
                f"{errors.format_choices(known)}.{errors.did_you_mean(name, known)}"
            )
    for names in (fields, message_fields):
        readers: dict[str, str] = {}
        for name in names:
            for column in record_fields.list_columns(source, name):
                first = readers.setdefault(column, name)
                if first != name:
                    raise UserError(
                        f"fields: {first} and {name} are both read from {column}. Give "
                        "each a field of its own."
                    )
    if source.roles and not record_format.is_chat:
        raise UserError(
            f"roles: format {source.format} has no roles. Remove it, or use format: messages."
        )
    # a field that is joined with others may be missing
    columns = [record_fields.list_columns(source, name) for name in fields]
    required = [column[0] for column in columns[: len(record_format.required)] if not column[1:]]
    for name in source.ignore_fields:
        if name in required:
            raise UserError(f"ignore_fields: {name} is read. Remove it.")
    others = dict.fromkeys((*itertools.chain(*columns), *record_format.known))
    return RecordColumns(
        required=tuple(required),
        optional=tuple(
            name for name in others if name not in required and name not in source.ignore_fields
        ),
        stand_ins=record_fields.STAND_INS.get(source.format, ("\0",)),
        is_checked=lambda name: (
            name not in source.ignore_fields and not record_fields.is_metadata(name)
        ),
    )


def check_record(record: Any, source: SourceConfig, *, has_labels: bool) -> Record:
    """Returns the columns to store of a record.

    Args: has_labels: records of tokens have labels; all of them must, or none.
    Raises: UserError if the record cannot be used.
    """
    record_format = FORMATS[source.format]
    if not isinstance(record, dict):
        example = f"{{{json.dumps(record_format.required[0])}: ...}}"
        raise UserError(f"is {record_fields.type_name(record)}, not a record such as {example}.")
    record = {name: value for name, value in record.items() if name not in source.ignore_fields}
    record, source = record_fields.convert(record, source)
    columns = {
        name: record_fields.list_columns(source, name)
        for name in (*record_format.required, *record_format.optional)
    }
    required = [
        [record[column] for column in columns[name] if column in record]
        for name in record_format.required
    ]
    if all(required):  # otherwise, the record has another format
        read = {*itertools.chain(*columns.values()), *record_format.known}
        record_fields.refuse_unread(record, source, read, required[0][0])
    return record_format.check(record_fields.join_fields(record, source), has_labels)


def find_roles(record: Any, source: SourceConfig) -> set[str]:
    """Returns the roles of a record's messages, under the source's names."""
    role_name = source.names.get("role", "role")
    roles = set()
    for field in ("messages", "prompt", *template_text.COMPLETION_FIELDS):
        value = record.get(source.names.get(field, field)) if isinstance(record, dict) else None
        with contextlib.suppress(UserError):  # text, or an error that check_record reports
            value = record_fields.parse_if_string(value, field)
        value = [value] if isinstance(value, dict) else value
        if isinstance(value, list):
            messages = [message for message in value if isinstance(message, dict)]
            roles |= {str(message.get(role_name)) for message in messages}
    return roles
