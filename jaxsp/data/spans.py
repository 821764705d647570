"""Finds the text of assistant messages in a rendered conversation.

{% generation %} marks of the template name the text to train on. They are checked on a probe: the
same conversation with unique words in place of its content. The probe shows whether the marks cover
each assistant message in full and no other message.

A template without them writes the messages in a loop. A mark at the beginning of the loop's body,
which changes nothing else, shows where the text of each message begins:

    {% for message in messages %}{{ mark }}{{ '<|' + message.role + '|>' }}...

The text of an assistant message without its header, which is that of the generation prompt, is its
span.

Every message is there in full; a span with loss is the assistant's text with its end token; and
answers whose thinking the template drops have a loss only if the config allows it: a model would
learn to answer without thinking.
"""

import bisect
import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxsp.core.errors import UserError
from jaxsp.data.source import ASSISTANT

Messages = list[dict[str, Any]]

TextSpans = list[tuple[int, int]]
"""First character and end of each part of a text."""

RenderFunction = Callable[..., tuple[str, TextSpans]]
"""Renders `(messages, prompt=False)`: returns their text, with the generation prompt if `prompt`,
and the spans of its {% generation %} marks."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Message fields that transformers reads as the assistant's reasoning."""

_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"

_UNESCAPED = re.compile(r"""[^\x00-\x1f"'\\<>&]+""")
"""Text that JSON, Python and XML all write unchanged."""

_TRL_TEMPLATES = "github.com/huggingface/trl/tree/main/trl/chat_templates"

MARKS_SUGGESTION = (
    "use data.train_on=all, or a data.chat_template with {% generation %} around what the "
    f"assistant says. TRL has such templates for many models: *_training.jinja in {_TRL_TEMPLATES}"
)


def list_messages(record: dict[str, Any]) -> Messages:
    """Returns the messages of a stored record's first document; none if it is text."""
    parts = [record.get(name) for name in ("messages", "prompt", "completion", "chosen")]
    return [message for part in parts if isinstance(part, list) for message in part]


def list_tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists a message's tool calls, including `function_call` of OpenAI's older format."""
    older = message.get("function_call")
    return [*(message.get("tool_calls") or []), *([older] if isinstance(older, dict) else [])]


def has_loss(message: dict[str, Any]) -> bool:
    """Returns False for a message with `weight: 0`, as chat_formats.py writes every such flag."""
    return bool(message.get("weight", 1))


def visible_content(message: dict[str, Any]) -> str:
    return split_thinking(message)[1]


def get_reasoning(message: dict[str, Any]) -> str:
    """Returns a message's thinking, from its own field or from <think> tags in the content."""
    own = (message[name] for name in _REASONING_FIELDS if isinstance(message.get(name), str))
    return next((text for text in own if text.strip()), split_thinking(message)[0]).strip()


def split_thinking(message: dict[str, Any]) -> tuple[str, str]:
    """Splits a message's content into its thinking and the rest. Thinking is at the beginning, in
    <think> tags of which the generation prompt may have written the first. Tags elsewhere are
    quoted by the content, and so is a closing tag in a message with a field for its reasoning."""
    content = message.get("content", "")
    if not isinstance(content, str):
        return "", ""
    thinking, closing, rest = content.partition(_THINK_CLOSE)
    if message["role"] != ASSISTANT or not closing:
        return "", content
    opening, tag, inner = thinking.partition(_THINK_OPEN)
    if tag:
        return ("", content) if opening.strip() else (inner, rest)
    has_own_field = any(isinstance(message.get(name), str) for name in _REASONING_FIELDS)
    return ("", content) if has_own_field else (thinking, rest)


def _collect_strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = [part for key, item in value.items() for part in (str(key), item)]
    if isinstance(value, list):
        return [text for item in value for text in _collect_strings(item)]
    return [value] if isinstance(value, str) else []


