"""Reads the {% generation %} marks of a chat template, which name the text to train on.

Marks are checked on a probe: the same conversation with unique words in place of its content. The
probe shows whether the marks cover each assistant message in full and no other message.
"""

import bisect
import functools
import re

from jaxsp.core.errors import UserError
from jaxsp.data.chat import template_text
from jaxsp.data.chat.template_text import ASSISTANT, Messages, RenderFunction, TextSpans

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
