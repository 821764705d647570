"""Checks of records in each format, and their conversion to the form that is stored.

Source: the formats of TRL (huggingface.co/docs/trl/dataset_formats) and the data sets of its
    trainers, version 1.16. Differs:
    Content given as a list of parts becomes one string, because templates of text-only models print
    the list as Python would. Arguments of a tool call given as a string of JSON (as OpenAI's API
    does) become an object, which transformers expects: most templates would encode the string as
    JSON once more.
    KTOTrainer pairs completions with other prompts inside each batch, so that the pairs depend on
    the batch size. Here a record takes the completion of the next one.
    Padding at either end of token ids is dropped, and several documents in one record are refused
    (TRL and transformers' collators would train on them).
"""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError, at
from jaxsp.data.chat.template_text import ASSISTANT
from jaxsp.data.ingest import record_cache, record_fields
from jaxsp.data.ingest.record_cache import RecordEntry
from jaxsp.data.ingest.record_fields import (
    Record,
    SourceRecord,
    drop_nulls,
    parse_if_string,
    suggest_ignoring,
    type_name,
)

FIRST_REFERENCE = "first_reference"
SECOND_REFERENCE = "second_reference"
"""Columns of preferences: log-probability of each document under the reference model, float64; NaN
if the record has none."""

IS_DESIRABLE = "is_desirable"
"""Column of unpaired records: True if the first document's completion is a good one."""

_REFERENCE_FIELDS = {"ref_chosen_logps": FIRST_REFERENCE, "ref_rejected_logps": SECOND_REFERENCE}

