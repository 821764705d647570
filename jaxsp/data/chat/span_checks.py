"""Checks that a span of a rendered conversation is what a model should learn to write."""

from collections.abc import Sequence

from jaxsp.data.chat import template_text
from jaxsp.data.chat.template_text import Messages, RecordError, RenderFunction

_CONTEXT_CHARS = 1000
"""Characters before a span that are searched for the opening tag of thinking."""


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
    Raises: RecordError if it is not.
    """
    message = messages[indices[0]]
    span_text = text[slice(*span)]
    place = 0
    for index in indices:
        end = template_text.find_end(span_text, messages[index], place)
        if end is None:
            raise RecordError(
                f"the text of message {index + 1} ({messages[index]['role']}) is not where the "
                "chat template ends the prompt"
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
        raise RecordError(
            "the chat template's generation prompt ends before the text of message "
            f"{indices[0] + 1} ({message['role']}), so that its header would be trained on: "
            f"{suggestion}"
        )
    if not span_text[place:].strip():
        raise RecordError(
            f"the chat template puts no end token after message {indices[-1] + 1} "
            f"({messages[indices[-1]]['role']}), so that the model would not learn to stop: "
            f"{suggestion}"
        )
