"""Base class of formats: a data source with records of one format, which it reads and checks.

Fields of a record are read under the source's names. Those with a meaning in other systems are
read, or refused by name. Others that hold text are refused, because it would be missing from
training.
"""

import abc
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Annotated, Any, ClassVar

import pydantic

from jaxsp.config.fields import HERE, ConfigSection, PositiveFloat, with_examples
from jaxsp.core import errors
from jaxsp.core.errors import UserError

Record = dict[str, Any]

RecordEntry = dict[str, Any]
"""Record of a source: its place, its problem or None, and its content."""

ASSISTANT = "assistant"

COMPLETION_FIELDS = ("completion", "mismatched_completion", "chosen", "rejected")
"""Fields of a stored record with a completion of its prompt, each of which is a document."""

FIRST_TOKENS = "first_tokens"
"""Column of records of two documents: number of tokens of the first."""

BARE_ANSWERS = "bare_answers"
"""Column of chats: RenderedRecord.num_bare_answers of all documents of a record."""

FIRST_REFERENCE = "first_reference"
SECOND_REFERENCE = "second_reference"
"""Columns of preferences: log-probability of each document under the reference model, float64; NaN
if the record has none."""

IS_DESIRABLE = "is_desirable"
"""Column of unpaired records: True if the first document's completion is a good one."""

TOKEN_NUMBERS = ("advantages", "old_logps", "ref_logps")
"""Arrays of trajectories: a number for each token, float32. Those of a record without `ref_logps`
are NaN."""

_JSON_TYPE_NAMES = {
    "str": "a string",
    "dict": "an object",
    "list": "a list",
    "ndarray": "a list of numbers",
    "NoneType": "null",
    "bool": "true or false",
    "int": "a number",
    "float": "a number",
}

_METADATA = frozenset(
    "annotator author authors categories category class config created dataset date difficulty "
    "domain dump file filename hash id ids index info lang language languages level license link "
    "meta metadata model name origin path rank rating ratings repo score scores source sources "
    "split subject subset tag tags time timestamp topic type updated uri url urls version".split()
)
"""Last words of names of fields with metadata, such as `prompt_id`."""

_CONTENT = frozenset(
    "answer chosen completion content context input instruction output prompt query question "
    "rejected response value".split()
)
"""Names of fields whose content is text even if it is a number or one word."""


