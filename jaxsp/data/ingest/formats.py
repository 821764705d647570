"""What a record of each format has to hold, and what becomes of it: the fields we need, under our names and of one type.

Source: the formats of TRL (huggingface.co/docs/trl/dataset_formats). Differs: content given as a list of parts becomes one
    string, because templates of models for text alone print the list as Python would; the arguments of a tool call given as
    a string of JSON (as OpenAI's API does) become the object they are, which transformers asks for: most templates would write
    the string as JSON once more.
"""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxsp.config.data_schema import SourceConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.data.chat import template_text
from jaxsp.data.ingest.columnar import RecordColumns

FORMAT_FIELDS = {
    "text": (("text",), ()),
    "messages": (("messages",), ("tools", "chat_template_kwargs")),
    "prompt_completion": (("prompt", "completion"), ("tools", "chat_template_kwargs")),
    "tokens": (("input_ids",), ("labels",)),
}
"""The fields of a record that each format needs, and those that it may have."""

_MESSAGE_FIELDS = ("role", "content")

_SHAREGPT_CONFIG = "fields: {messages: conversations, role: from, content: value}, roles: {human: user, gpt: assistant}"

_FIELD_HINTS = (
    # what a record has, and the config that reads it
    ({"messages"}, "format: messages"),
    ({"conversations"}, f"format: messages, {_SHAREGPT_CONFIG}"),
    ({"prompt", "completion"}, "format: prompt_completion"),
    ({"instruction", "input", "output"}, ""),
    (
        {"instruction", "output"},
        "format: prompt_completion, fields: {prompt: instruction, completion: output}",
    ),
    (
        {"question", "answer"},
        "format: prompt_completion, fields: {prompt: question, completion: answer}",
    ),
    ({"input_ids"}, "format: tokens"),
    ({"text"}, "format: text"),
    ({"content"}, "format: text, fields: {text: content}"),
)

_ALPACA_HINT = (
    "Its instruction and input are one prompt in two fields: write them into one field, prompt, then "
    "format: prompt_completion, fields: {completion: output} reads it"
)

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
"""Types as one who wrote JSON calls them."""

Record = dict[str, Any]
RecordCheck = Callable[[Any], Record]
"""From a record to the columns that are kept of it. Raises: Bad."""


class FormatError(Exception):
    """Why a record cannot be used; it is said together with the record's place."""


def resolve_columns(source: SourceConfig, *, field: str) -> RecordColumns:
    """What a source's records need to have, under their own names.

    Raises: UserError for names in `fields` that the format does not know or that are one, and for `roles` that it has not.
    """
    required, optional = FORMAT_FIELDS[source.format]
    chat = "tools" in optional
    known = (*required, *optional, *(_MESSAGE_FIELDS if chat else ()))
    group = field.rpartition(".")[0]
    for name in source.fields:
        if name not in known:
            raise UserError(
                f"{group}.fields: format {source.format} has no {name}. Use {errors.format_choices(known)} "
                f"for what the records call otherwise.{errors.did_you_mean(name, known)}"
            )
    for names in ((*required, *optional), _MESSAGE_FIELDS if chat else ()):
        asked = [source.fields.get(name, name) for name in names]
        if twice := [name for number, name in enumerate(asked) if name in asked[:number]]:
            both = " and ".join(
                ours for ours, theirs in zip(names, asked, strict=True) if theirs == twice[0]
            )
            raise UserError(
                f"{group}.fields: {both} are both read from {twice[0]}. Name a field of its own for each."
            )
    if source.roles and not chat:
        raise UserError(
            f"{group}.roles: format {source.format} has no roles. Leave it out, or use format: messages."
        )
    theirs = source.fields.get
    return RecordColumns(
        required=tuple(theirs(name, name) for name in required),
        optional=tuple(theirs(name, name) for name in optional),
    )


def make_checker(source: SourceConfig, *, has_labels: bool) -> RecordCheck:
    """The check of a source's records.

    Args: labels: whether records of tokens have labels: all of them, or none.
    """

    def check(record: Any) -> Record:
        if not isinstance(record, dict):
            raise FormatError(
                f"is {_type_name(record)}, not a record such as {{{json.dumps(FORMAT_FIELDS[source.format][0][0])}: ...}}"
            )
        return makes(record, source, has_labels)

    makes = {
        "text": _check_text,
        "messages": _check_messages,
        "prompt_completion": _check_completion,
        "tokens": _check_tokens,
    }[source.format]
    return check


