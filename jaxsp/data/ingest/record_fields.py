"""Fields of a record: read under the source's names, joined, or refused.

Fields with a meaning in other systems are read, or refused by name. Others that hold text are
refused, because it would be missing from training.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sized
from typing import Any

from jaxsp.config.data_schema import PAIR_FORMATS, SourceConfig
from jaxsp.core.errors import UserError
from jaxsp.data.chat.template_text import ASSISTANT

Record = dict[str, Any]

MESSAGE_FIELDS = ("role", "content")

SYSTEM_FIELDS = ("system", "system_prompt")
"""Fields of a record with the text of a system message."""

LOSS_MASK_FIELDS = ("completion_mask", "assistant_masks", "loss_mask")
"""Fields of pre-tokenized records: 1 for a token with loss, 0 for one without."""

DOCUMENT_BORDER_FIELDS = ("seq_lengths", "position_ids")
"""Fields of pre-tokenized records that may put several documents into one record."""

_TEXT_ONLY = "jaxsp trains on text only. Leave the record out"

REFUSED_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT_ONLY)

REFUSED_IN_MESSAGES = REFUSED_MEDIA | {
    "mask": (
        "systems disagree on whether it means a loss or none. Write weight: 0 for no loss on a "
        "message, or weight: 1"
    ),
    "train_detail": (
        "a message has a loss as a whole or none. Write weight: 0 or 1, or use format: tokens with "
        "labels"
    ),
}

REFUSED_IN_CHATS = REFUSED_MEDIA | {
    "functions": (
        "it is the older form of tools. Write each one into tools, as "
        '{"type": "function", "function": {...}}'
    ),
    "history": "earlier turns must be messages. Write them into the record's messages",
    "documents": "no template receives them. Write their text into a message",
    "loss_mask": (
        "a record has no mask of its own. Write weight: 0 into messages without loss, or use "
        "format: tokens"
    ),
}
"""Fields of a record of messages, or of prompt and completion."""

REFUSED_IN_PREFERENCES = {"margin": "no objective reads a margin of each record. Remove it"}

_OWN_PAIRS = "jaxsp computes it, because it pairs completions with other prompts in its own way"

REFUSED_IN_UNPAIRED = {"ref_logps": _OWN_PAIRS, "ref_KL_logps": _OWN_PAIRS}
"""Fields of TRL's data sets for KTO."""

IN_TEXTS = (*REFUSED_MEDIA, "title")  # the title of a document may be left out
IN_CHATS = (*SYSTEM_FIELDS, *REFUSED_IN_CHATS)
IN_TOKENS = ("attention_mask", *LOSS_MASK_FIELDS, *DOCUMENT_BORDER_FIELDS, *REFUSED_MEDIA)
"""All fields of this table in records of a format."""

SHAREGPT_MESSAGE_CONFIG = (
    "fields: {role: from, content: value}, roles: {human: user, gpt: assistant}"
)

_SHAREGPT_CONFIG = SHAREGPT_MESSAGE_CONFIG.replace("{role", "{messages: conversations, role", 1)

_PAIR_HINTS = (
    ({"chosen", "rejected"}, "Try format: preference, with objective.type=dpo"),
    ({"prompt", "completion", "label"}, "Try format: unpaired, with objective.type=kto"),
    (
        {"messages", "rejected_response"},
        "Write its last message as chosen, those before it as prompt, and rejected_response as "
        "rejected",
    ),
)

_FORMAT_HINTS = (
    ({"messages"}, "Try format: messages"),
    ({"conversations"}, f"Try format: messages, {_SHAREGPT_CONFIG}"),
    ({"prompt", "completion"}, "Try format: prompt_completion"),
    ({"instruction", "output"}, "Try format: prompt_completion"),
    (
        {"question", "answer"},
        "Try format: prompt_completion, fields: {prompt: question, completion: answer}",
    ),
    ({"input_ids"}, "Try format: tokens"),
    ({"text"}, "Try format: text"),
    ({"content"}, "Try format: text, fields: {text: content}"),
)
"""Fields that a record may have, and how to read such a record. Objectives for pairs have one
format, so that only _PAIR_HINTS may help."""

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

_ALPACA: dict[str, str | tuple[str, ...]] = {
    "prompt": ("instruction", "input"),
    "completion": "output",
}

STAND_INS = {
    "prompt_completion": ("instruction", "output"),  # Alpaca
    "preference": ("preferred_output", "non_preferred_output"),  # OpenAI
}
"""Fields of records that are read in place of those that a format requires."""

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


