"""Checks of records, and their conversion to the form that is stored.

Source: the formats of TRL (huggingface.co/docs/trl/dataset_formats). Differs: content given as a
    list of parts becomes one string, because templates of text-only models print the list as Python
    would. Arguments of a tool call given as a string of JSON (as OpenAI's API does) become an
    object, which transformers expects: most templates would encode the string as JSON once more.
"""

import json
from collections.abc import Sequence
from typing import Any

from jaxsp.config.data_schema import PAIR_FORMATS, SourceConfig
from jaxsp.data.chat.template_text import RecordError
from jaxsp.data.ingest import known_fields
from jaxsp.data.ingest.known_fields import Record

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


def get_field(record: Record, field: str, source: SourceConfig) -> tuple[str, Any]:
    """Returns the source's name of a field, and the field of a record.

    Raises: RecordError with a config that reads the record, if one is known.
    """
    name = source.names.get(field, field)
    if record.get(name) is not None:
        return name, record[name]
    if name in record:
        raise RecordError(f"{name} is null")
    problem = f"has no {name}; it has {list_fields(record)}"
    hints = _PAIR_HINTS if source.format in PAIR_FORMATS else (*_PAIR_HINTS, *_FORMAT_HINTS)
    for names, hint in hints:
        if names <= set(record) and hint.partition(", with ")[0] != f"Try format: {source.format}":
            raise RecordError(f"{problem}. {hint}")
    raise RecordError(problem)


def has_field(record: Record, name: str) -> bool:
    """Returns True if a record has an optional field; an empty cell of csv does not count."""
    value = record.get(name)
    return value is not None and not (isinstance(value, str) and value == "")


def parse_if_string(value: Any, name: str) -> Any:
    """Parses a value that is a string of JSON, as csv and parquet hold lists and objects."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name} is a string that is not JSON ({error})") from None


def drop_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


def type_name(value: Any) -> str:
    return _JSON_TYPE_NAMES.get(type(value).__name__, f"a {type(value).__name__}")


def list_fields(record: Record) -> str:
    return ", ".join(sorted(map(str, record))) or "nothing"


def check_text(record: Record, source: SourceConfig, has_labels: bool) -> Record:
    known_fields.refuse_fields(record, known_fields.REFUSED_MEDIA, source)
    name, value = get_field(record, "text", source)
    if not isinstance(value, str):
        raise RecordError(f"{name} is {type_name(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{name} is not Unicode ({error})") from None
    return {"text": value}


MESSAGE_FIELDS = ("role", "content")


def check_messages(record: Record, source: SourceConfig, has_labels: bool) -> Record:
    name, value = get_field(record, "messages", source)
    messages = _check_conversation(parse_if_string(value, name), name, source)
    content = {"messages": known_fields.add_system(messages, record, source)}
    return serialize(content, record, source)


def check_completion(record: Record, source: SourceConfig, has_labels: bool) -> Record:
    content = read_contents(record, ("prompt", "completion"), source)
    return serialize(add_system(content, record, source), record, source)


def read_contents(
    record: Record, fields: Sequence[str], source: SourceConfig, *, suggestion: str = ""
) -> Record:
    """Returns fields of a record, all of them text, or all of them messages.

    Raises: RecordError if they are not, with the suggestion.
    """
    content: Record = {}
    for field in fields:
        name, value = get_field(record, field, source)
        if not isinstance(value, str):
            messages = [value] if isinstance(value, dict) else value
            value = _check_conversation(messages, name, source)
        content[field] = value
    texts = [field for field, value in content.items() if isinstance(value, str)]
    if 0 < len(texts) < len(content):
        verb = "is a string" if len(texts) == 1 else "are strings"
        others = " and ".join(field for field in content if field not in texts)
        raise RecordError(
            f"{' and '.join(texts)} {verb}, {others} not. All must be text, or all messages"
            f"{suggestion}"
        )
    return content


def add_system(content: Record, record: Record, source: SourceConfig) -> Record:
    """Returns a prompt and completions with the system message that the record has beside them.

    Raises: RecordError if they are text.
    """
    if isinstance(content["prompt"], list):
        content["prompt"] = known_fields.add_system(content["prompt"], record, source)
    elif system := known_fields.find_system(record, source):
        names = source.names.get("prompt", "prompt").replace(" + ", ", ")
        raise RecordError(
            f"has {system[0]}, but its prompt is text. Set fields: {{prompt: [{system[0]}, "
            f"{names}]}}, use messages, or set {known_fields.suggest_ignoring(system[0])}"
        )
    return content


def serialize(content: Record, record: Record, source: SourceConfig) -> Record:
    """Writes the content, and the record's tools and template arguments, as JSON."""
    known_fields.refuse_fields(record, known_fields.REFUSED_IN_CHATS, source)
    for field, kind in (("tools", list), ("chat_template_kwargs", dict)):
        name = source.names.get(field, field)
        if not has_field(record, name):
            continue
        value = parse_if_string(record[name], name)
        if not isinstance(value, kind):
            raise RecordError(f"{name} is {type_name(value)}, not {type_name(kind())}")
        if field == "tools":
            for tool in value:
                if not isinstance(tool, dict):
                    raise RecordError(f"{name} contains {type_name(tool)}: each tool is an object")
        # a null argument is not given; in a tool's parameters, null is data
        value = drop_nulls(value)
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
        _check_message(drop_nulls(message), f"{name}: message {number}", source)
        for number, message in enumerate(value, 1)
    ]


def _check_message(message: Any, place: str, source: SourceConfig) -> Record:
    if not isinstance(message, dict):
        raise RecordError(f"{place} is {type_name(message)}, not an object with role and content")
    role_name, content_name = (source.names.get(name, name) for name in MESSAGE_FIELDS)
    fields = list_fields(message)
    if role_name not in message:
        problem = f"{place} has no {role_name}; it has {fields}"
        if {"from", "value"} <= set(message):
            problem += f". Try {SHAREGPT_MESSAGE_CONFIG}"
        raise RecordError(problem)
    role = message[role_name]
    if not isinstance(role, str) or not role:
        shown = "''" if isinstance(role, str) else type_name(role)
        raise RecordError(f"{place}: {role_name} is {shown}, not the name of a role")
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
    known_fields.refuse_fields(message, known_fields.REFUSED_IN_MESSAGES, source, place=f"{place} ")
    replaced = (role_name, content_name, "tool_calls", *checked)
    others = known_fields.take_loss_flags(message, checked["role"], source, place)
    return checked | {name: value for name, value in others.items() if name not in replaced}


def _parse_tool_call(call: Record, place: str) -> Record:
    """Returns a tool call without null fields, its arguments as an object.

    A call of a function without arguments may have null or an empty string for them.
    """
    call = drop_nulls(call)
    if isinstance(call.get("function"), dict):
        return call | {"function": _parse_tool_call(call["function"], place)}
    arguments = call.get("arguments", "" if "name" in call else None)
    if not isinstance(arguments, str):
        return call
    arguments = parse_if_string(arguments.strip() or "{}", f"{place}: arguments")
    if not isinstance(arguments, dict):
        raise RecordError(
            f"{place}: arguments is a string of JSON with {type_name(arguments)}, not with an "
            'object such as {"city": "Rome"}'
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
            example = '{"type": "text", "text": ...}'
            raise RecordError(f"{place} has a part {kind}: each part must be {example}")
        texts.append(fields["text"])
    return "".join(texts)