def find_roles(record: Any, source: SourceConfig) -> set[str]:
    """The roles of a record's messages, as the source calls them."""
    found = set()
    for ours in ("messages", "prompt", "completion"):
        value = record.get(source.fields.get(ours, ours)) if isinstance(record, dict) else None
        with contextlib.suppress(
            ValueError, RecursionError
        ):  # a prompt is no JSON; what should be is judged elsewhere
            value = json.loads(value) if isinstance(value, str) else value
        messages = value if isinstance(value, list) else []
        found |= {
            str(one.get(source.fields.get("role", "role")))
            for one in messages
            if isinstance(one, dict)
        }
    return found


def has_field(record: Record, name: str) -> bool:
    """Whether a record has a field that it need not have; an empty cell of csv is none."""
    value = record.get(name)
    return value is not None and not (isinstance(value, str) and value == "")


def _check_text(record: Record, source: SourceConfig, labels: bool) -> Record:
    name, value = _get_field(record, "text", source)
    if not isinstance(value, str):
        raise FormatError(f"{name} is {_type_name(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"{name} is not Unicode ({error})") from None
    return {"text": value}


def _check_messages(record: Record, source: SourceConfig, labels: bool) -> Record:
    name, value = _get_field(record, "messages", source)
    # csv and parquet hold conversations as a string of JSON
    value = _parse_json(value, name) if isinstance(value, str) else value
    return _serialize_chat({"messages": _check_conversation(value, name, source)}, record, source)


def _check_completion(record: Record, source: SourceConfig, labels: bool) -> Record:
    made: Record = {}
    if source.fields.get("prompt") == "instruction" and has_field(record, "input"):
        raise FormatError(
            f"has an input beside its instruction, which would not be learned from. {_ALPACA_HINT}"
        )
    for ours in ("prompt", "completion"):
        name, value = _get_field(record, ours, source)
        made[ours] = value if isinstance(value, str) else _check_conversation(value, name, source)
    if len({type(value) for value in made.values()}) > 1:
        texts = [ours for ours, value in made.items() if isinstance(value, str)]
        raise FormatError(
            f"only {texts[0]} is a string. Prompt and completion are both text, or both messages"
        )
    return _serialize_chat(made, record, source)


def _serialize_chat(made: Record, record: Record, source: SourceConfig) -> Record:
    """The record as JSON, with what a template may be told beside the messages."""
    for ours, kind in (("tools", list), ("chat_template_kwargs", dict)):
        name = source.fields.get(ours, ours)
        if not has_field(record, name):
            continue
        value = record[name]
        value = _parse_json(value, name) if isinstance(value, str) else value
        if not isinstance(value, kind):
            raise FormatError(
                f"{name} is {_type_name(value)}, not {_JSON_TYPE_NAMES[kind.__name__]}"
            )
        if wrong := [tool for tool in value if ours == "tools" and not isinstance(tool, dict)]:
            raise FormatError(f"{name} holds {_type_name(wrong[0])}: each tool is an object")
        if value:
            # a null tool parameter is data; a null argument of a template is one that is not given
            made[ours] = value if ours == "tools" else _drop_nulls(value)
    try:
        text = json.dumps(made, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"is not Unicode ({error})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"holds what is no JSON ({error})") from None
    return {"record": text}


def _check_conversation(value: Any, name: str, source: SourceConfig) -> list[Record]:
    """Messages by our names, without fields that are null; nulls inside them are data."""
    if not isinstance(value, list):
        raise FormatError(f"{name} is {_type_name(value)}, not a list of messages")
    if not value:
        raise FormatError(f"{name} is empty: there is nothing to learn from")
    return [
        _check_message(_drop_nulls(message), f"{name}: message {number}", source)
        for number, message in enumerate(value, 1)
    ]


def _check_message(message: Any, place: str, source: SourceConfig) -> Record:
    if not isinstance(message, dict):
        raise FormatError(f"{place} is {_type_name(message)}, not an object with role and content")
    role_name, content_name = (source.fields.get(name, name) for name in _MESSAGE_FIELDS)
    if role_name not in message:
        way_out = (
            f". Try {_SHAREGPT_CONFIG.replace('messages: conversations, ', '')}"
            if {"from", "value"} <= set(message)
            else ""
        )
        raise FormatError(f"{place} has no {role_name}; it has {_list_fields(message)}{way_out}")
    role = message[role_name]
    if not isinstance(role, str) or not role:
        raise FormatError(
            f"{place}: {role_name} is {repr(role) if role == '' else _type_name(role)}, not the name of a role"
        )
    made: Record = {"role": source.roles.get(role, role)}
    calls = message.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise FormatError(f"{place}: tool_calls is {_type_name(calls)}, not a list of objects")
    if calls:
        made["tool_calls"] = [
            _parse_tool_call(_drop_nulls(call), f"{place}: tool_calls: call {number}")
            for number, call in enumerate(calls, 1)
        ]
    if content_name in message:
        made["content"] = _join_content(message[content_name], f"{place}: {content_name}")
    elif not calls and not isinstance(message.get("function_call"), dict):
        raise FormatError(
            f"{place} has no {content_name}, and no tool_calls; it has {_list_fields(message)}"
        )
    _check_loss_flags(message, made["role"], place)
    named = (role_name, content_name, *made)
    return made | {
        name: value
        for name, value in message.items()
        if name not in named and (name != "tool_calls" or value)
    }


def _check_loss_flags(message: Record, role: str, place: str) -> None:
    """Raises: Bad for a `weight` or `train` that cannot be followed."""
    weight, train = message.get("weight", 1), message.get("train", False)
    if weight not in (0, 1):
        raise FormatError(
            f"{place}: weight is {weight!r}: it must be 0 (no loss on this turn) or 1"
        )
    if train not in (0, 1):
        raise FormatError(
            f"{place}: train is {train!r}: it must be true, or false (no loss on this turn)"
        )
    if train and role != template_text.ASSISTANT:
        raise FormatError(
            f"{place}: train is true, and only turns of the role {template_text.ASSISTANT} are learned from. "
            "Leave it out, or use data.train_on=all"
        )


def _parse_tool_call(call: Record, place: str) -> Record:
    """A tool call whose arguments are an object."""
    if isinstance(call.get("function"), dict):
        return call | {"function": _parse_tool_call(_drop_nulls(call["function"]), place)}
    if not isinstance(call.get("arguments"), str):
        return call
    arguments = _parse_json(call["arguments"], f"{place}: arguments")
    if not isinstance(arguments, dict):
        raise FormatError(
            f"{place}: arguments is a string of JSON that is {_type_name(arguments)}, not an object such as "
            + '{"city": "Rome"}'
        )
    return call | {"arguments": arguments}


def _join_content(value: Any, place: str) -> str:
    """What a message says, of one string or of parts that are text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FormatError(f"{place} is {_type_name(value)}, not a string")
    for part in value:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            what = (
                f"of type {part['type']}"
                if isinstance(part, dict) and part.get("type")
                else "that is no text"
            )
            raise FormatError(
                f"{place} has a part {what}: only text is learned, "
                + '{"type": "text", "text": ...}'
            )
    return "".join(part["text"] for part in value)


def _check_tokens(record: Record, source: SourceConfig, labels: bool) -> Record:
    name, value = _get_field(record, "input_ids", source)
    made = {"input_ids": _parse_ids(value, name)}
    labels_name = source.fields.get("labels", "labels")
    if labels:
        made["labels"] = _parse_ids(_get_field(record, "labels", source)[1], labels_name)
        if len(made["labels"]) != len(made["input_ids"]):
            raise FormatError(
                f"{len(made['labels'])} {labels_name} for {len(made['input_ids'])} {name}: "
                "there has to be one for each, not shifted, -100 where there is no loss"
            )
    elif has_field(record, labels_name):
        raise FormatError(
            f"has {labels_name} and the source's first record has none: all have them or none, as two sources"
        )
    return made


def _parse_ids(value: Any, name: str) -> np.ndarray:
    value = _parse_json(value, name) if isinstance(value, str) else value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths are no array
        array = np.array(None)
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        ids = array.astype(np.int32)
        if np.array_equal(ids, array):
            return ids
    raise FormatError(f"{name} is not a list of whole numbers below 2,147,483,648")


def _get_field(record: Record, ours: str, source: SourceConfig) -> tuple[str, Any]:
    """What a record calls a field, and the field. Raises: Bad saying what would read the record, where that is known."""
    name = source.fields.get(ours, ours)
    if record.get(name) is not None:
        return name, record[name]
    if name in record:
        raise FormatError(f"{name} is null")
    reads = next(
        (
            words
            for names, words in _FIELD_HINTS
            if names <= set(record) and words != f"format: {source.format}"
        ),
        None,
    )
    way_out = "" if reads is None else f". {f'Try {reads}' if reads else _ALPACA_HINT}"
    raise FormatError(f"has no {name}; it has {_list_fields(record)}{way_out}")


def _parse_json(value: str, name: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is a string, and not one of JSON ({error})") from None


def _drop_nulls(value: Any) -> Any:
    """An object without its fields that are null; any other value as it is."""
    return (
        {name: one for name, one in value.items() if one is not None}
        if isinstance(value, dict)
        else value
    )


def _type_name(value: Any) -> str:
    return _JSON_TYPE_NAMES.get(type(value).__name__, f"a {type(value).__name__}")


def _list_fields(record: Record) -> str:
    return ", ".join(sorted(map(str, record))) or "nothing"
