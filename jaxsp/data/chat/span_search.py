"""Finds the spans of assistant messages for chat templates without generation marks.

A template writes the messages in a loop. A mark at the beginning of the loop's body, which changes
nothing else, shows where the text of each message begins:

    {% for message in messages %}{{ mark }}{{ '<|' + message.role + '|>' }}...

The text of an assistant message without its header, which is that of the generation prompt, is its
span.
"""

import functools
import itertools
import re
from typing import NamedTuple

from jaxsp.core.errors import UserError
from jaxsp.data.chat import template_text
from jaxsp.data.chat.template_text import ASSISTANT, Messages, RenderFunction

_LOOP = re.compile(r"(\{%[-+]?\s*for\s.*?)([-+]?%\})", re.DOTALL)

_MARK = re.compile("\ue000([0-9]+)\ue001")
"""Mark of a loop, by its number; these characters have no meaning."""


_IN_LOOP = ("user", ASSISTANT, "tool")
"""Roles of messages that a template cannot write elsewhere."""


class AssistantSpan(NamedTuple):
    """Position of an assistant message in the rendered conversation, without its header."""

    span: tuple[int, int]
    """First character, and the one after the last."""
    opening: tuple[str, str]
    """Generation prompt, and the header of another assistant message."""


@functools.lru_cache(maxsize=16)
def mark_loops(template: str) -> str:
    """Returns a template that writes a mark at the beginning of each pass of each loop."""
    numbers = itertools.count()

    def add_mark(tag: re.Match[str]) -> str:
        # the second tag removes the same white space as the end of the first did
        mark = f"\ue000{next(numbers)}\ue001"
        return f"{tag[1]}%}}{{{{ '{mark}' }}}}{{% set mark_of_loop = 0 {tag[2]}"

    return _LOOP.sub(add_mark, template)


def find_spans(
    messages: Messages, indices: list[int], text: str, render: RenderFunction
) -> list[AssistantSpan] | None:
    """Returns the spans of assistant messages; None if they are unknown.
    Args: text: the rendered messages."""
    starts = _find_starts(messages, text, render)
    opening = _find_opening(text, render)
    if starts is None or opening is None:
        return None
    prompt, header = opening
    if not header:
        return None
    # the prompt of a reasoning model may contain more than the header of a message
    headers = [each for each in opening if prompt.startswith(each)]
    spans = []
    for index in indices:
        known = [each for each in headers if text.startswith(each, starts[index])]
        if not known:
            return None
        span = (starts[index] + len(known[0]), starts[index + 1])
        spans.append(AssistantSpan(span=span, opening=(prompt, header)))
    return spans


def _find_starts(messages: Messages, text: str, render: RenderFunction) -> list[int] | None:
    """Returns where each message begins in a text, and its end; None if no loop writes them."""
    marked, _ = render(messages, marks_loops=True)
    pieces = _MARK.split(marked)
    if "".join(pieces[::2]) != text:
        return None
    places: dict[str, list[int]] = {}
    place = 0
    for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
        place += len(piece)
        places.setdefault(number, []).append(place)
    # loops inside that one write less than a message
    for starts in sorted(places.values()):
        num_before = len(messages) - len(starts)
        # a system message may be written before the loop
        if num_before not in (0, 1) or (num_before and messages[0]["role"] in _IN_LOOP):
            continue
        borders = [0] * num_before + [*starts, len(text)]
        if all(
            template_text.find_end(text[borders[index] : borders[index + 1]], message) is not None
            for index, message in enumerate(messages)
            if message["role"] in _IN_LOOP
        ):
            return borders
    return None


def _find_opening(text: str, render: RenderFunction) -> tuple[str, str] | None:
    """Returns the generation prompt after a user message, and what the template writes before the
    content of an assistant message that others follow; None if they are unknown.
    Args: text: text that has no word of the probe."""
    words = template_text.unused_words(text)
    roles = ("user", ASSISTANT, "user", ASSISTANT)
    probe = [{"role": role, "content": next(words)} for role in roles]
    try:
        probe_text, _ = render(probe)
        asked, _ = render(probe[:3])
        prompted, _ = render(probe[:3], prompt=True)
        starts = _find_starts(probe, probe_text, render)
    except UserError:
        return None
    if starts is None or not prompted.startswith(asked):
        return None
    header, _, _ = probe_text[starts[1] :].partition(probe[1]["content"])
    return prompted.removeprefix(asked), header
