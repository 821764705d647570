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
        "Macro": "macro",
        "CallBlock": "call",
        "FilterBlock": "filter",
        "AssignBlock": "set",
    }
    for node in tree.find_all(nodes.Node):
        name = buffered.get(type(node).__name__)
        if isinstance(node, nodes.For) and node.recursive:
            name = "recursive for"
        if name is not None and any(map(is_mark, node.find_all(nodes.CallBlock))):
            if is_mark(node):
                name = "generation"
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
    word_positions = []
    for index, word in words:
        starts = [match.start() for match in re.finditer(word, probe_text)]
        word_positions += [(start, index) for start in starts]
        overlaps = [
            [
                (first, last)
                for first, last in probe_marks
                if start < last and first < start + len(word)
            ]
            for start in starts
        ]
        if any(overlaps) and index not in is_marked:
            raise UserError(f"{_MARKS} cover message {index + 1} ({messages[index]['role']}).")
        for start, spans in zip(starts, overlaps, strict=True):
            end = start + len(word)
            if spans and not any(first <= start and end <= last for first, last in spans):
                raise UserError(f"{_MARKS} cover only part of message {index + 1} ({ASSISTANT}).")
        if index in is_marked and starts:
            # a tool result may repeat the name of the call outside the marks
            is_marked[index].add(any(overlaps))
    spans = [(start, end) for start, end in marks if start < end]
    if not spans or False in is_marked[indices[-1]]:
        raise UserError(f"{_MARKS} leave out what the assistant says.")
    marked_text = "\0".join(text[start:end] for start, end in spans)
    place = 0
    for index in indices:
        if True in is_marked[index]:
            message_end = template_text.find_end(marked_text, messages[index], place)
            if message_end is None or False in is_marked[index]:
                raise UserError(f"{_MARKS} cover only part of message {index + 1} ({ASSISTANT}).")
            place = message_end
    if len(loss_indices) < len(indices):
        spans = _select_loss_spans(
            loss_indices, indices, marks, probe_marks, sorted(word_positions)
        )
    return spans, [index for index in indices if True in is_marked[index]]


def _select_loss_spans(
    loss_indices: list[int],
    indices: list[int],
    marks: TextSpans,
    probe_marks: TextSpans,
    word_positions: list[tuple[int, int]],
) -> TextSpans:
    """Returns the marked spans of the messages with loss.
    Args: word_positions: first character of each word of the probe, and its message; sorted."""
    problem = UserError(f"{_MARKS} do not separate messages with loss from ones with weight 0.")
    if len(marks) != len(probe_marks):
        raise problem
    starts = [place for place, _ in word_positions]
    spans = []
    for (start, end), (first, last) in zip(marks, probe_marks, strict=True):
        low = bisect.bisect_left(starts, first)
        high = bisect.bisect_left(starts, last)
        if low == high:
            # a mark without words, for example around thinking, may belong to either neighbor
            low = max(low - 1, 0)
            high += 1
        marked = [index for _, index in word_positions[low:high]]
        if not marked:
            raise problem
        have_loss = {
            index in loss_indices for index in indices if min(marked) <= index <= max(marked)
        }
        if len(have_loss) > 1:
            raise problem
        if start < end and have_loss != {False}:
            spans.append((start, end))
    return spans


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