def find_end(text: str, message: dict[str, Any], start: int = 0) -> int | None:
    """Returns where a message ends in the text from `start` on; None if a part of it is missing.

    A template may trim a message. It must write the content without thinking, then the tool calls,
    or these first (Gemma 4): of each, in any order, its name, its argument names, and the longest
    part of each string in the arguments that no notation (JSON, Python, XML) escapes.
    """
    groups = [[visible_content(message)]]
    for call in list_tool_calls(message):
        function = call.get("function", call)
        if isinstance(function, dict):
            texts = _collect_strings([function.get("name"), function.get("arguments")])
            groups.append([max(_UNESCAPED.findall(text), key=len, default="") for text in texts])
    orders = (groups, groups[1:] + groups[:1])
    ends = (_find_groups(text, order, start) for order in orders)
    return min((end for end in ends if end is not None), default=None)


def _find_groups(text: str, groups: list[list[str]], start: int) -> int | None:
    """Returns where the last of several groups of phrases ends, each after the one before it."""
    for group in groups:
        ends = [start]
        for phrase in filter(None, map(str.strip, group)):
            # a template may write a tool's result as JSON, sometimes with all non-ASCII escaped
            plain_forms = {phrase, json.dumps(phrase, ensure_ascii=False)[1:-1]}
            for forms in (plain_forms, {json.dumps(phrase)[1:-1]}):
                places = [(text.find(form, start), len(form)) for form in forms]
                found = [place + length for place, length in places if place >= 0]
                if found:
                    break
            else:
                return None
            ends.append(min(found))
        start = max(ends)
    return start


def starts_with_message(message: dict[str, Any], text: str, *, before: str) -> bool:
    """Returns True if a text begins with a message's content, or with thinking and then content.
    Args: before: the text before it, which may have opened the thinking."""
    content = visible_content(message).strip()
    rest = text.lstrip()
    if rest.startswith((content, message.get("content", "").strip())):
        return True
    if not rest.startswith(_THINK_OPEN) and not before.rstrip().endswith(_THINK_OPEN):
        return False
    ends = [match.end() for match in re.finditer(_THINK_CLOSE, rest)]
    return any(rest[end:].lstrip().startswith(content) for end in ends)


def unused_words(text: str) -> Iterator[str]:
    """Yields words that no template changes, not in `text` and none contained in another."""
    tag = "Qx"
    while tag in text:
        tag = f"Q{tag}"
    return (f"{tag}{number}z" for number in itertools.count())


def common_prefix_length(a: str, b: str) -> int:
    """Returns the length of the longest common prefix of two texts."""
    if b.startswith(a):
        return len(a)
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(a), len(b)))


def check_messages_present(messages: Messages, text: str) -> None:
    """Raises: UserError if a message, or a part of it, is missing from the text."""
    start = 0
    for number, message in enumerate(messages, 1):
        # templates may move system and developer messages
        has_fixed_place = message["role"] not in ("system", "developer")
        end = find_end(text, message, start if has_fixed_place else 0)
        if end is None:
            reason = f"the chat template drops content of message {number} ({message['role']})"
            if "function_call" in message:
                reason += ". Write its function_call as tool_calls, which templates support"
            elif message["role"] == ASSISTANT and _THINK_CLOSE in str(message.get("content")):
                reason += (
                    f". Templates read text before {_THINK_CLOSE} as thinking. If the message only "
                    "mentions the tag, give it its thinking as reasoning_content, even if that is "
                    '""'
                )
            raise UserError(f"{reason}.")
        if has_fixed_place:
            start = end
    last = next((message for message in reversed(messages) if message["role"] == ASSISTANT), None)
    if last is not None and get_reasoning(last) not in text:
        raise UserError(
            "the chat template drops the thinking of the last assistant message. Remove the "
            "thinking, or use another template."
        )


