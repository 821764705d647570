"""Base class of formats: a data source with records of one format, which it reads and checks.

Fields of a record are read under the source's names. Those with a meaning in other systems are
read, or refused by name. Others that hold text are refused, because it would be missing from
training.
"""

import abc
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Annotated, Any, ClassVar

import pydantic

from jaxsp.config.fields import HERE, ConfigSection, PositiveFloat, with_examples
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.data import records
from jaxsp.data.records import ASSISTANT, Record, RecordEntry, parse_if_string

_TEXT_ONLY = "jaxsp trains on text only. Leave the record out"

REFUSED_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT_ONLY)

SYSTEM_FIELDS = ("system", "system_prompt")
"""Fields of a record with the text of a system message."""

SHAREGPT_MESSAGE_CONFIG = (
    "fields: {role: from, content: value}, roles: {human: user, gpt: assistant}"
)

_SHAREGPT_CONFIG = SHAREGPT_MESSAGE_CONFIG.replace("{role", "{messages: conversations, role", 1)

_PAIR_HINTS = {
    "chosen rejected": "Try format: preference, with objective.type=dpo",
    "prompt completion label": "Try format: unpaired, with objective.type=kto",
    "messages rejected_response": "Write its last message as chosen, those before it as prompt, "
    "and rejected_response as rejected",
}
_HINTS = _PAIR_HINTS | {
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
format, so that only _PAIR_HINTS may help."""


_TRAJECTORY_HINTS = {
    "prompt_ids completion_ids": "Write both one after the other as input_ids, and a loss_mask: 0 "
    "for those of the prompt, 1 for others",
    "old_log_probs": "Name them in the source: fields: {old_logps: old_log_probs}",
    "old_per_token_logps": "Name them in the source: fields: {old_logps: old_per_token_logps}",
    "reward": "Compute advantages from the rewards",
    "rewards": "Compute advantages from the rewards",
}
"""Hints for records of trajectories that lack a field, by the fields that they have."""


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
    stand_ins: ClassVar[tuple[str, ...]] = ()
    """Fields of another system that are read in place of the required ones."""
    input_field: ClassVar[str | None] = None
    """Field to which text of other fields can be joined."""
    column: ClassVar[str]
    """Entry with the record's content."""
    values: ClassVar[Mapping[str, Any]] = {}
    """Columns with one value for each record, with the value of a bad record."""
    numbers: ClassVar[tuple[str, ...]] = ()
    """Stored columns with a number for each token, float32."""
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
        for name in self.ignore_fields:
            if name in self._required_columns():
                yield f"{HERE}.ignore_fields: {name} is read. Remove it."

    @property
    def role_names(self) -> dict[str, str]:
        """Roles of the chat template by the roles in records, where they differ; for chats."""
        return getattr(self, "roles", {})

    def list_columns(self, field: str) -> tuple[str, ...]:
        """Returns the names in the records of the fields from which a field is read."""
        names = self.fields.get(field, field)
        return (names,) if isinstance(names, str) else names

    def name_column(self, field: str) -> str:
        """Returns the name of a field in the records; of several, that for their joined text."""
        return " + ".join(self.list_columns(field))

    def _required_columns(self) -> set[str]:
        """Names of the required fields in the records; one that is joined with others may be
        missing."""
        return {columns[0] for columns in map(self.list_columns, self.required) if not columns[1:]}

    def known_columns(self) -> set[str]:
        """Names in the records of all fields that the format reads or refuses."""
        columns = map(self.list_columns, (*self.required, *self.optional))
        known = {*itertools.chain(*columns), *self.other_fields, *self.refused}
        return known - {*self.ignore_fields}

    def select_columns(self, names: list[str]) -> list[str]:
        """Returns the columns to read from a table; none if a required one is missing."""
        has_stand_ins = bool(self.stand_ins) and {*self.stand_ins} <= {*names}
        if not (has_stand_ins or self._required_columns() <= {*names}):
            return []
        known = self.known_columns()
        others = [name for name in names if name not in self.ignore_fields]
        return [name for name in others if name in known or not records.is_metadata(name)]

    def has_labels(self, first: Record) -> bool:
        """Returns True if all records of token ids must have labels. Args: first: first record."""
        return False

    def convert(self, record: Any, *, has_labels: bool = False) -> Record:
        """Returns the columns to store of a record.
        Args: has_labels: records of tokens have labels; all of them must, or none."""
        if not isinstance(record, dict):
            example = f"{{{json.dumps(self.required[0])}: ...}}"
            raise UserError(f"is {records.type_name(record)}, not a record such as {example}.")
        record = {name: value for name, value in record.items() if name not in self.ignore_fields}
        own = self
        if self.stand_ins and record.keys() >= {*self.stand_ins}:
            record, own = self.adapt(record)
        columns = [own.list_columns(name) for name in self.required]
        required = [[record[name] for name in names if name in record] for names in columns]
        if all(required):  # otherwise, the record has another format
            own._refuse_unread(record, required[0][0])
        values = SourceRecord(own._join_fields(record), own)
        content = own.check(values, has_labels=has_labels)
        values.refuse(self.refused)
        return content

    @abc.abstractmethod
    def check(self, record: "SourceRecord", *, has_labels: bool) -> Record:
        """Returns the columns to store of a record that has no unread text."""

    def adapt(self, record: Record) -> tuple[Record, "Source"]:
        """Returns a record of another system that has `stand_ins`, and the names of its fields."""
        return record, self

    def connect(self, entries: Iterator[RecordEntry]) -> Iterator[RecordEntry]:
        """Adds to the entries of a source what they take from each other."""
        return entries

    def find_roles(self, record: Any) -> set[str]:
        """Returns the roles of a record's messages, under the source's names."""
        return set()

    def _join_fields(self, record: Record) -> Record:
        """Joins texts that are read as one, under the name of `name_column`.
        Source: LLaMA-Factory joins Alpaca's instruction and input in the same way."""
        for field, names in self.fields.items():
            if isinstance(names, str) or not record.keys() & set(names):
                continue
            values = [record[name] for name in names if record.get(name) is not None]
            if not all(isinstance(value, str) for value in values):
                raise UserError(f"{self.name_column(field)}: only strings can be joined.")
            record = {name: value for name, value in record.items() if name not in names}
            record[self.name_column(field)] = "\n".join(filter(None, values))
        return record

    def _refuse_unread(self, record: Record, content: Any) -> None:
        """Refuses text in fields that nothing reads, unless a message of the prompt has it too.
        Args: content: value of a field that the format requires."""
        read = self.known_columns()
        unread = [
            name
            for name, value in record.items()
            if name not in read
            and not records.is_metadata(name)
            and records.holds_text(name, value)
        ]
        if not unread:
            return
        conversation = content
        with contextlib.suppress(UserError):  # text, not JSON
            conversation = parse_if_string(content, "messages")
        if isinstance(conversation, list):
            role, text = map(self.name_column, ("role", "content"))
            messages = [each for each in conversation if isinstance(each, dict)]
            texts = [
                str(each.get(text)).strip()
                for each in messages
                if self.role_names.get(str(each.get(role)), each.get(role)) != ASSISTANT
            ]
            unread = [name for name in unread if str(record[name]).strip() not in texts]
        if unread:
            raise UserError(
                f"has text in {' and '.join(unread)}, which nothing reads. Set "
                f"{self._suggest_reading(record, unread, content, read)}"
                f"{suggest_ignoring(*self.ignore_fields, *unread)}."
            )

    def _suggest_reading(
        self, record: Record, unread: list[str], content: Any, read: Collection[str]
    ) -> str:
        """Returns `fields` of the config that read all of the text; empty if there are none. None
        read text that has all other texts of the record, or a conversation with an answer."""
        texts = [text for name in read if isinstance(text := record.get(name), str) and text]
        for name in unread:
            value = record[name]
            last = value[-1] if isinstance(value, list) and value else None
            has_answer = isinstance(last, dict) and ASSISTANT in last.values()
            if has_answer or (texts and all(text in str(value) for text in texts)):
                return ""
        if self.input_field is None:
            return ""
        columns = (*self.list_columns(self.input_field), *SYSTEM_FIELDS)
        names = [name for name in record if name in unread or (name in columns and record[name])]
        values = [content, *(record[name] for name in names)]
        is_text = all(isinstance(value, str) for value in values)
        is_prompt = len(names) == 1 and all(isinstance(value, list | dict) for value in values)
        if not (is_text or is_prompt):
            return ""
        fields = self.fields | {self.input_field: names if len(names) > 1 else names[0]}
        return f"fields: {json.dumps(fields)} to train on it, or ".replace('"', "")


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
        problem = f"has no {name}; it has {records.list_fields(self.values)}."
        own = f"Try format: {self.source.format}"
        hints = _TRAJECTORY_HINTS if self.source.numbers else _HINTS
        if self.source.num_documents > 1:
            hints = _PAIR_HINTS
        for names, hint in hints.items():
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
