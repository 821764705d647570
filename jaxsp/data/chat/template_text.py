"""Messages, and their text in a rendered conversation."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

ASSISTANT = "assistant"

Messages = list[dict[str, Any]]

TextSpans = list[tuple[int, int]]
"""First character and end of each part of a text."""

RenderFunction = Callable[..., tuple[str, TextSpans]]
"""Renders `(messages, prompt=False)`: returns their text, with the generation prompt if `prompt`,
and the spans of its {% generation %} marks."""

COMPLETION_FIELDS = ("completion", "mismatched_completion", "chosen", "rejected")
"""Fields of a stored record with a completion of its prompt, each of which is a document."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Message fields that transformers reads as the assistant's reasoning."""

_THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_UNESCAPED = re.compile(r"""[^\x00-\x1f"'\\<>&]+""")
"""Text that JSON, Python and XML all write unchanged."""

TRL_TEMPLATES = "github.com/huggingface/trl/tree/main/trl/chat_templates"

MARKS_SUGGESTION = (
    "use data.train_on=all, or a data.chat_template with {% generation %} around what the "
    f"assistant says. TRL has such templates for many models: *_training.jinja in {TRL_TEMPLATES}"
)


def list_messages(record: dict[str, Any]) -> Messages:
    """Returns the messages of a stored record's first document; none if it is text."""
    parts = [record.get(name) for name in ("messages", "prompt", "completion", "chosen")]
    return [message for part in parts if isinstance(part, list) for message in part]


def required_phrases(message: dict[str, Any]) -> list[list[str]]:
    """Lists the text that a template must write for a message, however it trims the message.

    The first group is the content without thinking; each tool call is another group. The phrases of
    a call are its name, its argument names, and the longest part of each string in the arguments
    that no notation (JSON, Python, XML) escapes. The phrases of a group may come in any order.
    """
    groups = [[visible_content(message)]]
    for call in list_tool_calls(message):
        function = call.get("function", call)
        if isinstance(function, dict):
            texts = _collect_strings([function.get("name"), function.get("arguments")])
            groups.append([max(_UNESCAPED.findall(text), key=len, default="") for text in texts])
    stripped = [[phrase.strip() for phrase in group if phrase.strip()] for group in groups]
    return [group for group in stripped if group]


def list_tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a message's tool calls, including `function_call` of OpenAI's older format."""
    older = message.get("function_call")
    return [*(message.get("tool_calls") or []), *([older] if isinstance(older, dict) else [])]


def has_loss(message: dict[str, Any]) -> bool:
    """Returns False for a message with `weight: 0`, as known_fields.py writes every such flag."""
    return bool(message.get("weight", 1))


def visible_content(message: dict[str, Any]) -> str:
    """Returns a message's content without its thinking."""
    return split_thinking(message)[1]


def get_reasoning(message: dict[str, Any]) -> str:
    """Returns a message's thinking, from its own field or from <think> tags in the content."""
    own = (message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str))
    return next((text for text in own if text.strip()), split_thinking(message)[0]).strip()


def split_thinking(message: dict[str, Any]) -> tuple[str, str]:
    """Splits a message's content into its thinking and the rest.

    Thinking is at the beginning, in <think> tags of which the generation prompt may have written
    the first. Tags elsewhere are quoted by the content, and so is a closing tag in a message with a
    field for its reasoning.
    """
    content = message.get("content", "")
    if not isinstance(content, str):
        return "", ""
    thinking, closing, rest = content.partition(THINK_CLOSE)
    if message["role"] != ASSISTANT or not closing:
        return "", content
    opening, tag, inner = thinking.partition(_THINK_OPEN)
    if tag:
        return ("", content) if opening.strip() else (inner, rest)
    has_own_field = any(isinstance(message.get(name), str) for name in REASONING_FIELDS)
    return ("", content) if has_own_field else (thinking, rest)


def _collect_strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = [part for key, item in value.items() for part in (str(key), item)]
    if isinstance(value, list):
        return [text for item in value for text in _collect_strings(item)]
    return [value] if isinstance(value, str) else []


def find_end(text: str, message: dict[str, Any], start: int = 0) -> int | None:
    """Returns where a message's phrases end in a text; None if one of them is missing.

    Args: start: first character to search.
    """
    for group in required_phrases(message):
        ends = [_find_phrase_end(text, phrase, start) for phrase in group]
        if -1 in ends:
            return None
        start = max(ends)
    return start


def _find_phrase_end(text: str, phrase: str, start: int) -> int:
    # a template may write a tool's result as JSON, sometimes with all non-ASCII text escaped
    plain_forms = {phrase, json.dumps(phrase, ensure_ascii=False)[1:-1]}
    for forms in (plain_forms, {json.dumps(phrase)[1:-1]}):
        ends = [place + len(form) for form in forms if (place := text.find(form, start)) >= 0]
        if ends:
            return min(ends)
    return -1


def starts_with_message(message: dict[str, Any], text: str, *, before: str) -> bool:
    """Returns True if a text begins with a message's content, or with thinking and then content.

    Args: before: the text before it, which may have opened the thinking.
    """
    content = visible_content(message).strip()
    rest = text.lstrip()
    if rest.startswith((content, message.get("content", "").strip())):
        return True
    if not rest.startswith(_THINK_OPEN) and not before.rstrip().endswith(_THINK_OPEN):
        return False
    parts = rest.split(THINK_CLOSE)
    return any(
        THINK_CLOSE.join(parts[number:]).lstrip().startswith(content)
        for number in range(1, len(parts))
    )


def unused_words(text: str) -> Iterator[str]:
    """Yields words that no template changes, not in `text` and none contained in another."""
    tag = "Qx"
    while tag in text:
        tag = f"Q{tag}"
    return (f"{tag}{number}z" for number in itertools.count())


def common_prefix_length(a: str, b: str) -> int:
    """Returns the length of the longest common prefix of two texts."""
    if b.startswith(a):
        return len(a)
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(a), len(b)))
