"""Checks conversations, and prompts with completions; converts them to one form, as JSON.

Source: the formats of TRL (huggingface.co/docs/trl/dataset_formats). Differs: content given as a
    list of parts becomes one string, because templates of text-only models print the list as Python
    would. Arguments of a tool call given as a string of JSON (as OpenAI's API does) become an
    object, which transformers expects: most templates would encode the string as JSON once more.
"""

import json
from typing import Any

from jaxsp.config.data_schema import SourceConfig
from jaxsp.data.chat.template_text import ASSISTANT, RecordError
from jaxsp.data.ingest import record_fields
from jaxsp.data.ingest.record_fields import Record, type_name

MESSAGE_FIELDS = ("role", "content")

_TEXT_PART = '{"type": "text", "text": ...}'


def check_messages(record: Record, source: SourceConfig, has_labels: bool) -> Record:
    name, value = record_fields.get_field(record, "messages", source)
    value = record_fields.parse_if_string(value, name)
    return _serialize({"messages": _check_conversation(value, name, source)}, record, source)


def check_completion(record: Record, source: SourceConfig, has_labels: bool) -> Record:
    is_alpaca = source.fields.get("prompt") == "instruction"
    if is_alpaca and record_fields.has_field(record, "input"):
        raise RecordError(
            "has an input beside its instruction, which would not be trained on. "
            f"{record_fields.ALPACA_HINT}"
        )
    content: Record = {}
    for field in ("prompt", "completion"):
        name, value = record_fields.get_field(record, field, source)
        if not isinstance(value, str):
            value = _check_conversation(value, name, source)
        content[field] = value
    texts = [field for field, value in content.items() if isinstance(value, str)]
    if len(texts) == 1:
        raise RecordError(
            f"only {texts[0]} is a string. Prompt and completion must be both text or both messages"
        )
    return _serialize(content, record, source)


def _serialize(content: Record, record: Record, source: SourceConfig) -> Record:
    """Writes the content, and the record's tools and template arguments, as JSON."""
    for field, kind in (("tools", list), ("chat_template_kwargs", dict)):
        name = source.fields.get(field, field)
        if not record_fields.has_field(record, name):
            continue
        value = record_fields.parse_if_string(record[name], name)
        if not isinstance(value, kind):
            raise RecordError(f"{name} is {type_name(value)}, not {type_name(kind())}")
        if field == "tools":
            for tool in value:
                if not isinstance(tool, dict):
                    raise RecordError(f"{name} contains {type_name(tool)}: each tool is an object")
        else:
            # null means that the argument is not given; in a tool's parameters, null is data
            value = record_fields.drop_nulls(value)
        if value:
            content[field] = value
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"is not Unicode ({error})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordError(f"contains a value that JSON cannot represent ({error})") from None
    return {"record": text}


def _check_conversation(value: Any, name: str, source: SourceConfig) -> list[Record]:
    """Returns messages under jaxsp's names, without null fields; nulls inside fields are data."""
    if not isinstance(value, list):
        raise RecordError(f"{name} is {type_name(value)}, not a list of messages")
    if not value:
        raise RecordError(f"{name} is empty: it needs at least one message")
    return [
        _check_message(record_fields.drop_nulls(message), f"{name}: message {number}", source)
        for number, message in enumerate(value, 1)
    ]


def _check_message(message: Any, place: str, source: SourceConfig) -> Record:
    if not isinstance(message, dict):
        raise RecordError(f"{place} is {type_name(message)}, not an object with role and content")
    role_name, content_name = (source.fields.get(name, name) for name in MESSAGE_FIELDS)
    fields = record_fields.list_fields(message)
    if role_name not in message:
        problem = f"{place} has no {role_name}; it has {fields}"
        if {"from", "value"} <= set(message):
            problem += f". Try {record_fields.SHAREGPT_MESSAGE_CONFIG}"
        raise RecordError(problem)
    role = message[role_name]
    if not isinstance(role, str):
        raise RecordError(f"{place}: {role_name} is {type_name(role)}, not the name of a role")
    if not role:
        raise RecordError(f"{place}: {role_name} is '', not the name of a role")
    checked: Record = {"role": source.roles.get(role, role)}
    calls = message.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise RecordError(f"{place}: tool_calls is {type_name(calls)}, not a list of objects")
    if calls:
        checked["tool_calls"] = [
            _parse_tool_call(call, f"{place}: tool_calls: call {number}")
            for number, call in enumerate(calls, 1)
        ]
    if content_name in message:
        checked["content"] = _join_content(message[content_name], f"{place}: {content_name}")
    elif not calls and not isinstance(message.get("function_call"), dict):
        raise RecordError(f"{place} has no {content_name} and no tool_calls; it has {fields}")
    _check_loss_flags(message, checked["role"], place)
    replaced = (role_name, content_name, "tool_calls", *checked)
    return checked | {name: value for name, value in message.items() if name not in replaced}


def _check_loss_flags(message: Record, role: str, place: str) -> None:
    """Raises: RecordError for a `weight` or `train` that cannot be followed."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise RecordError(
            f"{place}: weight is {weight!r}: it must be 0 (no loss on this message) or 1"
        )
    train = message.get("train", False)
    if train not in (0, 1):
        raise RecordError(
            f"{place}: train is {train!r}: it must be true, or false (no loss on this message)"
        )
    if train and role != ASSISTANT:
        raise RecordError(
            f"{place}: train is true, but only messages with the role {ASSISTANT} have loss. "
            "Remove it, or use data.train_on=all"
        )


def _parse_tool_call(call: Record, place: str) -> Record:
    """Returns a tool call without null fields, its arguments as an object."""
    call = record_fields.drop_nulls(call)
    if isinstance(call.get("function"), dict):
        return call | {"function": _parse_tool_call(call["function"], place)}
    if not isinstance(call.get("arguments"), str):
        return call
    arguments = record_fields.parse_if_string(call["arguments"], f"{place}: arguments")
    if not isinstance(arguments, dict):
        example = '{"city": "Rome"}'
        raise RecordError(
            f"{place}: arguments is a string of JSON with {type_name(arguments)}, not with an "
            f"object such as {example}"
        )
    return call | {"arguments": arguments}


def _join_content(value: Any, place: str) -> str:
    """Returns the content of a message as one string, from a string or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RecordError(f"{place} is {type_name(value)}, not a string")
    texts = []
    for part in value:
        fields = part if isinstance(part, dict) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            kind = f"of type {fields['type']}" if fields.get("type") else "that is not text"
            raise RecordError(f"{place} has a part {kind}: each part must be {_TEXT_PART}")
        texts.append(fields["text"])
    return "".join(texts)