def check_span(
    messages: Messages,
    indices: Sequence[int],
    text: str,
    span: tuple[int, int],
    *,
    opening: tuple[str, str],
    suggestion: str,
) -> None:
    """Checks that a span is the text of consecutive messages, with nothing before, and an end
    token.
    Args: opening: generation prompt, and the text before content in place of the first message;
        only for a message without content, or with tool calls before it."""
    message = messages[indices[0]]
    span_text = text[slice(*span)]
    place = 0
    for index in indices:
        end = find_end(span_text, messages[index], place)
        if end is None:
            raise UserError(
                f"the text of message {index + 1} ({messages[index]['role']}) is not where the "
                "chat template ends the prompt."
            )
        place = end
    content = span_text
    # for the opening tag of thinking; a copy of all text before would take quadratic time
    before = text[max(span[0] - 1000, 0) : span[0]]
    has_content = bool(visible_content(message).strip())
    if has_content and list_tool_calls(message):
        has_content = starts_with_message(message, content, before=before)
    if not has_content:
        # the text before a tool call is unknown; a message with a word has the same header
        prompt, header = opening
        word = next(unused_words(text))
        message = {"role": message["role"], "content": word}
        content = header + word
        start = common_prefix_length(prompt, content)
        before = content[:start]
        content = content[start:]
    if not starts_with_message(message, content, before=before):
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
    """Returns the messages whose thinking is not in the rendered text. Templates of reasoning
    models keep only the thinking after the last user message. It is searched in a rendering with a
    word in place of each thinking text, because a short one may also occur elsewhere."""
    words = unused_words(text)
    replaced = {index: next(words) for index in indices if get_reasoning(messages[index])}
    if not replaced:
        return []
    probe = []
    for index, message in enumerate(messages):
        if index in replaced:
            word = replaced[index]
            thinking, content = split_thinking(message)
            fields = [name for name in _REASONING_FIELDS if isinstance(message.get(name), str)]
            message = message | {name: word for name in fields if message[name].strip()}
            if thinking.strip():
                original = message["content"]
                tag = original[: original.index(_THINK_CLOSE) - len(thinking)]
                message["content"] = f"{tag}\n{word}\n{_THINK_CLOSE}{content}"
        probe.append(message)
    probe_text = render(probe)[0]
    return [index for index, word in replaced.items() if word not in probe_text]


def check_bare_answers(
    bare: Sequence[int], earlier_reasoning: str, *, instead_of_no_loss: str | None = None
) -> None:
    """Checks that the config allows a loss on answers whose thinking the template dropped.
    Args: instead_of_no_loss: suggestion where single messages cannot be without loss.
    Raises: UserError if it does not."""
    allows = earlier_reasoning == "no_loss" and instead_of_no_loss is None
    if not bare or earlier_reasoning == "keep" or allows:
        return
    others = f" (and {len(bare) - 1} more)" if len(bare) > 1 else ""
    problem = f"the chat template drops the thinking of message {bare[0] + 1}{others}"
    if earlier_reasoning == "no_loss":
        raise UserError(
            f"{problem}, and no_loss cannot exclude single messages here: {instead_of_no_loss}, or "
            "data.earlier_reasoning=keep."
        )
    without = ""
    if instead_of_no_loss is None:
        without = "data.earlier_reasoning=no_loss (no loss on such messages), "
    raise UserError(
        f"{problem}, so that the model would learn to answer without thinking. Use "
        f"{without}data.earlier_reasoning=keep (learn that), or a "
        "data.chat_template that keeps it: for Qwen3 and DeepSeek-R1-Distill, TRL has "
        f"*_training.jinja in {_TRL_TEMPLATES}."
    )


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
        end_of_message = find_end(marked_text, messages[index], place)
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
    unused = unused_words(text)
    probe: Messages = []
    words: list[tuple[int, str]] = []
    for index, original in enumerate(messages):
        message = dict(original)
        content = visible_content(message)
        if content.strip():
            word = next(unused)
            words.append((index, word))
            # templates treat content differently by the spaces around it and its thinking
            before = message["content"].removesuffix(content.lstrip())
            message["content"] = before + word + content[len(content.rstrip()) :]
        calls: Messages = []
        for call in list_tool_calls(message):
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
    words = unused_words(text)
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
            f"{MARKS_SUGGESTION}."
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
            find_end(text[start:end], message) is not None
            for message, (start, end) in zip(messages, itertools.pairwise(borders), strict=True)
            if message["role"] in _IN_LOOP
        ):
            return borders
    return []