@dataclasses.dataclass(frozen=True)
class SourceRecord:
    """A record, or a message of one, under the names that its source has for fields."""

    values: Record
    source: SourceConfig

    def name(self, field: str) -> str:
        """Returns the source's name of a field."""
        return self.source.names.get(field, field)

    def get(self, field: str) -> Any:
        """Returns a required field.

        Raises: UserError with a config that reads the record, if one is known.
        """
        name = self.name(field)
        if self.values.get(name) is not None:
            return self.values[name]
        if name in self.values:
            raise UserError(f"{name} is null.")
        problem = f"has no {name}; it has {list_fields(self.values)}."
        own = f"Try format: {self.source.format}"
        is_pair = self.source.format in PAIR_FORMATS
        for names, hint in _PAIR_HINTS if is_pair else (*_PAIR_HINTS, *_FORMAT_HINTS):
            if names <= self.values.keys() and hint.partition(", with ")[0] != own:
                raise UserError(f"{problem} {hint}.")
        raise UserError(problem)

    def find(self, field: str) -> Any:
        """Returns an optional field; None if it is missing, or an empty cell of csv."""
        value = self.values.get(self.name(field))
        return None if isinstance(value, str) and not value else value

    def has(self, name: str) -> bool:
        """Returns True if a field is not empty, and the config does not ignore it.

        A field that the config's `fields` maps to another one has only that one's meaning.
        """
        if name in self.source.ignore_fields or name in self.source.names.values():
            return False
        value = self.values.get(name)
        return value is not None and not (isinstance(value, Sized) and len(value) == 0)

    def refuse(self, refused: Mapping[str, str]) -> None:
        """Raises: UserError for a field whose meaning jaxsp would ignore.

        Args: refused: names, and the reason with a suggestion.
        """
        for name, reason in refused.items():
            if self.has(name):
                raise UserError(f"has {name}: {reason}, or set {suggest_ignoring(name)}.")

    def find_system(self) -> tuple[str, str] | None:
        """Returns name and text of the system message that a record has beside its messages.

        Raises: UserError if it is not a string, or if there are two.
        """
        names = [name for name in SYSTEM_FIELDS if self.has(name)]
        for name in names:
            if not isinstance(self.values[name], str):
                raise UserError(
                    f"{name} is not the text of a system message. Write a string, or set "
                    f"{suggest_ignoring(name)}."
                )
        if len({self.values[name] for name in names}) > 1:
            raise UserError(
                f"{' and '.join(names)} differ. Keep one, or set {suggest_ignoring(names[1])}."
            )
        return (names[0], self.values[names[0]]) if names else None


def list_columns(source: SourceConfig, field: str) -> tuple[str, ...]:
    """Returns the names in the records of the fields from which a field is read."""
    names = source.fields.get(field, field)
    return (names,) if isinstance(names, str) else names


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


def suggest_ignoring(*names: str) -> str:
    return f"ignore_fields: [{', '.join(names)}] of the source"


def convert(record: Record, source: SourceConfig) -> tuple[Record, SourceConfig]:
    """Returns a record, and the names of its fields, also if it has the form of another system."""
    if not record.keys() >= set(STAND_INS.get(source.format, "\0")):
        return record, source
    if source.format == "prompt_completion":
        fields = {name: names for name, names in _ALPACA.items() if name not in record}
        return record, source.model_copy(update={"fields": fields | source.fields})
    prompt = parse_if_string(record.get("input"), "input") or {}
    if not isinstance(prompt, dict):
        raise UserError(f"input is {type_name(prompt)}, not an object.")
    names = dict(zip(STAND_INS["preference"], ("chosen", "rejected"), strict=True))
    others = {names.get(name, name): value for name, value in record.items() if name != "input"}
    return others | {"prompt": prompt.get("messages"), "tools": prompt.get("tools")}, source


def join_fields(record: Record, source: SourceConfig) -> SourceRecord:
    """Joins texts that are read as one, under the name that `names` has for them.

    Source: LLaMA-Factory joins Alpaca's instruction and input in the same way.
    """
    for field, names in source.fields.items():
        if isinstance(names, str) or not record.keys() & set(names):
            continue
        values = [record[name] for name in names if record.get(name) is not None]
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{source.names[field]}: only strings can be joined.")
        record = {name: value for name, value in record.items() if name not in names}
        record[source.names[field]] = "\n".join(filter(None, values))
    return SourceRecord(record, source)


def is_metadata(name: str) -> bool:
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


def refuse_unread(
    record: Record, source: SourceConfig, read: Collection[str], content: Any
) -> None:
    """Refuses text in other fields than `read`, unless a message of the prompt has it too.

    Args: content: value of a field that the format requires.
    Raises: UserError with a config that reads the text, if there is one.
    """
    unread = [
        name
        for name, value in record.items()
        if name not in read and not is_metadata(name) and _holds_text(name, value)
    ]
    conversation = content
    with contextlib.suppress(UserError):  # text, not JSON
        conversation = parse_if_string(content, "messages")
    if unread and isinstance(conversation, list):
        role, text = (source.names.get(name, name) for name in MESSAGE_FIELDS)
        messages = [each for each in conversation if isinstance(each, dict)]
        texts = [
            str(each.get(text)).strip()
            for each in messages
            if source.roles.get(str(each.get(role)), each.get(role)) != ASSISTANT
        ]
        unread = [name for name in unread if str(record[name]).strip() not in texts]
    if unread:
        raise UserError(
            f"has text in {' and '.join(unread)}, which nothing reads. Set "
            f"{_suggest_reading(record, source, unread, content, read)}"
            f"{suggest_ignoring(*source.ignore_fields, *unread)}."
        )


def _suggest_reading(
    record: Record, source: SourceConfig, unread: list[str], content: Any, read: Collection[str]
) -> str:
    """Returns `fields` of the config that read all of the text; empty if there are none.

    None read text that has all other texts of the record, or a conversation with an answer.
    """
    texts = [record[name] for name in read if isinstance(record.get(name), str) and record[name]]
    for name in unread:
        value = record[name]
        last = value[-1] if isinstance(value, list) and value else None
        has_answer = isinstance(last, dict) and ASSISTANT in last.values()
        if has_answer or (texts and all(text in str(value) for text in texts)):
            return ""
    field = "text" if source.format == "text" else "prompt"
    columns = (*list_columns(source, field), *SYSTEM_FIELDS)
    names = [name for name in record if name in unread or (name in columns and record[name])]
    values = [content, *(record[name] for name in names)]
    is_text = all(isinstance(value, str) for value in values)
    is_prompt = len(names) == 1 and all(isinstance(value, list | dict) for value in values)
    if source.format in ("messages", "tokens") or not (is_text or is_prompt):
        return ""
    fields = json.dumps(source.fields | {field: names if len(names) > 1 else names[0]})
    return f"fields: {fields} to train on it, or ".replace('"', "")
