"""Checks that a rendered conversation is what a model should learn to write.

Every message is in it in full; a span with loss is the assistant's text with its end token; and
answers whose thinking the template drops have a loss only if the config allows it: a model would
learn to answer without thinking.
"""

from collections.abc import Sequence
from typing import Any

from jaxsp.core.errors import UserError
from jaxsp.data.chat import template_text
from jaxsp.data.chat.template_text import ASSISTANT, THINK_CLOSE, Messages, RenderFunction

_CONTEXT_CHARS = 1000
"""Characters before a span that are searched for the opening tag of thinking."""


def check_messages_present(messages: Messages, text: str) -> None:
    """Raises: UserError if a message, or a part of it, is missing from the text."""
    start = 0
    for number, message in enumerate(messages, 1):
        # templates may move system and developer messages
        has_fixed_place = message["role"] not in ("system", "developer")
        end = template_text.find_end(text, message, start if has_fixed_place else 0)
        if end is None:
            reason = f"the chat template drops content of message {number} ({message['role']})"
            if "function_call" in message:
                reason += ". Write its function_call as tool_calls, which templates support"
            elif message["role"] == ASSISTANT and THINK_CLOSE in str(message.get("content")):
                reason += (
                    f". Templates read text before {THINK_CLOSE} as thinking. If the message only "
                    "mentions the tag, give it its thinking as reasoning_content, even if that is "
                    '""'
                )
            raise UserError(f"{reason}.")
        if has_fixed_place:
            start = end
    last = next(
        (message for message in reversed(messages) if message["role"] == ASSISTANT),
        None,
    )
    if last is not None and template_text.get_reasoning(last) not in text:
        raise UserError(
            "the chat template drops the thinking of the last assistant message. Remove the "
            "thinking, or use another template."
        )


def check_span(
    messages: Messages,
    indices: Sequence[int],
    text: str,
    span: tuple[int, int],
    render: RenderFunction,
    *,
    suggestion: str,
    opening: tuple[str, str] | None = None,
) -> None:
    """Checks that a span is the text of these messages, with nothing before, and an end token.

    Args:
        indices: consecutive messages; the text between them is not checked.
        opening: generation prompt, and the text before the content of a message that has some.
            Needed for a message without content; found by rendering if None.
    Raises: UserError if it is not.
    """
    message = messages[indices[0]]
    span_text = text[slice(*span)]
    place = 0
    for index in indices:
        end = template_text.find_end(span_text, messages[index], place)
        if end is None:
            raise UserError(
                f"the text of message {index + 1} ({messages[index]['role']}) is not where the "
                "chat template ends the prompt."
            )
        place = end
    content = span_text
    # a copy of all text before each message would take quadratic time
    before = text[max(span[0] - _CONTEXT_CHARS, 0) : span[0]]
    if not template_text.visible_content(message).strip():
        # the text before a tool call is unknown; a message with a word has the same header
        word = next(template_text.unused_words(text))
        message = {"role": message["role"], "content": word}
        if opening is None:
            earlier = messages[: indices[0]]
            prompt = render(earlier, prompt=True)[0]
            content = render([*earlier, message])[0]
        else:
            prompt, header = opening
            content = header + word
        start = template_text.common_prefix_length(prompt, content)
        before = content[:start]
        content = content[start:]
    if not template_text.starts_with_message(message, content, before=before):
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
    """Returns the messages whose thinking is not in the rendered text.

    Templates of reasoning models keep only the thinking after the last user message. It is searched
    in a rendering with a word in place of each thinking text, because a short one may also occur
    elsewhere.
    """
    words = template_text.unused_words(text)
    replaced = {
        index: next(words) for index in indices if template_text.get_reasoning(messages[index])
    }
    if not replaced:
        return []
    probe = [
        _replace_thinking(message, replaced[index]) if index in replaced else message
        for index, message in enumerate(messages)
    ]
    probe_text = render(probe)[0]
    return [index for index, word in replaced.items() if word not in probe_text]


def _replace_thinking(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Returns a message with another thinking text, where it has some."""
    fields = [name for name in template_text.REASONING_FIELDS if isinstance(message.get(name), str)]
    replaced = message | {name: text for name in fields if message[name].strip()}
    thinking, content = template_text.split_thinking(message)
    if thinking.strip():
        original = message["content"]
        opening = original[: original.index(THINK_CLOSE) - len(thinking)]
        replaced["content"] = f"{opening}\n{text}\n{THINK_CLOSE}{content}"
    return replaced


def check_bare_answers(
    bare: Sequence[int], earlier_reasoning: str, *, instead_of_no_loss: str | None = None
) -> None:
    """Checks that the config allows a loss on answers whose thinking the template dropped.

    Args:
        bare: indices of the messages.
        instead_of_no_loss: suggestion where single messages cannot be without loss.
    Raises: UserError if it does not.
    """
    if not bare or earlier_reasoning == "keep":
        return
    if earlier_reasoning == "no_loss" and instead_of_no_loss is None:
        return
    others = f" (and {len(bare) - 1} more)" if len(bare) > 1 else ""
    problem = f"the chat template drops the thinking of message {bare[0] + 1}{others}"
    if earlier_reasoning == "no_loss":
        raise UserError(
            f"{problem}, and no_loss cannot exclude single messages here: {instead_of_no_loss}, or "
            "data.earlier_reasoning=keep."
        )
    without = "data.earlier_reasoning=no_loss (no loss on such messages), "
    if instead_of_no_loss is not None:
        without = ""
    raise UserError(
        f"{problem}, so that the model would learn to answer without thinking. Use "
        f"{without}data.earlier_reasoning=keep (learn that), or a "
        "data.chat_template that keeps it: for Qwen3 and DeepSeek-R1-Distill, TRL has "
        f"*_training.jinja in {template_text.TRL_TEMPLATES}."
    )
