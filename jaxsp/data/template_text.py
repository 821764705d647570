"""Text of messages in a rendered conversation, and checks that a model should learn to write it.

Every message is there in full; a span with loss is the assistant's text with its end token; and
answers whose thinking the template drops have a loss only if the config allows it: a model would
learn to answer without thinking.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxsp.core.errors import UserError
from jaxsp.data.records import ASSISTANT

Messages = list[dict[str, Any]]

TextSpans = list[tuple[int, int]]
"""First character and end of each part of a text."""

RenderFunction = Callable[..., tuple[str, TextSpans]]
"""Renders `(messages, prompt=False)`: returns their text, with the generation prompt if `prompt`,
and the spans of its {% generation %} marks."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Message fields that transformers reads as the assistant's reasoning."""

_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"

_UNESCAPED = re.compile(r"""[^\x00-\x1f"'\\<>&]+""")
"""Text that JSON, Python and XML all write unchanged."""

_TRL_TEMPLATES = "github.com/huggingface/trl/tree/main/trl/chat_templates"

MARKS_SUGGESTION = (
    "use data.train_on=all, or a data.chat_template with {% generation %} around what the "
    f"assistant says. TRL has such templates for many models: *_training.jinja in {_TRL_TEMPLATES}"
)


def list_messages(record: dict[str, Any]) -> Messages:
    """Returns the messages of a stored record's first document; none if it is text."""
    parts = [record.get(name) for name in ("messages", "prompt", "completion", "chosen")]
    return [message for part in parts if isinstance(part, list) for message in part]


def list_tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists a message's tool calls, including `function_call` of OpenAI's older format."""
    older = message.get("function_call")
    return [*(message.get("tool_calls") or []), *([older] if isinstance(older, dict) else [])]


def has_loss(message: dict[str, Any]) -> bool:
    """Returns False for a message with `weight: 0`, as chats.py writes every such flag."""
    return bool(message.get("weight", 1))


def visible_content(message: dict[str, Any]) -> str:
    return split_thinking(message)[1]


def get_reasoning(message: dict[str, Any]) -> str:
    """Returns a message's thinking, from its own field or from <think> tags in the content."""
    own = (message[name] for name in _REASONING_FIELDS if isinstance(message.get(name), str))
    return next((text for text in own if text.strip()), split_thinking(message)[0]).strip()


def split_thinking(message: dict[str, Any]) -> tuple[str, str]:
    """Splits a message's content into its thinking and the rest. Thinking is at the beginning, in
    <think> tags of which the generation prompt may have written the first. Tags elsewhere are
    quoted by the content, and so is a closing tag in a message with a field for its reasoning."""
    content = message.get("content", "")
    if not isinstance(content, str):
        return "", ""
    thinking, closing, rest = content.partition(_THINK_CLOSE)
    if message["role"] != ASSISTANT or not closing:
        return "", content
    opening, tag, inner = thinking.partition(_THINK_OPEN)
    if tag:
        return ("", content) if opening.strip() else (inner, rest)
    has_own_field = any(isinstance(message.get(name), str) for name in _REASONING_FIELDS)
    return ("", content) if has_own_field else (thinking, rest)


def _collect_strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = [part for key, item in value.items() for part in (str(key), item)]
    if isinstance(value, list):
        return [text for item in value for text in _collect_strings(item)]
    return [value] if isinstance(value, str) else []


def find_end(text: str, message: dict[str, Any], start: int = 0) -> int | None:
    """Returns where a message ends in the text from `start` on; None if a part of it is missing.

    A template may trim a message. It must write the content without thinking, then the tool calls,
    or these first (Gemma 4): of each, in any order, its name, its argument names, and the longest
    part of each string in the arguments that no notation (JSON, Python, XML) escapes.
    """
    groups = [[visible_content(message)]]
    for call in list_tool_calls(message):
        function = call.get("function", call)
        if isinstance(function, dict):
            texts = _collect_strings([function.get("name"), function.get("arguments")])
            groups.append([max(_UNESCAPED.findall(text), key=len, default="") for text in texts])
    orders = (groups, groups[1:] + groups[:1])
    ends = (_find_groups(text, order, start) for order in orders)
    return min((end for end in ends if end is not None), default=None)


def _find_groups(text: str, groups: list[list[str]], start: int) -> int | None:
    """Returns where the last of several groups of phrases ends, each after the one before it."""
    for group in groups:
        ends = [start]
        for phrase in filter(None, map(str.strip, group)):
            # a template may write a tool's result as JSON, sometimes with all non-ASCII escaped
            plain_forms = {phrase, json.dumps(phrase, ensure_ascii=False)[1:-1]}
            for forms in (plain_forms, {json.dumps(phrase)[1:-1]}):
                places = [(text.find(form, start), len(form)) for form in forms]
                found = [place + length for place, length in places if place >= 0]
                if found:
                    break
            else:
                return None
            ends.append(min(found))
        start = max(ends)
    return start


def starts_with_message(message: dict[str, Any], text: str, *, before: str) -> bool:
    """Returns True if a text begins with a message's content, or with thinking and then content.
    Args: before: the text before it, which may have opened the thinking."""
    content = visible_content(message).strip()
    rest = text.lstrip()
    if rest.startswith((content, message.get("content", "").strip())):
        return True
    if not rest.startswith(_THINK_OPEN) and not before.rstrip().endswith(_THINK_OPEN):
        return False
    ends = [match.end() for match in re.finditer(_THINK_CLOSE, rest)]
    return any(rest[end:].lstrip().startswith(content) for end in ends)


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