def parse_if_string(value: Any, name: str) -> Any:
    """Parses a value that is a string of JSON, as csv and parquet hold lists and objects."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is a string that is not JSON ({error}).") from None


def drop_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


def type_name(value: Any) -> str:
    return _JSON_TYPE_NAMES.get(type(value).__name__, f"a {type(value).__name__}")


def list_fields(record: Record) -> str:
    return ", ".join(sorted(map(str, record))) or "nothing"


def _is_metadata(name: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)
    return bool(words) and words[-1].lower() in _METADATA


def _holds_text(name: str, value: Any) -> bool:
    """Returns True for text, also in lists and objects; one ASCII word of other fields is none."""
    if isinstance(value, dict):
        return any(_holds_text(field, item) for field, item in value.items())
    if isinstance(value, list | tuple):
        return any(_holds_text(name, item) for item in value)
    if not isinstance(value, str) or not any(map(str.isalnum, value)):
        return False
    has_words = len(value.split(None, 1)) > 1 or not value.isascii()
    return name in _CONTENT or (has_words and any(map(str.isalpha, value)))


_TEXT_ONLY = "jaxsp trains on text only. Leave the record out"

REFUSED_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT_ONLY)

SYSTEM_FIELDS = ("system", "system_prompt")
"""Fields of a record with the text of a system message."""

SHAREGPT_MESSAGE_CONFIG = (
    "fields: {role: from, content: value}, roles: {human: user, gpt: assistant}"
)

_SHAREGPT_CONFIG = SHAREGPT_MESSAGE_CONFIG.replace("{role", "{messages: conversations, role", 1)

PAIR_HINTS = {
    "chosen rejected": "Try format: preference, with objective.type=dpo",
    "prompt completion label": "Try format: unpaired, with objective.type=kto",
    "messages rejected_response": "Write its last message as chosen, those before it as prompt, "
    "and rejected_response as rejected",
}
_HINTS = PAIR_HINTS | {
    "messages": "Try format: messages",
    "conversations": f"Try format: messages, {_SHAREGPT_CONFIG}",
    "prompt completion": "Try format: prompt_completion",
    "instruction output": "Try format: prompt_completion",
    "question answer": "Try format: prompt_completion, fields: {prompt: question, "
    "completion: answer}",
    "input_ids advantages": "Try format: trajectories, with objective.type=policy",
    "input_ids": "Try format: tokens",
    "text": "Try format: text",
    "content": "Try format: text, fields: {text: content}",
}
"""Fields that a record may have, and how to read such a record. Objectives for pairs have one
format, so that only PAIR_HINTS may help."""


def suggest_ignoring(*names: str) -> str:
    return f"ignore_fields: [{', '.join(names)}] of the source"


class Source(ConfigSection, abc.ABC):
    """One data source: files, a saved data set, or a data set on the hub."""

    source: Annotated[str, with_examples("notes/*.txt", min_length=1)]
    """Files, folder or hub data set to read. Files: a path, a glob or a URL (s3:// or gs://, also
    with a glob) of .jsonl or .json (lines, or one array), .csv, .tsv or plain text (one document
    per file), also compressed as .gz or .zst; or of .parquet or .arrow. Folder: one saved by
    `datasets`. Otherwise the name of a data set on the hub. `{stdlib}` stands for the folder of
    Python's standard library."""
    format: str
    """Content of a record, as in TRL. An assistant message with `weight: 0`, `train: false` or the
    like has no loss."""
    name: Annotated[str | None, with_examples("books", min_length=1)] = None
    """Name in the metrics and the banner. null: the source as written."""
    weight: Annotated[PositiveFloat | None, with_examples(0.7)] = None
    """Fraction of the trained tokens, relative to the weights of the other sources in data.train. A
    source is repeated as often as its weight requires. Set it for all sources or for none. Without
    weights, an epoch is all documents once; with weights, set run.steps."""
    split: Annotated[str | None, with_examples("train", min_length=1)] = None
    """Split of a hub data set or of a saved folder, or a slice of one in the syntax of `datasets`:
    train[:95%], train[95%:], train[100:200]. The only split of files is train. null: the only
    split, or train."""
    subset: Annotated[str | None, with_examples("en", min_length=1)] = None
    """Configuration of a hub data set that has several."""
    revision: Annotated[str | None, with_examples("main", min_length=1)] = None
    """Branch, tag or commit of a hub data set. null: the latest."""
    fields: Annotated[
        dict[str, str | Annotated[tuple[str, ...], pydantic.Field(min_length=1, strict=False)]],
        with_examples("{messages: conversations, role: from, content: value}"),
    ] = {}  # noqa: RUF012 - pydantic copies it
    """Names in the records for fields of the format, where they differ. Fields of a format: text;
    messages or prompt and completion, tools, chat_template_kwargs; chosen, rejected,
    ref_chosen_logps, ref_rejected_logps; label; input_ids, labels; advantages, old_logps,
    ref_logps. Fields of a message: role, content. A list of names, such as
    {prompt: [instruction, input]}, joins their texts with a line
    break; missing and empty ones are left out."""
    ignore_fields: Annotated[tuple[str, ...], with_examples("[history]", strict=False)] = ()
    """Fields of the records, or of their messages, to ignore. By default, jaxsp refuses a field
    that it does not read if the field holds text or has a meaning in another system."""

    required: ClassVar[tuple[str, ...]]
    """Fields that a record must have."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Fields that a record may have."""
    message_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of a record's messages."""
    other_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that are read under their own names, or may be left out."""
    refused: ClassVar[Mapping[str, str]] = REFUSED_MEDIA
    """Fields whose meaning jaxsp would ignore, and the reason with a suggestion."""
    hints: ClassVar[Mapping[str, str]] = _HINTS
    """Suggestions for a record that lacks a field, by the fields that it has."""
    column: ClassVar[str]
    """Entry with the record's content."""
    values: ClassVar[Mapping[str, Any]] = {}
    """Columns with one value for each record, with the value of a bad record."""
    numbers: ClassVar[tuple[str, ...]] = ()
    """Stored arrays with a number for each token, float32."""
    bytes_per_worker: ClassVar[int] = 2**25
    """Bytes of records that are worth a tokenization worker, which takes 3 to 8 s to start. Without
    workers, the tokenizer's threads use all cores too, except while Python renders templates. (40
    MB of text on 2 cores: 10 s without workers, 17 s with.)"""
    needs_tokenizer: ClassVar[bool] = True
    is_chat: ClassVar[bool] = False
    """True for JSON of messages, or of prompt and completions."""
    needs_template: ClassVar[bool] = False
    num_documents: ClassVar[int] = 1
    """Documents of a record; of two, only completions have a loss."""
    has_common_loss_start: ClassVar[bool] = False
    """The loss of all documents of a record begins at the same token."""

    def find_problems(self) -> Iterator[str]:
        fields = (*self.required, *self.optional)
        known = (*fields, *self.message_fields)
        for name in self.fields:
            if name not in known:
                yield (
                    f"{HERE}.fields: format {self.format} has no {name}. Use "
                    f"{errors.format_choices(known)}.{errors.did_you_mean(name, known)}"
                )
        for names in (fields, self.message_fields):
            readers: dict[str, str] = {}
            for name in names:
                for column in self.list_columns(name):
                    first = readers.setdefault(column, name)
                    if first != name:
                        yield (
                            f"{HERE}.fields: {first} and {name} are both read from {column}. Give "
                            "each a field of its own."
                        )

    def list_columns(self, field: str) -> tuple[str, ...]:
        """Returns the names in the records of the fields from which a field is read."""
        names = self.fields.get(field, field)
        return (names,) if isinstance(names, str) else names

    def name_column(self, field: str) -> str:
        """Returns the name of a field in the records; of several, that for their joined text."""
        return " + ".join(self.list_columns(field))

    def known_columns(self) -> set[str]:
        """Names in the records of all fields that the format reads or refuses."""
        columns = map(self.list_columns, (*self.required, *self.optional))
        known = {*itertools.chain(*columns), *self.other_fields, *self.refused}
        return known - {*self.ignore_fields}

    def select_columns(self, names: Sequence[str]) -> list[str]:
        """Returns the columns to read from a table: those that are known or may hold text."""
        known = self.known_columns()
        others = [name for name in names if name not in self.ignore_fields]
        return [name for name in others if name in known or not _is_metadata(name)]

    def convert(self, record: Any) -> Record:
        """Returns the columns to store of a record. Raises: UserError for a bad one."""
        if not isinstance(record, dict):
            example = f"{{{json.dumps(self.required[0])}: ...}}"
            raise UserError(f"is {type_name(record)}, not a record such as {example}.")
        record = {name: value for name, value in record.items() if name not in self.ignore_fields}
        record = self.adapt(record)
        values = SourceRecord(self._join_fields(record), self)
        content = self.check(values)
        values.refuse(self.refused)
        known = self.known_columns()
        unread = [
            name
            for name, value in record.items()
            if name not in known and not _is_metadata(name) and _holds_text(name, value)
        ]
        if unread and self.is_chat:  # a prompt may be there twice, separately and in the messages
            stored = [x for x in json.loads(content[self.column]).values() if isinstance(x, list)]
            texts = [
                str(message.get("content")).strip()
                for message in itertools.chain(*stored)
                if message.get("role", ASSISTANT) != ASSISTANT
            ]
            unread = [name for name in unread if str(record[name]).strip() not in texts]
        if unread:
            raise UserError(
                f"has text in {' and '.join(unread)}, which nothing reads. Name it in fields of "
                "the source to train on it, or set "
                f"{suggest_ignoring(*self.ignore_fields, *unread)}."
            )
        return content

    @abc.abstractmethod
    def check(self, record: "SourceRecord") -> Record:
        """Returns the columns to store of a record."""

    def adapt(self, record: Record) -> Record:
        """Returns a record of another system under this format's names."""
        return record

    def connect(self, entries: Iterator[RecordEntry]) -> Iterator[RecordEntry]:
        """Adds to the entries of a source what they take from each other."""
        return entries

    def _join_fields(self, record: Record) -> Record:
        """Joins texts that are read as one, under the name of `name_column`."""
        for field, names in self.fields.items():
            if not isinstance(names, str) and record.keys() & set(names):
                others = {name: value for name, value in record.items() if name not in names}
                record = others | {self.name_column(field): join_texts(record, names)}
        return record