PREFERENCE_OPTIONAL = ("prompt", *_REFERENCE_FIELDS)
"""Optional fields of preferences, which `ignore_fields` may list."""

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as text, as csv has them."""

_MAX_SHOWN_CHARS = 20

_LOSS_FLAGS = {
    "weight": 1,  # OpenAI
    "train": 1,  # Axolotl
    "training": 1,
    "loss": 1,  # ms-swift
    "loss_scale": 1,
    "loss_mask": 1,  # slime
    "masked": 0,  # torchtune
}
"""Fields of a message that give it a loss or none, with the value for a loss; the other is 1 or 0.
True and false count as 1 and 0."""


def check_text(record: SourceRecord, has_labels: bool) -> Record:
    record.refuse(record_fields.REFUSED_MEDIA)
    value = record.get("text")
    name = record.name("text")
    if not isinstance(value, str):
        raise UserError(f"{name} is {type_name(value)}, not a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not Unicode ({error}).") from None
    return {"text": value}


def check_messages(record: SourceRecord, has_labels: bool) -> Record:
    name = record.name("messages")
    messages = _check_conversation(parse_if_string(record.get("messages"), name), name, record)
    return _serialize({"messages": _add_system_message(messages, record)}, record)


def check_completion(record: SourceRecord, has_labels: bool) -> Record:
    return _serialize(_add_system(_read_contents(record, ("prompt", "completion")), record), record)


def check_preference(record: SourceRecord, has_labels: bool) -> Record:
    record.refuse(record_fields.REFUSED_IN_PREFERENCES)
    fields = ["chosen", "rejected"]
    suggestion = ""
    # an empty prompt is a prompt
    if record.name("prompt") in record.values:
        fields.insert(0, "prompt")
        ignoring = suggest_ignoring("prompt")
        suggestion = f". If chosen and rejected begin with the prompt, set {ignoring}"
    content = _read_contents(record, fields, suggestion=suggestion)
    prompt, chosen, rejected = (content.get(name) for name in ("prompt", "chosen", "rejected"))
    if chosen == rejected:
        raise UserError("chosen and rejected are identical. Leave the record out.")
    if prompt is None:
        content = _extract_prompt(chosen, rejected)
    elif isinstance(prompt, list):
        if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
            raise UserError(f"the prompt would be there twice{suggestion}.")
    content = _add_system(content, record)
    references = _read_references(record)
    return _serialize(content, record) | references


def _extract_prompt(chosen: Any, rejected: Any) -> Record:
    """Takes the beginning that two texts, or two conversations, have in common as their prompt.

    Each completion keeps at least one character or message. A space at the end of a text prompt
    becomes the first character of the completions, because most tokens of words begin with one.

    Source: `extract_prompt` of TRL.
    """
    shorter = min(len(chosen), len(rejected))
    if not shorter:
        raise UserError("chosen or rejected is empty, and without prompt both must begin with it.")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((index for index, (left, right) in pairs if left != right), None)
    if length is None:
        length = shorter - 1
    elif chosen[length - 1 : length] == " ":
        length -= 1
    if not length and isinstance(chosen, list):
        raise UserError(
            "chosen and rejected have no message in common before their last one, to be the "
            "prompt. Give it as prompt."
        )
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def _read_references(record: SourceRecord) -> Record:
    """Returns the log-probabilities of the reference model; NaN if there are none."""
    given = {
        field: value for field in _REFERENCE_FIELDS if (value := record.find(field)) is not None
    }
    if len(given) == 1:
        (first,) = given
        (missing,) = _REFERENCE_FIELDS.keys() - given
        raise UserError(
            f"has {record.name(first)}, and no {record.name(missing)}. Give both, or set "
            f"{suggest_ignoring(first)}."
        )
    references = dict.fromkeys(_REFERENCE_FIELDS.values(), math.nan)
    for field, value in given.items():
        with contextlib.suppress(TypeError, ValueError):
            references[_REFERENCE_FIELDS[field]] = float(value)
        if isinstance(value, bool) or not math.isfinite(references[_REFERENCE_FIELDS[field]]):
            raise UserError(f"{record.name(field)} is {_show(value)}, not a finite number.")
    return references


def check_unpaired(record: SourceRecord, has_labels: bool) -> Record:
    record.refuse(record_fields.REFUSED_IN_UNPAIRED)
    content = _read_contents(record, ("prompt", "completion"))
    value = record.get("label")
    is_desirable = _LABELS.get(str(value).strip().lower())
    if is_desirable is None:
        raise UserError(
            f"{record.name('label')} is {_show(value)}: it must be true (a desirable completion) "
            "or false."
        )
    return _serialize(_add_system(content, record), record) | {IS_DESIRABLE: is_desirable}


def _show(value: Any) -> str:
    shown = repr(value)
    is_short = isinstance(value, bool | int | float | str) and len(shown) <= _MAX_SHOWN_CHARS
    return shown if is_short else type_name(value)


def add_mismatched_completions(entries: Iterator[RecordEntry]) -> Iterator[RecordEntry]:
    """Adds to each usable record the completion of the next one, and to the last that of the first.

    KTO estimates its reference point from prompts with completions of other prompts.

    Raises: UserError if only one record can be used, with the problems of others, and if text and
        messages are mixed.
    """
    bad: list[RecordEntry] = []
    # a usable entry, and the bad ones after it
    waiting: list[RecordEntry] = []
    first: RecordEntry | None = None
    for entry in entries:
        if entry["problem"] is not None:
            bad = [*bad, entry][: record_cache.MAX_NAMED_RECORDS]
            if waiting:
                waiting.append(entry)
            else:
                yield entry
            continue
        if waiting:
            yield _add_mismatched(waiting[0], entry)
            yield from waiting[1:]
        first = first or entry
        waiting = [entry]
    assert first is not None, "a source has a usable record"
    if waiting[0] is first:
        raise UserError(
            [
                *record_cache.list_examples(bad),
                f"only one record can be used, {first['place']}: KTO pairs the prompt of a record "
                "with the completion of another. Give at least two.",
            ]
        )
    yield _add_mismatched(waiting[0], first)
    yield from waiting[1:]


def _add_mismatched(entry: RecordEntry, next_entry: RecordEntry) -> RecordEntry:
    record = json.loads(entry["record"])
    completion = json.loads(next_entry["record"])["completion"]
    if type(record["prompt"]) is not type(completion):
        raise UserError(
            f"{entry['place']}, {next_entry['place']}: one record is text, the other messages, and "
            "KTO pairs the prompt of a record with the completion of another. Make two sources."
        )
    record["mismatched_completion"] = completion
    return entry | {"record": json.dumps(record, ensure_ascii=False)}


def _read_contents(record: SourceRecord, fields: Sequence[str], *, suggestion: str = "") -> Record:
    """Returns fields of a record, all of them text, or all of them messages."""
    content: Record = {}
    for field in fields:
        value = record.get(field)
        if not isinstance(value, str):
            messages = [value] if isinstance(value, dict) else value
            value = _check_conversation(messages, record.name(field), record)
        content[field] = value
    texts = [field for field, value in content.items() if isinstance(value, str)]
    if 0 < len(texts) < len(content):
        verb = "is a string" if len(texts) == 1 else "are strings"
        others = " and ".join(field for field in content if field not in texts)
        raise UserError(
            f"{' and '.join(texts)} {verb}, {others} not. All must be text, or all messages"
            f"{suggestion}."
        )
    return content


def _add_system(content: Record, record: SourceRecord) -> Record:
    """Returns a prompt and completions with the system message that the record has beside them."""
    if isinstance(content["prompt"], list):
        content["prompt"] = _add_system_message(content["prompt"], record)
    elif system := record.find_system():
        names = record.name("prompt").replace(" + ", ", ")
        raise UserError(
            f"has {system[0]}, but its prompt is text. Set fields: {{prompt: [{system[0]}, "
            f"{names}]}}, use messages, or set {suggest_ignoring(system[0])}."
        )
    return content


def _add_system_message(messages: list[Record], record: SourceRecord) -> list[Record]:
    """Returns a record's messages after the system message that it has beside them."""
    system = record.find_system()
    if system is None:
        return messages
    name, text = system
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    if messages[0].get("content") == text:
        return messages
    raise UserError(
        f"{name} differs from the system message in the messages. Keep one, or set "
        f"{suggest_ignoring(name)}."
    )


