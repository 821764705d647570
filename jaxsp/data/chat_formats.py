"""Formats of conversations: messages, a prompt with its completion, and records of two documents.

Of a record with two documents, only the completions have a loss.

Source: the formats of TRL (huggingface.co/docs/trl/dataset_formats) and the data sets of its
    trainers, version 1.16. Differs:
    Content given as a list of parts becomes one string, because templates of text-only models print
    the list as Python would. Arguments of a tool call given as a string of JSON (as OpenAI's API
    does) become an object, which transformers expects: most templates would encode the string as
    JSON once more.
    KTOTrainer pairs completions with other prompts inside each batch, so that the pairs depend on
    the batch size. Here a record takes the completion of the next one.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from jaxsp.config.fields import with_examples
from jaxsp.core.errors import UserError, at
from jaxsp.data.source import (
    ASSISTANT,
    FIRST_REFERENCE,
    IS_DESIRABLE,
    PAIR_HINTS,
    REFUSED_MEDIA,
    SECOND_REFERENCE,
    SHAREGPT_MESSAGE_CONFIG,
    SYSTEM_FIELDS,
    Record,
    RecordEntry,
    Source,
    SourceRecord,
    drop_nulls,
    join_texts,
    list_fields,
    parse_if_string,
    suggest_ignoring,
    type_name,
)

_REFERENCE_FIELDS = {"ref_chosen_logps": FIRST_REFERENCE, "ref_rejected_logps": SECOND_REFERENCE}

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as text, as csv has them."""

_OWN_PAIRS = "jaxsp computes it, because it pairs completions with other prompts in its own way"


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

_REFUSED_IN_MESSAGES = REFUSED_MEDIA | {
    "mask": (
        "systems disagree on whether it means a loss or none. Write weight: 0 for no loss on a "
        "message, or weight: 1"
    ),
    "train_detail": (
        "a message has a loss as a whole or none. Write weight: 0 or 1, or use format: tokens with "
        "labels"
    ),
}


