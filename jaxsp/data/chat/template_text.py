"""What a chat template has to write of a message, and whether it did."""

import json
import re
from typing import Any

ASSISTANT = "assistant"

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names under which transformers takes a message's thinking."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"

_UNESCAPED = re.compile(r"""[^\x00-\x1f"'\\<>&]+""")

MARKS_SUGGESTION = (
    "use data.train_on=all, or as data.chat_template one with {% generation %} around what the assistant says. TRL has such "
    "templates for many models: *_training.jinja in github.com/huggingface/trl/tree/main/trl/chat_templates"
)


class RecordError(ValueError):
    """Why a record cannot be learned from; the text names the reason and, where there is one, the way out."""


def required_phrases(message: dict[str, Any]) -> list[list[str]]:
    """What a template has to write of a message, however it trims it and whatever thinking it cuts.

    First what it says, then each tool call. A call's words are its name, the names of its arguments, and the longest piece of
    each string in them that no notation (JSON's, Python's, XML's) would change; they may stand in any order.
    """
    groups = [[visible_content(message)]]
    for call in list_tool_calls(message):
        function = call.get("function", call)
        called = (
            _collect_strings([function.get("name"), function.get("arguments")])
            if isinstance(function, dict)
            else []
        )
        groups.append([max(_UNESCAPED.findall(words), key=len, default="") for words in called])
    kept = [[words.strip() for words in group if words.strip()] for group in groups]
    return [group for group in kept if group]


def list_tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a message's tool calls, with the one that OpenAI's older format puts into `function_call`."""
    older = message.get("function_call")
    return [*(message.get("tool_calls") or []), *([older] if isinstance(older, dict) else [])]


def has_loss(message: dict[str, Any]) -> bool:
    """Returns whether a turn is learned from; `weight: 0` (OpenAI) and `train: false` (Axolotl) exclude it."""
    return bool(message.get("weight", 1)) and bool(message.get("train", True))


def visible_content(message: dict[str, Any]) -> str:
    """A message's content, without the thinking in it."""
    content = message.get("content", "")
    if not isinstance(content, str):
        return ""
    return content.rpartition(_THINK_CLOSE)[2] if message["role"] == ASSISTANT else content


def _collect_strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [
            words for name, one in value.items() for words in (str(name), *_collect_strings(one))
        ]
    if isinstance(value, list):
        return [words for one in value for words in _collect_strings(one)]
    return [value] if isinstance(value, str) else []


def find_end(text: str, message: dict[str, Any], at: int = 0) -> int | None:
    """Where the words of a message end in a text, searched from a place on; None if some of them are not there."""
    for group in required_phrases(message):
        ends = [_find_phrase_end(text, words, at) for words in group]
        if -1 in ends:
            return None
        at = max(ends)
    return at


def _find_phrase_end(text: str, words: str, at: int) -> int:
    # what a tool says may be written as JSON
    ways = {words, json.dumps(words, ensure_ascii=False)[1:-1]}
    ends = [place + len(way) for way in ways if (place := text.find(way, at)) >= 0]
    if not ends and not words.isascii():
        way = json.dumps(words)[1:-1]
        ends = [place + len(way)] if (place := text.find(way, at)) >= 0 else []
    return min(ends, default=-1)


def starts_with_message(message: dict[str, Any], text: str, *, before: str) -> bool:
    """Whether a text begins with what a message says, or with thinking and then that.

    Args: before: the text before it, which may have begun the thinking.
    """
    words, rest = visible_content(message).strip(), text.lstrip()
    if rest.startswith((words, message.get("content", "").strip())):
        return True
    if not rest.startswith(_THINK_OPEN) and not before.rstrip().endswith(_THINK_OPEN):
        return False
    parts = rest.split(_THINK_CLOSE)
    return any(
        _THINK_CLOSE.join(parts[number:]).lstrip().startswith(words)
        for number in range(1, len(parts))
    )


def get_reasoning(message: dict[str, Any]) -> str:
    """What a message says of its thinking, in a field or in its content."""
    content = message.get("content", "")
    inside = (
        content.rpartition(_THINK_CLOSE)[0].rpartition(_THINK_OPEN)[2]
        if isinstance(content, str)
        else ""
    )
    return next(
        (message[name] for name in _REASONING_FIELDS if isinstance(message.get(name), str)), inside
    ).strip()


def check_messages_present(messages: list[dict[str, Any]], whole: str) -> None:
    """Raises: Refused where a message, or a part of it, is not in the text."""
    at = 0
    for number, message in enumerate(messages, 1):
        moves = message["role"] not in ("system", "developer")  # what these say may stand elsewhere
        end = find_end(whole, message, at if moves else 0)
        if end is None:
            reason = f"the chat template drops what message {number} ({message['role']}) says"
            if "function_call" in message:
                reason += ". Write its function_call as tool_calls, which templates know"
            raise RecordError(reason)
        at = end if moves else at
    last = next((message for message in reversed(messages) if message["role"] == ASSISTANT), None)
    if last is not None and get_reasoning(last) not in whole:
        raise RecordError(
            "the chat template drops the thinking of the assistant's last turn. Leave it out, or give another template"
        )
