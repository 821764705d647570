"""Fields of a record, other than its content, that have a meaning in other systems.

Each is read, or refused by name. Others that hold text are refused by unread_fields.py.
"""

from collections.abc import Mapping, Sized
from typing import Any

from jaxsp.config.data_schema import SourceConfig
from jaxsp.data.chat.template_text import ASSISTANT, RecordError

Record = dict[str, Any]

SYSTEM_FIELDS = ("system", "system_prompt")
"""Fields of a record with the text of a system message."""

LOSS_MASK_FIELDS = ("completion_mask", "assistant_masks", "loss_mask")
"""Fields of pre-tokenized records: 1 for a token with loss, 0 for one without."""

DOCUMENT_BORDER_FIELDS = ("seq_lengths", "position_ids")
"""Fields of pre-tokenized records that may put several documents into one record."""

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


def is_given(record: Mapping[str, Any], name: str, source: SourceConfig) -> bool:
    """Returns True if a record has a field that is not empty and that the config does not ignore.

    A field that the config's `fields` maps to another one has only that one's meaning.
    """
    if name in source.ignore_fields or name in source.names.values():
        return False
    value = record.get(name)
    return value is not None and not (isinstance(value, Sized) and len(value) == 0)


def refuse_fields(
    record: Mapping[str, Any], refused: Mapping[str, str], source: SourceConfig, *, place: str = ""
) -> None:
    """Raises: RecordError for a field whose meaning jaxsp would ignore.

    Args: refused: names, and the reason with a suggestion.
    """
    for name, reason in refused.items():
        if is_given(record, name, source):
            raise RecordError(f"{place}has {name}: {reason}, or set {suggest_ignoring(name)}")


def suggest_ignoring(*names: str) -> str:
    return f"ignore_fields: [{', '.join(names)}] of the source"


def find_system(record: Mapping[str, Any], source: SourceConfig) -> tuple[str, str] | None:
    """Returns name and text of the system message that a record has beside its messages.

    Raises: RecordError if it is not a string, or if there are two.
    """
    names = [name for name in SYSTEM_FIELDS if is_given(record, name, source)]
    for name in names:
        if not isinstance(record[name], str):
            raise RecordError(
                f"{name} is not the text of a system message. Write a string, or set "
                f"{suggest_ignoring(name)}"
            )
    if len({record[name] for name in names}) > 1:
        raise RecordError(
            f"{' and '.join(names)} differ. Keep one, or set {suggest_ignoring(names[1])}"
        )
    return (names[0], record[names[0]]) if names else None


def add_system(
    messages: list[Record], record: Mapping[str, Any], source: SourceConfig
) -> list[Record]:
    """Returns a record's messages after the system message that it has beside them.

    Raises: RecordError if they begin with another one.
    """
    system = find_system(record, source)
    if system is None:
        return messages
    name, text = system
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    if messages[0].get("content") == text:
        return messages
    raise RecordError(
        f"{name} differs from the system message in the messages. Keep one, or set "
        f"{suggest_ignoring(name)}"
    )


def take_loss_flags(message: Record, role: str, source: SourceConfig, place: str) -> Record:
    """Returns a message's fields with `weight: 0` for no loss, in place of all such flags.

    Raises: RecordError for other values than 0, 1, true and false, and for a loss on a message of
        another role than the assistant. (OpenAI gives weight 1 to all.)
    """
    has_loss = True
    for name, with_loss in _LOSS_FLAGS.items():
        if not is_given(message, name, source):
            continue
        value = message[name]
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RecordError(
                f"{place}: {name} is {value!r}: it must be {with_loss} or "
                f"{_bool_text(with_loss)}, or {1 - with_loss} or {_bool_text(1 - with_loss)} (no "
                "loss on this message)"
            )
        if value != with_loss:
            has_loss = False
        elif role != ASSISTANT and name != "weight":
            raise RecordError(
                f"{place}: {name} is {value!r}, but only messages with the role {ASSISTANT} have "
                "loss. Remove it. For data.train_on=all, which trains on all messages, set "
                f"{suggest_ignoring(name)}"
            )
    kept = {name: value for name, value in message.items() if name not in _LOSS_FLAGS}
    return kept if has_loss else kept | {"weight": 0}


def _bool_text(value: int) -> str:
    return "true" if value else "false"