class Chat(Source):
    """Records of messages, or of prompts and completions, stored as JSON under jaxsp's names."""

    # pydantic copies the default
    roles: Annotated[dict[str, str], with_examples("{gpt: assistant}")] = {}  # noqa: RUF012
    """Roles of the chat template for roles in the records, where they differ."""

    optional: ClassVar[tuple[str, ...]] = ("tools", "chat_template_kwargs")
    message_fields = ("role", "content")
    other_fields: ClassVar[tuple[str, ...]] = SYSTEM_FIELDS
    refused: ClassVar[Mapping[str, str]] = REFUSED_MEDIA | {
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
    column = "record"
    is_chat = True

    def read_content(self, record: SourceRecord) -> Record:
        """Returns the messages, or the prompt and its completions."""
        return read_contents(record, ("prompt", "completion"))

    def read_values(self, record: SourceRecord) -> Record:
        """Returns the columns of `values`."""
        return {}

    def check(self, record: SourceRecord) -> Record:
        content = self.read_content(record)
        _add_system(content, record)
        values = self.read_values(record)
        for field, kind in (("tools", list), ("chat_template_kwargs", dict)):
            given = record.find(field)
            if given is None:
                continue
            name = record.name(field)
            value = parse_if_string(given, name)
            if not isinstance(value, kind):
                raise UserError(f"{name} is {type_name(value)}, not {type_name(kind())}.")
            for tool in value if field == "tools" else ():
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
        return {self.column: text} | values


class Messages(Chat):
    """`messages`, each with `role` and `content`, and optionally `tools`."""

    format: Literal["messages"] = "messages"
    required = ("messages",)
    needs_template = True

    def read_content(self, record: SourceRecord) -> Record:
        name = record.name("messages")
        value = parse_if_string(record.get("messages"), name)
        return {"messages": _check_conversation(value, name, record)}


class PromptCompletion(Chat):
    """`prompt` and `completion`, both text or both messages."""

    format: Literal["prompt_completion"] = "prompt_completion"
    required = ("prompt", "completion")

    def adapt(self, record: Record) -> Record:
        """Returns a record of Alpaca's fields under this format's names."""
        alpaca = {"prompt": ("instruction", "input"), "completion": ("output",)}
        if record.keys() >= {"instruction", "output"}:
            for field, names in alpaca.items():
                if field not in record and field not in self.fields:
                    others = {name: value for name, value in record.items() if name not in names}
                    record = others | {field: join_texts(record, names)}
        return record


class Preference(Chat):
    """`chosen` and `rejected`, and `prompt` unless both begin with it."""

    format: Literal["preference"] = "preference"
    required = ("chosen", "rejected")
    optional = ("prompt", *_REFERENCE_FIELDS, *Chat.optional)
    other_fields = ("prompt", *_REFERENCE_FIELDS, *SYSTEM_FIELDS)
    refused: ClassVar[Mapping[str, str]] = {
        "margin": "no objective reads a margin of each record. Remove it",
        **Chat.refused,
    }
    hints = PAIR_HINTS
    num_documents = 2
    values: ClassVar[Mapping[str, Any]] = {FIRST_REFERENCE: math.nan, SECOND_REFERENCE: math.nan}
    has_common_loss_start = True

    def adapt(self, record: Record) -> Record:
        """Returns a record of OpenAI's fields under this format's names."""
        names = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
        if not record.keys() >= names.keys():
            return record
        prompt = parse_if_string(record.get("input"), "input") or {}
        if not isinstance(prompt, dict):
            raise UserError(f"input is {type_name(prompt)}, not an object.")
        others = {names.get(name, name): value for name, value in record.items() if name != "input"}
        return others | {"prompt": prompt.get("messages"), "tools": prompt.get("tools")}

    def read_content(self, record: SourceRecord) -> Record:
        fields: tuple[str, ...] = self.required
        suggestion = ""
        # an empty prompt is a prompt
        if record.name("prompt") in record.values:
            fields = ("prompt", *fields)
            ignoring = suggest_ignoring("prompt")
            suggestion = f". If chosen and rejected begin with the prompt, set {ignoring}"
        content = read_contents(record, fields, suggestion=suggestion)
        chosen = content["chosen"]
        rejected = content["rejected"]
        if chosen == rejected:
            raise UserError("chosen and rejected are identical. Leave the record out.")
        prompt = content.get("prompt")
        if prompt is None:
            return _extract_prompt(chosen, rejected)
        has_messages = isinstance(prompt, list)
        if has_messages and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
            raise UserError(f"the prompt would be there twice{suggestion}.")
        return content

    def read_values(self, record: SourceRecord) -> Record:
        """Returns the log-probabilities of the reference model; NaN if there are none."""
        given = [field for field in _REFERENCE_FIELDS if record.find(field) is not None]
        if len(given) == 1:
            (missing,) = _REFERENCE_FIELDS.keys() - given
            raise UserError(
                f"has {record.name(given[0])}, and no {record.name(missing)}. Give both, or set "
                f"{suggest_ignoring(given[0])}."
            )
        references = {**self.values}
        for field in given:
            value = record.find(field)
            try:
                number = math.nan if isinstance(value, bool) else float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise UserError(f"{record.name(field)} is {_show(value)}, not a finite number.")
            references[_REFERENCE_FIELDS[field]] = number
        return references


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


class Unpaired(Chat):
    """`prompt`, `completion` and `label` (true: a desirable completion)."""

    format: Literal["unpaired"] = "unpaired"
    required = ("prompt", "completion", "label")
    refused: ClassVar[Mapping[str, str]] = {
        "ref_logps": _OWN_PAIRS,  # of TRL's data sets for KTO
        "ref_KL_logps": _OWN_PAIRS,
        **Chat.refused,
    }
    hints = PAIR_HINTS
    num_documents = 2
    values: ClassVar[Mapping[str, Any]] = {IS_DESIRABLE: False}

    def read_values(self, record: SourceRecord) -> Record:
        value = record.get("label")
        is_desirable = _LABELS.get(str(value).strip().lower())
        if is_desirable is None:
            raise UserError(
                f"{record.name('label')} is {_show(value)}: it must be true (a desirable "
                "completion) or false."
            )
        return {IS_DESIRABLE: is_desirable}

    def connect(self, entries: Iterator[RecordEntry]) -> Iterator[RecordEntry]:
        """Adds to each usable record the completion of the next one, and to the last that of the
        first: KTO estimates its reference point from prompts with completions of other prompts."""
        entries, later = itertools.tee(entries)
        usable = (entry for entry in later if entry["problem"] is None)
        first = next(usable, {})
        following = itertools.chain(usable, [first])
        for entry in entries:
            if entry["problem"] is None:
                next_entry = next(following)
                if next_entry is entry:
                    raise UserError(
                        f"only one record can be used, {entry['place']}: KTO pairs the prompt of a "
                        "record with the completion of another. Give at least two."
                    )
                _add_mismatched(entry, next_entry)
            yield entry


def _show(value: Any) -> str:
    """Returns a short value itself, or its type."""
    is_short = isinstance(value, bool | int | float | str) and len(repr(value)) <= 20
    return repr(value) if is_short else type_name(value)


def _add_mismatched(entry: RecordEntry, next_entry: RecordEntry) -> None:
    record = json.loads(entry["record"])
    completion = json.loads(next_entry["record"])["completion"]
    if type(record["prompt"]) is not type(completion):
        raise UserError(
            f"{entry['place']}, {next_entry['place']}: one record is text, the other messages, and "
            "KTO pairs the prompt of a record with the completion of another. Make two sources."
        )
    entry["record"] = json.dumps(record | {"mismatched_completion": completion}, ensure_ascii=False)


def read_contents(record: SourceRecord, fields: Sequence[str], *, suggestion: str = "") -> Record:
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


def _add_system(content: Record, record: SourceRecord) -> None:
    """Adds the system message that a record has beside its messages to them."""
    texts = {name: record.values[name] for name in SYSTEM_FIELDS if record.has(name)}
    if not texts:
        return
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(
                f"{name} is not the text of a system message. Write a string, or set "
                f"{suggest_ignoring(name)}."
            )
    if len({*texts.values()}) > 1:
        raise UserError(
            f"{' and '.join(texts)} differ. Keep one, or set {suggest_ignoring([*texts][1])}."
        )
    name, text = next(iter(texts.items()))
    messages = content.get("messages", content.get("prompt"))
    if not isinstance(messages, list):
        columns = record.name("prompt").replace(" + ", ", ")
        raise UserError(
            f"has {name}, but its prompt is text. Set fields: {{prompt: [{name}, {columns}]}}, "
            f"use messages, or set {suggest_ignoring(name)}."
        )
    if messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": text})
    elif messages[0].get("content") != text:
        raise UserError(
            f"{name} differs from the system message in the messages. Keep one, or set "
            f"{suggest_ignoring(name)}."
        )


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
    role_name, content_name = map(message.name, message.source.message_fields)
    fields = list_fields(message.values)
    if role_name not in message.values:
        hint = ""
        if {"from", "value"} <= message.values.keys():
            hint = f" Try {SHAREGPT_MESSAGE_CONFIG}."
        raise UserError(f"has no {role_name}; it has {fields}.{hint}")
    role = message.values[role_name]
    if not isinstance(role, str) or not role:
        shown = "''" if isinstance(role, str) else type_name(role)
        raise UserError(f"{role_name} is {shown}, not the name of a role.")
    checked: Record = {"role": getattr(message.source, "roles", {}).get(role, role)}
    calls = message.values.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
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
    message.refuse(_REFUSED_IN_MESSAGES)
    replaced = (role_name, content_name, "tool_calls", *checked, *_LOSS_FLAGS)
    others = {name: value for name, value in message.values.items() if name not in replaced}
    weight = {} if _has_loss(message, checked["role"]) else {"weight": 0}
    return checked | others | weight


def _has_loss(message: SourceRecord, role: str) -> bool:
    """Returns False if a flag of a message gives it no loss. Flags for a loss on other roles than
    the assistant are refused, except weight: OpenAI gives weight 1 to all."""
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
    """Returns a tool call without null fields, its arguments as an object. A call of a function
    without arguments may have null or an empty string for them."""
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