def check_messages_present(messages: Messages, text: str) -> None:
    """Raises: UserError if a message, or a part of it, is missing from the text."""
    start = 0
    for number, message in enumerate(messages, 1):
        # templates may move system and developer messages
        has_fixed_place = message["role"] not in ("system", "developer")
        end = find_end(text, message, start if has_fixed_place else 0)
        if end is None:
            reason = f"the chat template drops content of message {number} ({message['role']})"
            if "function_call" in message:
                reason += ". Write its function_call as tool_calls, which templates support"
            elif message["role"] == ASSISTANT and _THINK_CLOSE in str(message.get("content")):
                reason += (
                    f". Templates read text before {_THINK_CLOSE} as thinking. If the message only "
                    "mentions the tag, give it its thinking as reasoning_content, even if that is "
                    '""'
                )
            raise UserError(f"{reason}.")
        if has_fixed_place:
            start = end
    last = next((message for message in reversed(messages) if message["role"] == ASSISTANT), None)
    if last is not None and get_reasoning(last) not in text:
        raise UserError(
            "the chat template drops the thinking of the last assistant message. Remove the "
            "thinking, or use another template."
        )


def check_span(
    messages: Messages,
    indices: Sequence[int],
    text: str,
    span: tuple[int, int],
    *,
    opening: tuple[str, str],
    suggestion: str,
) -> None:
    """Checks that a span is the text of consecutive messages, with nothing before, and an end
    token.
    Args: opening: generation prompt, and the text before content in place of the first message;
        only for a message without content, or with tool calls before it."""
    message = messages[indices[0]]
    span_text = text[slice(*span)]
    place = 0
    for index in indices:
        end = find_end(span_text, messages[index], place)
        if end is None:
            raise UserError(
                f"the text of message {index + 1} ({messages[index]['role']}) is not where the "
                "chat template ends the prompt."
            )
        place = end
    content = span_text
    # for the opening tag of thinking; a copy of all text before would take quadratic time
    before = text[max(span[0] - 1000, 0) : span[0]]
    has_content = bool(visible_content(message).strip())
    if has_content and list_tool_calls(message):
        has_content = starts_with_message(message, content, before=before)
    if not has_content:
        # the text before a tool call is unknown; a message with a word has the same header
        prompt, header = opening
        word = next(unused_words(text))
        message = {"role": message["role"], "content": word}
        content = header + word
        start = common_prefix_length(prompt, content)
        before = content[:start]
        content = content[start:]
    if not starts_with_message(message, content, before=before):
        raise UserError(
            "the chat template's generation prompt ends before the text of message "
            f"{indices[0] + 1} ({message['role']}), so that its header would be trained on: "
            f"{suggestion}."
        )
    if not span_text[place:].strip():
        raise UserError(
            f"the chat template puts no end token after message {indices[-1] + 1} "
            f"({messages[indices[-1]]['role']}), so that the model would not learn to stop: "
            f"{suggestion}."
        )


def find_bare_answers(
    messages: Messages, indices: list[int], text: str, render: RenderFunction
) -> list[int]:
    """Returns the messages whose thinking is not in the rendered text. Templates of reasoning
    models keep only the thinking after the last user message. It is searched in a rendering with a
    word in place of each thinking text, because a short one may also occur elsewhere."""
    words = unused_words(text)
    replaced = {index: next(words) for index in indices if get_reasoning(messages[index])}
    if not replaced:
        return []
    probe = []
    for index, message in enumerate(messages):
        if index in replaced:
            word = replaced[index]
            thinking, content = split_thinking(message)
            fields = [name for name in _REASONING_FIELDS if isinstance(message.get(name), str)]
            message = message | {name: word for name in fields if message[name].strip()}
            if thinking.strip():
                original = message["content"]
                tag = original[: original.index(_THINK_CLOSE) - len(thinking)]
                message["content"] = f"{tag}\n{word}\n{_THINK_CLOSE}{content}"
        probe.append(message)
    probe_text = render(probe)[0]
    return [index for index, word in replaced.items() if word not in probe_text]


def check_bare_answers(
    bare: Sequence[int], earlier_reasoning: str, *, instead_of_no_loss: str | None = None
) -> None:
    """Checks that the config allows a loss on answers whose thinking the template dropped.
    Args: instead_of_no_loss: suggestion where single messages cannot be without loss.
    Raises: UserError if it does not."""
    allows = earlier_reasoning == "no_loss" and instead_of_no_loss is None
    if not bare or earlier_reasoning == "keep" or allows:
        return
    others = f" (and {len(bare) - 1} more)" if len(bare) > 1 else ""
    problem = f"the chat template drops the thinking of message {bare[0] + 1}{others}"
    if earlier_reasoning == "no_loss":
        raise UserError(
            f"{problem}, and no_loss cannot exclude single messages here: {instead_of_no_loss}, or "
            "data.earlier_reasoning=keep."
        )
    without = ""
    if instead_of_no_loss is None:
        without = "data.earlier_reasoning=no_loss (no loss on such messages), "
    raise UserError(
        f"{problem}, so that the model would learn to answer without thinking. Use "
        f"{without}data.earlier_reasoning=keep (learn that), or a "
        "data.chat_template that keeps it: for Qwen3 and DeepSeek-R1-Distill, TRL has "
        f"*_training.jinja in {_TRL_TEMPLATES}."
    )
