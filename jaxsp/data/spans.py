"""Finds the text of assistant messages in a rendered conversation.

{% generation %} marks of the template name the text to train on. They are checked on a probe: the
same conversation with unique words in place of its content. The probe shows whether the marks cover
each assistant message in full and no other message.

A template without them writes the messages in a loop. A mark at the beginning of the loop's body,
which changes nothing else, shows where the text of each message begins:

    {% for message in messages %}{{ mark }}{{ '<|' + message.role + '|>' }}...

The text of an assistant message without its header, which is that of the generation prompt, is its
span.
"""

import bisect
import contextlib
import functools
import itertools
import re

from jaxsp.core.errors import UserError
from jaxsp.data import template_text
from jaxsp.data.template_text import ASSISTANT, Messages, RenderFunction, TextSpans

_MARKS = "the template's {% generation %} marks"


@functools.lru_cache
def has_generation_marks(template: str) -> bool:
    """Returns True if a template has {% generation %} marks.
    Raises: UserError for marks whose positions transformers reports wrongly."""
    import jinja2
    from jinja2 import ext, nodes, parser

    class Marks(ext.Extension):
        """The tag as transformers defines it: a block that holds statements."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def is_mark(node: nodes.Node) -> bool:
        called = node.call.node if isinstance(node, nodes.CallBlock) else None
        return isinstance(called, nodes.ExtensionAttribute) and called.name == "_generation"

    tree = jinja2.Environment(extensions=[Marks, ext.loopcontrols]).parse(template)
    # jinja2 buffers the text of these blocks, so transformers counts offsets from their start
    buffered = {
        nodes.Macro: "macro",
        nodes.CallBlock: "call",
        nodes.FilterBlock: "filter",
        nodes.AssignBlock: "set",
        nodes.For: "recursive for",
    }
    for node in tree.find_all((*buffered,)):
        is_buffered = getattr(node, "recursive", True)  # of loops, only recursive ones
        if is_buffered and any(map(is_mark, node.find_all(nodes.CallBlock))):
            name = "generation" if is_mark(node) else buffered[type(node)]
            raise UserError(
                f"{_MARKS} are inside a {{% {name} %}}, where transformers cannot locate the "
                "marked text. Put the marks around it."
            )
    return any(map(is_mark, tree.find_all(nodes.CallBlock)))


def read_marked_spans(
    messages: Messages,
    indices: list[int],
    text: str,
    marks: TextSpans,
    render: RenderFunction,
    *,
    loss_indices: list[int],
) -> tuple[TextSpans, list[int]]:
    """Returns the marked spans of the messages with loss, and all marked assistant messages.
    Args: indices, loss_indices: assistant messages; those with loss. marks: spans in `text`.
    Raises: UserError if marks cover another role's message, or part of an assistant message."""
    probe, words = _make_probe(messages, text)
    probe_text, probe_marks = render(probe)
    is_marked: dict[int, set[bool]] = {index: set() for index in indices}
    places = []  # first character of each word of the probe, and its message
    for index, word in words:
        are_marked = set()
        for match in re.finditer(word, probe_text):
            start, end = match.span()
            places.append((start, index))
            overlaps = [
                (first, last) for first, last in probe_marks if start < last and first < end
            ]
            if overlaps and index not in is_marked:
                raise UserError(f"{_MARKS} cover message {index + 1} ({messages[index]['role']}).")
            if overlaps and not any(first <= start and end <= last for first, last in overlaps):
                raise UserError(f"{_MARKS} cover only part of message {index + 1} ({ASSISTANT}).")
            are_marked.add(bool(overlaps))
        if index in is_marked and are_marked:
            # a tool result may repeat the name of the call outside the marks
            is_marked[index].add(True in are_marked)
    spans = [(start, end) for start, end in marks if start < end]
    if not spans or False in is_marked[indices[-1]]:
        raise UserError(f"{_MARKS} leave out what the assistant says.")
    marked = [index for index in indices if True in is_marked[index]]
    marked_text = "\0".join(text[start:end] for start, end in spans)
    place = 0
    for index in marked:
        end_of_message = template_text.find_end(marked_text, messages[index], place)
        if end_of_message is None or False in is_marked[index]:
            raise UserError(f"{_MARKS} cover only part of message {index + 1} ({ASSISTANT}).")
        place = end_of_message
    if len(loss_indices) == len(indices):
        return spans, marked
    problem = UserError(f"{_MARKS} do not separate messages with loss from ones with weight 0.")
    if len(marks) != len(probe_marks):
        raise problem
    places.sort()
    starts = [start for start, _ in places]
    spans = []
    for span, probe_span in zip(marks, probe_marks, strict=True):
        low, high = (bisect.bisect_left(starts, place) for place in probe_span)
        if low == high:
            # a mark without words, for example around thinking, may belong to either neighbor
            low = max(low - 1, 0)
            high += 1
        inside = [index for _, index in places[low:high]]
        if not inside:
            raise problem
        have_loss = {
            index in loss_indices for index in indices if min(inside) <= index <= max(inside)
        }
        if len(have_loss) > 1:
            raise problem
        if span[0] < span[1] and have_loss != {False}:
            spans.append(span)
    return spans, marked


def _make_probe(messages: Messages, text: str) -> tuple[Messages, list[tuple[int, str]]]:
    """Replaces content and names of tool calls with unique words.
    Returns: the messages, and each word with the index of its message."""
    unused = template_text.unused_words(text)
    probe: Messages = []
    words: list[tuple[int, str]] = []
    for index, original in enumerate(messages):
        message = dict(original)
        content = template_text.visible_content(message)
        if content.strip():
            word = next(unused)
            words.append((index, word))
            # templates treat content differently by the spaces around it and its thinking
            before = message["content"].removesuffix(content.lstrip())
            message["content"] = before + word + content[len(content.rstrip()) :]
        calls: Messages = []
        for call in template_text.list_tool_calls(message):
            word = next(unused)
            words.append((index, word))
            if isinstance(call.get("function"), dict):
                calls.append(call | {"function": call["function"] | {"name": word}})
            else:
                calls.append(call | {"name": word})
        if isinstance(message.get("function_call"), dict):
            message["function_call"] = calls.pop()
        if calls:
            message["tool_calls"] = calls
        probe.append(message)
    return probe, words


_LOOP = re.compile(r"(\{%[-+]?\s*for\s.*?)([-+]?%\})", re.DOTALL)

_LOOP_MARK = re.compile("\ue000([0-9]+)\ue001")
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
    pieces = _LOOP_MARK.split(marked)
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
