"""Refuses text in fields of a record that nothing reads: it would be missing from training."""

import contextlib
import json
import re
from collections.abc import Collection
from typing import Any

from jaxsp.config.data_schema import SourceConfig
from jaxsp.data.chat.template_text import ASSISTANT, RecordError
from jaxsp.data.ingest import record_checks
from jaxsp.data.ingest.known_fields import SYSTEM_FIELDS, Record, suggest_ignoring
from jaxsp.data.ingest.record_checks import MESSAGE_FIELDS
from jaxsp.data.ingest.record_forms import list_columns

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


def check(record: Record, source: SourceConfig, read: Collection[str], content: Any) -> None:
    """Refuses text in other fields than `read`, unless a message of the prompt has it too.

    Args: content: value of a field that the format requires.
    Raises: RecordError with a config that reads the text, if there is one.
    """
    unread = [
        name
        for name, value in record.items()
        if name not in read and not is_metadata(name) and _holds_text(name, value)
    ]
    conversation = content
    with contextlib.suppress(RecordError):  # text, not JSON
        conversation = record_checks.parse_if_string(content, "messages")
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
        raise RecordError(
            f"has text in {' and '.join(unread)}, which nothing reads. Set "
            f"{_suggest_reading(record, source, unread, content, read)}"
            f"{suggest_ignoring(*source.ignore_fields, *unread)}"
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