def _serialize(content: Record, record: SourceRecord) -> Record:
    """Writes the content, and the record's tools and template arguments, as JSON."""
    record.refuse(record_fields.REFUSED_IN_CHATS)
    for field, kind in (("tools", list), ("chat_template_kwargs", dict)):
        given = record.find(field)
        if given is None:
            continue
        name = record.name(field)
        value = parse_if_string(given, name)
        if not isinstance(value, kind):
            raise UserError(f"{name} is {type_name(value)}, not {type_name(kind())}.")
        if field == "tools":
            for tool in value:
                if not isinstance(tool, dict):
                    raise UserError(f"{name} contains {type_name(tool)}: each tool is an object.")
        # a null argument is not given; in a tool's parameters, null is data
        value = drop_nulls(value)
        if value:
            content[field] = value
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"is not Unicode ({error}).") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"contains a value that JSON cannot represent ({error}).") from None
    return {"record": text}


def _check_conversation(value: Any, name: str, record: SourceRecord) -> list[Record]:
    """Returns messages under jaxsp's names, without null fields; nulls inside fields are data."""
    if not isinstance(value, list):
        raise UserError(f"{name} is {type_name(value)}, not a list of messages.")
    if not value:
        raise UserError(f"{name} is empty: it needs at least one message.")
    messages = []
    for number, message in enumerate(value, 1):
        with at(f"{name}: message {number}"):
            if not isinstance(message, dict):
                raise UserError(f"is {type_name(message)}, not an object with role and content.")
            messages.append(_check_message(SourceRecord(drop_nulls(message), record.source)))
    return messages


def _check_message(message: SourceRecord) -> Record:
    role_name, content_name = map(message.name, record_fields.MESSAGE_FIELDS)
    fields = record_fields.list_fields(message.values)
    if role_name not in message.values:
        hint = ""
        if {"from", "value"} <= message.values.keys():
            hint = f" Try {record_fields.SHAREGPT_MESSAGE_CONFIG}."
        raise UserError(f"has no {role_name}; it has {fields}.{hint}")
    role = message.values[role_name]
    if not isinstance(role, str) or not role:
        shown = "''" if isinstance(role, str) else type_name(role)
        raise UserError(f"{role_name} is {shown}, not the name of a role.")
    checked: Record = {"role": message.source.roles.get(role, role)}
    calls = message.values.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise UserError(f"tool_calls is {type_name(calls)}, not a list of objects.")
    if calls:
        checked["tool_calls"] = []
        for number, call in enumerate(calls, 1):
            with at(f"tool_calls: call {number}"):
                checked["tool_calls"].append(_parse_tool_call(call))
    if content_name in message.values:
        checked["content"] = _join_content(message.values[content_name], content_name)
    elif not calls and not isinstance(message.values.get("function_call"), dict):
        raise UserError(f"has no {content_name} and no tool_calls; it has {fields}.")
    message.refuse(record_fields.REFUSED_IN_MESSAGES)
    replaced = (role_name, content_name, "tool_calls", *checked, *_LOSS_FLAGS)
    others = {name: value for name, value in message.values.items() if name not in replaced}
    weight = {} if _has_loss(message, checked["role"]) else {"weight": 0}
    return checked | others | weight


def _has_loss(message: SourceRecord, role: str) -> bool:
    """Returns False if a flag of a message gives it no loss.

    Raises: UserError for other values than 0, 1, true and false, and for a loss on a message of
        another role than the assistant. (OpenAI gives weight 1 to all.)
    """
    has_loss = True
    words = ("false", "true")
    for name, with_loss in _LOSS_FLAGS.items():
        if not message.has(name):
            continue
        value = message.values[name]
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise UserError(
                f"{name} is {value!r}: it must be {with_loss} or {words[with_loss]}, or "
                f"{1 - with_loss} or {words[1 - with_loss]} (no loss on this message)."
            )
        if value != with_loss:
            has_loss = False
        elif role != ASSISTANT and name != "weight":
            raise UserError(
                f"{name} is {value!r}, but only messages with the role {ASSISTANT} have loss. "
                "Remove it. For data.train_on=all, which trains on all messages, set "
                f"{suggest_ignoring(name)}."
            )
    return has_loss


