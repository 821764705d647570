"""Finds answers whose thinking a chat template drops: a model would learn to answer without it."""

from collections.abc import Sequence
from typing import Any

from jaxsp.data.chat import template_text
from jaxsp.data.chat.template_text import Messages, RecordError, RenderFunction


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
        opening = original[: original.index(template_text.THINK_CLOSE) - len(thinking)]
        replaced["content"] = f"{opening}\n{text}\n{template_text.THINK_CLOSE}{content}"
    return replaced


def check_bare_answers(
    bare: Sequence[int], earlier_reasoning: str, *, instead_of_no_loss: str | None = None
) -> None:
    """Checks that the config allows a loss on answers whose thinking the template dropped.

    Args:
        bare: indices of the messages.
        instead_of_no_loss: suggestion where single messages cannot be without loss.
    Raises: RecordError if it does not.
    """
    if not bare or earlier_reasoning == "keep":
        return
    if earlier_reasoning == "no_loss" and instead_of_no_loss is None:
        return
    others = f" (and {len(bare) - 1} more)" if len(bare) > 1 else ""
    problem = f"the chat template drops the thinking of message {bare[0] + 1}{others}"
    if earlier_reasoning == "no_loss":
        raise RecordError(
            f"{problem}, and no_loss cannot exclude single messages here: {instead_of_no_loss}, or "
            "data.earlier_reasoning=keep"
        )
    without = "data.earlier_reasoning=no_loss (no loss on such messages), "
    if instead_of_no_loss is not None:
        without = ""
    raise RecordError(
        f"{problem}, so that the model would learn to answer without thinking. Use "
        f"{without}data.earlier_reasoning=keep (learn that), or a "
        "data.chat_template that keeps it: for Qwen3 and DeepSeek-R1-Distill, TRL has "
        f"*_training.jinja in {template_text.TRL_TEMPLATES}"
    )
