"""Finds the spans of assistant messages for chat templates without generation marks.

A template writes the messages in a loop. A mark at the beginning of the loop's body, which changes
nothing else, shows where the text of each message begins:

    {% for message in messages %}{{ mark }}{{ '<|' + message.role + '|>' }}...

The text of an assistant message without its header, which is that of the generation prompt, is its
span.
"""

import contextlib
import functools
import itertools
import re

from jaxsp.core.errors import UserError
from jaxsp.data.chat import template_text
from jaxsp.data.chat.template_text import ASSISTANT, Messages, RenderFunction, TextSpans

_LOOP = re.compile(r"(\{%[-+]?\s*for\s.*?)([-+]?%\})", re.DOTALL)

_MARK = re.compile("\ue000([0-9]+)\ue001")
"""Mark of a loop, by its number; these characters have no meaning."""

_IN_LOOP = ("user", ASSISTANT, "tool")
"""Roles of messages that a template cannot write elsewhere."""


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
) -> tuple[TextSpans, tuple[str, str]]:
    """Finds the spans of assistant messages in the rendered messages.
    Returns: the spans; and the generation prompt, with the header of an assistant message.
    Raises: UserError if they are unknown."""
    starts = _find_starts(messages, text, render)
    words = template_text.unused_words(text)
    roles = ("user", ASSISTANT, "user", ASSISTANT)
    probe = [{"role": role, "content": next(words)} for role in roles]
    asked = prompted = header = ""
    with contextlib.suppress(UserError):  # the template refuses the probe
        probe_text, _ = render(probe)
        asked, _ = render(probe[:3])
        prompted, _ = render(probe[:3], prompt=True)
        probe_starts = _find_starts(probe, probe_text, render)
        if probe_starts:
            header = probe_text[probe_starts[1] :].partition(probe[1]["content"])[0]
    prompt = prompted.removeprefix(asked)
    spans = []
    if starts and header and prompted.startswith(asked):
        # the prompt of a reasoning model may contain more than the header of a message
        headers = [each for each in (prompt, header) if prompt.startswith(each)]
        for index in indices:
            known = [each for each in headers if text.startswith(each, starts[index])]
            if known:
                spans.append((starts[index] + len(known[0]), starts[index + 1]))
    if len(spans) < len(indices):
        raise UserError(
            "the chat template has no {% generation %} marks, and no loop that writes the turns, "
            "so that the assistant's text cannot be located: "
            f"{template_text.MARKS_SUGGESTION}."
        )
    return spans, (prompt, header)


def _find_starts(messages: Messages, text: str, render: RenderFunction) -> list[int]:
    """Returns where each message begins, and the text's end; nothing if no loop writes them."""
    marked, _ = render(messages, marks_loops=True)
    pieces = _MARK.split(marked)
    if "".join(pieces[::2]) != text:
        return []
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
            template_text.find_end(text[start:end], message) is not None
            for message, (start, end) in zip(messages, itertools.pairwise(borders), strict=True)
            if message["role"] in _IN_LOOP
        ):
            return borders
    return []