def join_texts(record: Record, names: Sequence[str]) -> str:
    """Joins texts of a record with line breaks.
    Source: LLaMA-Factory joins Alpaca's instruction and input in the same way."""
    values = [record[name] for name in names if record.get(name) is not None]
    if not all(isinstance(value, str) for value in values):
        raise UserError(f"{' + '.join(names)}: only strings can be joined.")
    return "\n".join(filter(None, values))


@dataclasses.dataclass(frozen=True)
class SourceRecord:
    """A record, or a message of one, under the names that its source has for fields."""

    values: Record
    source: Source

    def name(self, field: str) -> str:
        """Returns the source's name of a field."""
        return self.source.name_column(field)

    def get(self, field: str) -> Any:
        """Returns a required field."""
        name = self.name(field)
        if self.values.get(name) is not None:
            return self.values[name]
        if name in self.values:
            raise UserError(f"{name} is null.")
        problem = f"has no {name}; it has {list_fields(self.values)}."
        own = f"Try format: {self.source.format}"
        for names, hint in self.source.hints.items():
            if self.values.keys() >= {*names.split()} and hint.partition(", with ")[0] != own:
                raise UserError(f"{problem} {hint}.")
        raise UserError(problem)

    def find(self, field: str) -> Any:
        """Returns an optional field; None if it is missing, or an empty cell of csv."""
        value = self.values.get(self.name(field))
        return None if isinstance(value, str) and not value else value

    def has(self, name: str) -> bool:
        """Returns True if a field is not empty, and the config does not ignore it. A field that the
        config's `fields` maps to another one has only that one's meaning."""
        value = self.values.get(name)
        if value is None or (isinstance(value, Sized) and len(value) == 0):
            return False
        return name not in (*self.source.ignore_fields, *map(self.name, self.source.fields))

    def refuse(self, refused: Mapping[str, str]) -> None:
        """Refuses fields whose meaning jaxsp would ignore. Args: refused: the reason for each."""
        for name, reason in refused.items():
            if self.has(name):
                raise UserError(f"has {name}: {reason}, or set {suggest_ignoring(name)}.")