def _parse_tool_call(call: Record) -> Record:
    """Returns a tool call without null fields, its arguments as an object.

    A call of a function without arguments may have null or an empty string for them.
    """
    call = drop_nulls(call)
    if isinstance(call.get("function"), dict):
        return call | {"function": _parse_tool_call(call["function"])}
    arguments = call.get("arguments", "" if "name" in call else None)
    if not isinstance(arguments, str):
        return call
    arguments = parse_if_string(arguments.strip() or "{}", "arguments")
    if not isinstance(arguments, dict):
        raise UserError(
            f"arguments is a string of JSON with {type_name(arguments)}, not with an object such "
            'as {"city": "Rome"}.'
        )
    return call | {"arguments": arguments}


def _join_content(value: Any, name: str) -> str:
    """Returns the content of a message as one string, from a string or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"{name} is {type_name(value)}, not a string.")
    texts = []
    for part in value:
        fields = part if isinstance(part, dict) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            kind = f"of type {fields['type']}" if fields.get("type") else "that is not text"
            example = '{"type": "text", "text": ...}'
            raise UserError(f"{name} has a part {kind}: each part must be {example}.")
        texts.append(fields["text"])
    return "".join(texts)


def list_label_fields(record: SourceRecord) -> list[str]:
    """Returns the fields of a record that limit which of its tokens have a loss."""
    given = [] if record.find("labels") is None else [record.name("labels")]
    return given + [name for name in record_fields.LOSS_MASK_FIELDS if record.has(name)]


def check_tokens(record: SourceRecord, has_labels: bool) -> Record:
    """Returns the ids of a record without padding, and its labels if the source has some."""
    record.refuse(record_fields.REFUSED_MEDIA)
    name = record.name("input_ids")
    ids = _parse_ids(record.get("input_ids"), name)
    label_fields = list_label_fields(record)
    if label_fields and not has_labels:
        raise UserError(
            f"has {label_fields[0]}, but the source's first record has none: all must have them or "
            "none. Make two sources."
        )
    kept = _find_content(record, len(ids))
    _check_one_document(record, kept)
    if not has_labels:
        return {"input_ids": ids[kept]}
    if not label_fields:
        record.get("labels")  # raises: there are none
    labels = ids.copy()
    for field in label_fields:
        if field in record_fields.LOSS_MASK_FIELDS:
            labels[_parse_mask(record, field, len(ids)) == 0] = NO_LABEL
            continue
        given = _parse_ids(record.values[field], field)
        if len(given) != len(ids):
            raise UserError(
                f"{len(given)} {field} for {len(ids)} {name}: there must be one for each, not "
                "shifted, -100 where there is no loss."
            )
        labels = given.copy()
    return {"input_ids": ids[kept], "labels": labels[kept]}


def _parse_ids(value: Any, name: str) -> np.ndarray:
    value = parse_if_string(value, name)
    with contextlib.suppress(ValueError):  # lists of different lengths
        array = np.asarray(value)
        if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
            ids = array.astype(np.int32)
            if np.array_equal(ids, array):
                return ids
    raise UserError(f"{name} is not a list of whole numbers below 2,147,483,648.")


def _parse_mask(record: SourceRecord, name: str, num_tokens: int) -> np.ndarray:
    value = np.asarray(parse_if_string(record.values[name], name))
    if value.shape != (num_tokens,) or not np.isin(value, (0, 1)).all():
        raise UserError(f"{name} is not a list of {num_tokens} zeros and ones, one for each id.")
    return value


def _find_content(record: SourceRecord, num_tokens: int) -> slice:
    """Returns the tokens that are not padding."""
    name = "attention_mask"
    if not record.has(name):
        return slice(0, num_tokens)
    seen = np.flatnonzero(_parse_mask(record, name, num_tokens))
    if not len(seen):
        return slice(0, 0)
    if seen[-1] - seen[0] + 1 != len(seen):
        raise UserError(
            f"{name} has zeros between ones: only padding at the ends can be masked. Remove these "
            f"tokens, or set {suggest_ignoring(name)}."
        )
    return slice(int(seen[0]), int(seen[-1]) + 1)


def _check_one_document(record: SourceRecord, kept: slice) -> None:
    """Raises: UserError if lengths or positions are those of several documents."""
    num_tokens = kept.stop - kept.start
    expected = {"seq_lengths": [num_tokens], "position_ids": range(num_tokens)}
    for name in filter(record.has, record_fields.DOCUMENT_BORDER_FIELDS):
        values = _parse_ids(record.values[name], name)
        if name == "position_ids":
            values = values[kept]
        if not np.array_equal(values, expected[name]):
            raise UserError(
                f"{name} does not match one document of {num_tokens} tokens, and a record must be "
                "one document. Write one record per document, without padding: jaxsp packs them "
                f"into rows. Or set {suggest_ignoring(name)}."
            )
