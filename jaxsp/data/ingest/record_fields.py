"""Reads the fields of a record under the source's names, and describes what is wrong with them."""

import json
from typing import Any

from jaxsp.config.data_schema import SourceConfig
from jaxsp.data.chat.template_text import RecordError

Record = dict[str, Any]

SHAREGPT_MESSAGE_CONFIG = (
    "fields: {role: from, content: value}, roles: {human: user, gpt: assistant}"
)

_SHAREGPT_CONFIG = SHAREGPT_MESSAGE_CONFIG.replace("{role", "{messages: conversations, role", 1)

ALPACA_HINT = (
    "Its instruction and input are one prompt in two fields: write them into one field, prompt, "
    "then format: prompt_completion, fields: {completion: output} reads it"
)

_FORMAT_HINTS = (
    ({"messages"}, "Try format: messages"),
    ({"conversations"}, f"Try format: messages, {_SHAREGPT_CONFIG}"),
    ({"prompt", "completion"}, "Try format: prompt_completion"),
    ({"instruction", "input", "output"}, ALPACA_HINT),
    (
        {"instruction", "output"},
        "Try format: prompt_completion, fields: {prompt: instruction, completion: output}",
    ),
    (
        {"question", "answer"},
        "Try format: prompt_completion, fields: {prompt: question, completion: answer}",
    ),
    ({"input_ids"}, "Try format: tokens"),
    ({"text"}, "Try format: text"),
    ({"content"}, "Try format: text, fields: {text: content}"),
)
"""Fields that a record may have, and how to read such a record."""

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
"""JSON's names of Python types."""


def get_field(record: Record, field: str, source: SourceConfig) -> tuple[str, Any]:
    """Returns the source's name of a field, and the field of a record.

    Raises: RecordError with a config that reads the record, if one is known.
    """
    name = source.fields.get(field, field)
    if record.get(name) is not None:
        return name, record[name]
    if name in record:
        raise RecordError(f"{name} is null")
    problem = f"has no {name}; it has {list_fields(record)}"
    for names, hint in _FORMAT_HINTS:
        if names <= set(record) and hint != f"Try format: {source.format}":
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
    """Returns an object without its null fields; any other value unchanged."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


def type_name(value: Any) -> str:
    return _JSON_TYPE_NAMES.get(type(value).__name__, f"a {type(value).__name__}")


def list_fields(record: Record) -> str:
    return ", ".join(sorted(map(str, record))) or "nothing"
