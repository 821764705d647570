"""Records: names of their columns in the caches, and functions of their values."""

import json
import re
from typing import Any

from jaxsp.core.errors import UserError

Record = dict[str, Any]

RecordEntry = dict[str, Any]
"""Record of a source: place, problem and content of a record."""

MAX_NAMED_RECORDS = 5
"""Maximum number of bad records that a message names."""

BARE_ANSWERS = "bare_answers"
"""Column of tokenized chats: RenderedRecord.num_bare_answers of all documents of a record."""

FIRST_TOKENS = "first_tokens"
"""Column of tokenized records of two documents: number of tokens of the first; 0 if it is bad."""

FIRST_REFERENCE = "first_reference"
SECOND_REFERENCE = "second_reference"
"""Columns of preferences: log-probability of each document under the reference model, float64; NaN
if the record has none."""

IS_DESIRABLE = "is_desirable"
"""Column of unpaired records: True if the first document's completion is a good one."""

TOKEN_NUMBERS = ("advantages", "old_logps", "ref_logps")
"""Columns of trajectories: a number for each token, float32. Those of a record without `ref_logps`
are NaN."""

ASSISTANT = "assistant"

COMPLETION_FIELDS = ("completion", "mismatched_completion", "chosen", "rejected")
"""Fields of a stored record with a completion of its prompt, each of which is a document."""

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


def show(value: Any) -> str:
    """Returns a short value itself, or its type."""
    is_short = isinstance(value, bool | int | float | str) and len(repr(value)) <= 20
    return repr(value) if is_short else type_name(value)


def list_fields(record: Record) -> str:
    return ", ".join(sorted(map(str, record))) or "nothing"


def is_metadata(name: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)
    return bool(words) and words[-1].lower() in _METADATA


def holds_text(name: str, value: Any) -> bool:
    """Returns True for text, also in lists and objects; one ASCII word of other fields is none."""
    if isinstance(value, dict):
        return any(holds_text(field, item) for field, item in value.items())
    if isinstance(value, list | tuple):
        return any(holds_text(name, item) for item in value)
    if not isinstance(value, str) or not any(map(str.isalnum, value)):
        return False
    has_words = len(value.split(None, 1)) > 1 or not value.isascii()
    return name in _CONTENT or (has_words and any(map(str.isalpha, value)))


def list_examples(bad: list[RecordEntry]) -> list[str]:
    """Returns a line for each of the first bad records; one that repeats is `the same`."""
    problems = [None, *(entry["problem"] for entry in bad)]
    return [
        f"{entry['place']}: {'the same.' if entry['problem'] == last else entry['problem']}"
        for entry, last in zip(bad[:MAX_NAMED_RECORDS], problems, strict=False)
    ]
