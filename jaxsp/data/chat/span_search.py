"""Finds the spans of assistant messages for chat templates without generation marks.

There are three methods. Each returns the spans of the messages, or None if the template does not
meet its assumptions. Methods that succeed find the same spans (tests/data/chat/test_chat.py).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jaxsp.core.errors import UserError
from jaxsp.data.chat.template_text import ASSISTANT, Messages, unused_words

RenderText = Callable[..., str]
"""Renders `(messages, prompt=False)` to text, with the generation prompt if `prompt`."""

_USER = "user"


class AssistantSpan(NamedTuple):
    """Position of an assistant message in the rendered conversation, without its header."""

    span: tuple[int, int]
    """First character, and the one after the last."""
    opening: tuple[str, str] | None = None
    """Generation prompt, and the header of an inserted assistant message; None if unknown."""


def find_by_prefixes(
    messages: Messages, indices: list[int], text: str, render: RenderText
) -> list[AssistantSpan] | None:
    """Finds each message from two renderings: the conversation before it, and up to its end. Both
    must be prefixes of the whole text. This takes up to two renderings per message. Fails if a
    template renders the last message differently (Qwen3 keeps its thinking)."""
    spans = []
    for index in indices:
        try:
            before = render(messages[:index], prompt=True)
            after = render(messages[: index + 1]) if index + 1 < len(messages) else text
        except UserError:  # an empty conversation, or one that stops in the middle
            return None
        if not text.startswith(before) or not text.startswith(after) or len(after) <= len(before):
            return None
        spans.append(AssistantSpan(span=(len(before), len(after))))
    return spans


def find_by_insertion(
    messages: Messages, indices: list[int], text: str, render: RenderText
) -> list[AssistantSpan] | None:
    """Finds each message by inserting two one-word assistant messages before and after it. Removing
    the inserted messages from the rendered text must give the original text. Renders the
    conversation only twice. Fails if a template requires roles to alternate."""
    unused = unused_words(text)
    pairs = {
        boundary: (next(unused), next(unused)) for boundary in _list_boundaries(messages, indices)
    }
    inserted = {
        boundary: [{"role": ASSISTANT, "content": word} for word in words]
        for boundary, words in pairs.items()
    }
    try:
        text_and_prompt = render(messages, prompt=True)
        augmented = render(_insert(messages, inserted))
    except UserError:  # roles must alternate
        return None
    prompt = text_and_prompt.removeprefix(text)
    if not prompt or prompt == text_and_prompt:
        return None
    headers = {}

    def locate(boundary: int, place: int) -> tuple[int, int] | None:
        first_word, second_word = pairs[boundary]
        first = _find_header(augmented, prompt, place, first_word)
        first_end = augmented.find(first_word, place) + len(first_word)
        second = _find_header(augmented, prompt, first_end, second_word)
        if first < 0 or second < 0:
            return None
        headers[boundary] = augmented[first : first_end - len(first_word)]
        ending = augmented[first_end:second]
        second_end = augmented.find(second_word, second) + len(second_word)
        is_same = augmented.startswith(ending, second_end)
        return (first, second_end + len(ending)) if is_same else None

    starts = _remove_inserted(text, augmented, pairs, locate)
    if starts is None:
        return None
    return _spans_between(indices, starts, text, prompt=prompt, headers=headers)


def _find_header(text: str, prompt: str, start: int, word: str) -> int:
    """Returns the start of the header of the message that contains `word`; -1 if unknown. The
    header is the generation prompt or a prefix of it: the prompt of a reasoning model may contain
    more than the header of a message."""
    end = text.find(word, start)
    if end < 0:
        return -1
    header = text.rfind(prompt, start, end)
    if header >= 0:
        return header
    sizes = range(len(prompt), 0, -1)
    return next((end - size for size in sizes if text.endswith(prompt[:size], start, end)), -1)


def find_by_exchanges(
    messages: Messages, indices: list[int], text: str, render: RenderText
) -> list[AssistantSpan] | None:
    """Finds each message by inserting a user and an assistant message before and after it.

    The pairs are ordered so that roles alternate. A probe of four one-word messages shows what the
    template writes around a message, so the text of the inserted messages is known exactly.
    Removing it must give the original text. Renders one conversation with at most three times the
    messages, and five of at most four messages. Fails if an inserted user message makes the
    template remove the thinking from earlier messages.
    """
    unused = unused_words(text)
    turn_format = _infer_turn_format(unused, render)
    if turn_format is None:
        return None
    affixes, prompt = turn_format
    exchanges = {}
    for boundary in _list_boundaries(messages, indices):
        # Mistral's template skips tool calls and tool results when it checks that roles alternate,
        # so the last message that it counts before either of them is a user message
        is_user = messages[boundary]["role"] == _USER
        roles = (_USER, ASSISTANT) if is_user else (ASSISTANT, _USER)
        exchanges[boundary] = [{"role": role, "content": next(unused)} for role in roles]
    try:
        augmented = render(_insert(messages, exchanges))
    except UserError:
        return None

    def locate(boundary: int, place: int) -> tuple[int, int] | None:
        turns = [(affixes[each["role"]], each["content"]) for each in exchanges[boundary]]
        inserted = "".join(before + content + after for (before, after), content in turns)
        start = augmented.find(inserted, place)
        return None if start < 0 else (start, start + len(inserted))

    starts = _remove_inserted(text, augmented, exchanges, locate)
    if starts is None:
        return None
    headers = dict.fromkeys(indices, affixes[ASSISTANT][0])
    return _spans_between(indices, starts, text, prompt=prompt, headers=headers)


def _infer_turn_format(
    unused: Iterator[str], render: RenderText
) -> tuple[dict[str, tuple[str, str]], str] | None:
    """Infers the format of messages by rendering the prefixes of a conversation of four words.
    Returns: text before and after the content, by role, and the generation prompt after a user
    message; None if a message is rendered differently when others follow."""
    roles = (_USER, ASSISTANT, _USER, ASSISTANT)
    probe = [{"role": role, "content": next(unused)} for role in roles]
    try:
        texts = [render(probe[:number]) for number in range(1, len(probe) + 1)]
        prompted = render(probe[:3], prompt=True)
    except UserError:
        return None
    affixes: dict[str, tuple[str, str]] = {}
    # Skip the first user message: text before it may belong to the conversation (such as BOS)
    for message, (before, after) in zip(probe[1:], itertools.pairwise(texts), strict=True):
        header, word, end = after.removeprefix(before).partition(message["content"])
        if not word or not after.startswith(before):
            return None
        if affixes.setdefault(message["role"], (header, end)) != (header, end):
            return None
    if not prompted.startswith(texts[2]):
        return None
    return affixes, prompted.removeprefix(texts[2])


def _list_boundaries(messages: Messages, indices: list[int]) -> list[int]:
    """Indices of the assistant messages, and of the messages directly after them."""
    boundaries = {boundary for index in indices for boundary in (index, index + 1)}
    return sorted(boundary for boundary in boundaries if boundary < len(messages))


def _insert(messages: Messages, inserted: dict[int, Messages]) -> Messages:
    return [
        each
        for index, message in enumerate(messages)
        for each in (*inserted.get(index, ()), message)
    ]


def _remove_inserted(
    text: str,
    augmented: str,
    boundaries: Iterable[int],
    locate: Callable[[int, int], tuple[int, int] | None],
) -> dict[int, int] | None:
    """Returns where the message at each boundary begins in a text; None if `augmented` without the
    inserted messages is another text.
    Args: locate: returns where the text inserted at a boundary begins and ends, after a place."""
    starts = {}
    augmented_pos = 0
    text_pos = 0
    for boundary in boundaries:
        span = locate(boundary, augmented_pos)
        if span is None or not text.startswith(augmented[augmented_pos : span[0]], text_pos):
            return None
        text_pos += span[0] - augmented_pos
        starts[boundary] = text_pos
        augmented_pos = span[1]
    return starts if augmented[augmented_pos:] == text[text_pos:] else None


def _spans_between(
    indices: list[int], starts: dict[int, int], text: str, *, prompt: str, headers: dict[int, str]
) -> list[AssistantSpan] | None:
    """Returns the spans of messages with known boundaries; None if a header is unknown.
    Args: starts: first character of a message, by its index. headers: text that the template writes
    before the content of a message inserted before it."""
    spans = []
    for index in indices:
        start = starts[index]
        known = [header for header in (prompt, headers[index]) if prompt.startswith(header)]
        known = [header for header in known if text.startswith(header, start)]
        if not known:
            return None
        span = (start + len(known[0]), starts.get(index + 1, len(text)))
        spans.append(AssistantSpan(span=span, opening=(prompt, headers[index])))
    return spans
