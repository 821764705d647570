"""Finds the spans of assistant messages in a rendered conversation, with the end-of-turn token.

Three messages as ChatML writes them; the loss is on the text between the bars:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n|Hello.<|im_end|>\n|

If the template has {% generation %} marks, they name the spans (generation_marks.py). Otherwise the
spans are found by rendering parts of the conversation (span_search.py), and used only if they prove
right. Conversations with few assistant messages are searched by prefixes first, long ones by
exchanges, then by insertion, then by prefixes.

A span must begin with the message's content or its thinking: otherwise a header that the generation
prompt does not write would be trained on. It must end with more than the content: a message without
an end-of-turn token never teaches the model to stop.

A record that fails a check is refused; nothing is guessed. The text is always the template's: if it
cuts thinking out of earlier messages, that thinking is not trained on.
"""

from collections.abc import Sequence
from typing import Any

from jaxsp.data.chat import span_search, template_text
from jaxsp.data.chat.template_text import Messages, RecordError, RenderFunction, TextSpans

_MAX_PREFIX_TURNS = 4
"""Assistant messages up to which rendering all prefixes is about as fast as rendering the
conversation with inserted messages."""

_CONTEXT_CHARS = 1000
"""Characters before a span that are searched for the opening tag of thinking."""


def infer_spans(
    messages: Messages, indices: list[int], text: str, render: RenderFunction
) -> TextSpans:
    """Returns the spans of assistant messages for a template without marks.

    Raises: RecordError if they cannot be determined with certainty.
    """

    def render_text(messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> str:
        return render(messages, prompt=prompt)[0]

    searches = [
        span_search.find_by_prefixes,
        span_search.find_by_insertion,
        span_search.find_by_exchanges,
    ]
    if len(indices) > _MAX_PREFIX_TURNS:
        # prefixes take quadratic time; gemma4 merges assistant messages, so insertion fails late
        searches.reverse()
    for search in searches:
        spans = search(messages, indices, text, render_text)
        if spans is not None:
            break
    else:
        raise RecordError(
            "the chat template has no {% generation %} marks, and writes turns differently when "
            "others follow, so that the assistant's text cannot be located: "
            f"{template_text.MARKS_SUGGESTION}"
        )
    for index, span in zip(indices, spans, strict=True):
        check_span(
            messages,
            [index],
            text,
            span.span,
            render,
            suggestion=template_text.MARKS_SUGGESTION,
            opening=span.opening,
        )
    return [span.span for span in spans]


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
        start = common_prefix_length(prompt, content)
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


def common_prefix_length(a: str, b: str) -> int:
    """Length of the beginning that two texts share."""
    if b.startswith(a):
        return len(a)
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(a), len(b)))
