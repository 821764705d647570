"""Where in a conversation's text stands what the assistant says, with its end mark.

Three turns, as ChatML writes them; what is learned of them is between the bars, the end mark with it:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n|Hello.<|im_end|>\n|

Where the template has {% generation %} marks, they say what is learned. They are tried on the same conversation with words of
ours in the place of its own: there it is seen whether they hold all that an assistant's turn says, and nothing of others.
Where it has none, the parts are found by rendering the conversation in pieces, and are taken only if they prove right:

1.  By prefixes. What the template writes up to an assistant's turn, with its generation prompt, and what it writes up to the
    turn's end, have both to be beginnings of the whole text. This renders the conversation twice for each assistant turn.
2.  By insertion. Each assistant's turn is put between pairs of short turns that are not in the conversation. Where they stand
    in the text is where the turn begins and ends, if the text without them is the whole text again, character for character.
    This renders the conversation twice, however long it is, but fails where a template requires roles to alternate.
3.  By exchanges. An exchange is a short user turn and a short assistant turn, in the order that
    lets roles alternate. One is inserted at each border of an assistant turn. A conversation of
    four words shows what the template writes around inserted turns, so that their text is known
    exactly. Without it, the text must be the whole text again. This renders one conversation of at
    most three times the messages, and five of at most four messages.

Conversations with few assistant turns are tried by prefixes first. Long ones are tried by
exchanges, then by insertion, then by prefixes. A prefix ends with a last turn, which some templates
write differently (Qwen3 keeps its thinking). An inserted user turn can cut thinking out of turns
before it. Where several ways succeed they find the same parts (`tests/data/chat/test_chat.py`).

A part found so has to begin with the turn's words, or its thinking, and to end with more than them: a header of the turn that
the generation prompt does not write would be learned otherwise, and a turn without an end mark never teaches to stop.

Whatever this does not settle is refused, never guessed. The text is that of the template in any case: where it cuts the
thinking out of earlier turns, that thinking is not learned.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxsp.data.chat import template_text
from jaxsp.data.chat.template_text import RecordError

TextSpans = list[tuple[int, int]]
"""Of a text, first character and end."""

RenderFunction = Callable[..., tuple[str, TextSpans]]
"""(messages, prompt=False) -> the template's text of them, with the generation prompt if asked for, and its marks."""

Messages = list[dict[str, Any]]


@functools.lru_cache
def has_generation_marks(template: str) -> bool:
    """Whether a template has {% generation %} marks. Raises: Refused for marks that transformers tells wrong places of."""
    import jinja2
    from jinja2 import ext, nodes, parser

    class Marks(ext.Extension):
        """The tag, as transformers has it: a block that holds statements."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def is_mark(node: nodes.Node) -> bool:
        called = node.call.node if isinstance(node, nodes.CallBlock) else None
        return isinstance(called, nodes.ExtensionAttribute) and called.name == "_generation"

    tree = jinja2.Environment(extensions=[Marks, ext.loopcontrols]).parse(template)
    # text written there is held back, and what was written before it is not counted
    holding = {"Macro": "macro", "CallBlock": "call", "FilterBlock": "filter", "AssignBlock": "set"}
    for node in tree.find_all(nodes.Node):
        is_loop = isinstance(node, nodes.For) and node.recursive
        name = "recursive for" if is_loop else holding.get(type(node).__name__)
        if name is not None and any(map(is_mark, node.find_all(nodes.CallBlock))):
            name = "generation" if is_mark(node) else name
            raise RecordError(
                f"the template's {{% generation %}} marks stand inside a {{% {name} %}}, where transformers does not see what "
                "they mark: put them around it"
            )
    return any(map(is_mark, tree.find_all(nodes.CallBlock)))


def read_marked_spans(
    messages: Messages,
    turns: list[int],
    whole: str,
    marks: TextSpans,
    render: RenderFunction,
    *,
    with_loss: list[int],
) -> TextSpans:
    """The parts that a template's marks name, of the turns with loss.

    Raises: Refused where they hold another's words, or half of a turn's.
    """
    probe, words = _make_probe(messages, whole)
    text, probe_marks = render(probe)
    held: dict[int, set[bool]] = {turn: set() for turn in turns}
    for number, word in words:
        for start in _find_all(text, word):
            end = start + len(word)
            touched = any(start < last and first < end for first, last in probe_marks)
            if touched and number not in held:
                raise RecordError(
                    f"the template's {{% generation %}} marks hold what message {number + 1} ({messages[number]['role']}) says"
                )
            if touched and not any(first <= start and end <= last for first, last in probe_marks):
                raise RecordError(_partial_mark_problem(number))
        if number in held and (places := _find_all(text, word)):
            # what a tool answers may name the call again
            held[number].add(
                any(first <= start < last for start in places for first, last in probe_marks)
            )
    parts = [(start, end) for start, end in marks if start < end]
    if not parts or False in held[turns[-1]]:
        raise RecordError("the template's {% generation %} marks leave out what the assistant says")
    said, at = "\0".join(whole[start:end] for start, end in parts), 0
    for turn in turns:
        if len(held[turn]) == 2:
            raise RecordError(_partial_mark_problem(turn))
        if held[turn] == {True}:
            if (words_end := template_text.find_end(said, messages[turn], at)) is None:
                raise RecordError(_partial_mark_problem(turn))
            at = words_end
    if len(with_loss) == len(turns):
        return parts
    word_places = [(place, number) for number, word in words for place in _find_all(text, word)]
    return _select_loss_spans(with_loss, turns, marks, probe_marks, sorted(word_places))


def _select_loss_spans(
    with_loss: list[int],
    turns: list[int],
    marks: TextSpans,
    probe_marks: TextSpans,
    places: list[tuple[int, int]],
) -> TextSpans:
    """The marked parts of the turns with loss.

    Args: places: where the words of a message stand in the probe's text, and the message's number.
    Raises: Refused where a mark may be of a turn with loss and of one without.
    """
    problem = "the template's {% generation %} marks do not tell apart turns with loss and turns with weight 0 or train false"
    if len(marks) != len(probe_marks):
        raise RecordError(problem)
    starts = [place for place, _ in places]
    kept = []
    for (start, end), (first, last) in zip(marks, probe_marks, strict=True):
        low, high = bisect.bisect_left(starts, first), bisect.bisect_left(starts, last)
        if low == high:
            # a mark without words, such as one around thinking: of a turn from the words before it to those after it
            low, high = max(low - 1, 0), high + 1
        numbers = [number for _, number in places[low:high]]
        if not numbers:
            raise RecordError(problem)
        spoken = [turn for turn in turns if min(numbers) <= turn <= max(numbers)]
        have_loss = {turn in with_loss for turn in spoken}
        if len(have_loss) > 1:
            raise RecordError(problem)
        if start < end and have_loss != {False}:
            kept.append((start, end))
    return kept


def _partial_mark_problem(turn: int) -> str:
    return f"the template's {{% generation %}} marks hold but a part of what message {turn + 1} ({template_text.ASSISTANT}) says"


def _make_probe(messages: Messages, whole: str) -> tuple[Messages, list[tuple[int, str]]]:
    """The conversation with words of ours for what is said and called, and these with their messages' numbers."""
    unused = _unused_words(whole)
    made: Messages = []
    words: list[tuple[int, str]] = []
    for number, message in enumerate(messages):
        one = dict(message)
        content = template_text.visible_content(message)
        if content.strip():
            word = next(unused)
            words.append((number, word))
            # spaces around it, and thinking before it, decide how templates write it
            begin = len(message["content"]) - len(content.lstrip())
            one["content"] = message["content"][:begin] + word + content[len(content.rstrip()) :]
        calls: Messages = []
        for call in template_text.list_tool_calls(message):
            word = next(unused)
            words.append((number, word))
            function = call.get("function")
            calls.append(
                call
                | (
                    {"function": function | {"name": word}}
                    if isinstance(function, dict)
                    else {"name": word}
                )
            )
        if isinstance(message.get("function_call"), dict):
            one["function_call"] = calls.pop()
        made.append(one | ({"tool_calls": calls} if calls else {}))
    return made, words


def _find_all(text: str, word: str) -> list[int]:
    found = [text.find(word)]
    while found[-1] >= 0:
        found.append(text.find(word, found[-1] + 1))
    return found[:-1]


def infer_spans(
    messages: Messages, turns: list[int], whole: str, render: RenderFunction
) -> TextSpans:
    """The parts, of a template without marks. Raises: Refused where they cannot be told for certain."""

    def text(messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> str:
        return render(messages, prompt=prompt)[0]

    ways = [_find_by_prefixes, _find_by_insertion, _find_by_exchanges]
    if len(turns) > _MAX_PREFIX_TURNS:
        # prefixes take quadratic time; gemma4 merges assistant turns, so that insertion fails late
        ways.reverse()
    found = next(
        (parts for way in ways if (parts := way(messages, turns, whole, text)) is not None), None
    )
    if found is None:
        raise RecordError(
            "the chat template has no {% generation %} marks, and writes turns differently when others follow, so that what "
            f"the assistant says cannot be told apart: {template_text.MARKS_SUGGESTION}"
        )
    for turn, part in zip(turns, found, strict=True):
        check_span(
            messages,
            [turn],
            whole,
            part.span,
            render,
            suggestion=template_text.MARKS_SUGGESTION,
            opening=part.opening,
        )
    return [part.span for part in found]


_MAX_PREFIX_TURNS = 4
"""Assistant turns up to which rendering all prefixes is about as fast as rendering the conversation with turns inserted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TurnSpan:
    """An assistant turn in the text of a conversation."""

    span: tuple[int, int]
    """First character and end."""
    opening: tuple[str, str] | None = None
    """The generation prompt, and the text of an inserted turn up to its words; None if not known."""


def _find_by_prefixes(
    messages: Messages, turns: list[int], whole: str, render: Callable[..., str]
) -> list[_TurnSpan] | None:
    """What follows the generation prompt, up to the turn's end; None if a prefix is no beginning of the whole text."""
    parts = []
    for turn in turns:
        try:
            before = render(messages[:turn], prompt=True)
            after = render(messages[: turn + 1]) if turn + 1 < len(messages) else whole
        except RecordError:  # of an empty conversation, or of one that stops in the middle
            return None
        if not whole.startswith(before) or not whole.startswith(after) or len(after) <= len(before):
            return None
        parts.append(_TurnSpan(span=(len(before), len(after))))
    return parts


def _find_by_insertion(
    messages: Messages, turns: list[int], whole: str, render: Callable[..., str]
) -> list[_TurnSpan] | None:
    """Where turns begin and end, by turns put between them; None if they change more than they add."""
    borders = sorted(
        {border for turn in turns for border in (turn, turn + 1) if border < len(messages)}
    )
    unused = _unused_words(whole)
    pairs = {border: (next(unused), next(unused)) for border in borders}
    mixed = []
    for number, message in enumerate(messages):
        mixed += [
            {"role": template_text.ASSISTANT, "content": word} for word in pairs.get(number, ())
        ]
        mixed.append(message)
    try:
        with_prompt, text = render(messages, prompt=True), render(mixed)
    except RecordError:  # of roles that have to alternate
        return None
    prompt = with_prompt.removeprefix(whole)
    if not prompt or prompt == with_prompt:
        return None

    def header(begin: int, word: str) -> int:
        """Where the turn that says the word begins; -1 where that is not seen."""
        end = text.find(word, begin)
        found = text.rfind(prompt, begin, end)
        # the prompt of a model that thinks may hold more than the header of a turn
        sizes = (
            size for size in range(len(prompt), 0, -1) if text.endswith(prompt[:size], begin, end)
        )
        return -1 if end < 0 else found if found >= 0 else end - next(sizes, end + 1)

    starts, headers, seen, at = {}, {}, 0, 0
    for border, (first, second) in pairs.items():
        one = header(seen, first)
        first_end = text.find(first, seen) + len(first)
        two = header(first_end, second)
        if one < 0 or two < 0 or not whole.startswith(text[seen:one], at):
            return None
        at += one - seen
        starts[border], headers[border] = at, text[one : first_end - len(first)]
        ending = text[first_end:two]
        second_end = text.find(second, two) + len(second)
        if not text.startswith(ending, second_end):
            return None
        seen = second_end + len(ending)
    if text[seen:] != whole[at:]:
        return None
    return _spans_between(turns, starts, whole, prompt=prompt, headers=headers)


def _spans_between(
    turns: list[int],
    starts: dict[int, int],
    whole: str,
    *,
    prompt: str,
    headers: dict[int, str],
) -> list[_TurnSpan] | None:
    """Returns the parts of turns with known borders; None if one begins with an unknown header.

    Args:
        starts: first character of a message, by its number.
        headers: text that the template writes before the words of an inserted assistant turn, by
            the number of the message that follows it.
    """
    parts = []
    for turn in turns:
        start = starts[turn]
        known = [header for header in (prompt, headers[turn]) if prompt.startswith(header)]
        known = [header for header in known if whole.startswith(header, start)]
        if not known:
            return None
        span = (start + len(known[0]), starts.get(turn + 1, len(whole)))
        parts.append(_TurnSpan(span=span, opening=(prompt, headers[turn])))
    return parts


def _find_by_exchanges(
    messages: Messages,
    turns: list[int],
    whole: str,
    render: Callable[..., str],
) -> list[_TurnSpan] | None:
    """Finds turns by exchanges of a user and an assistant turn inserted at their borders.

    Returns None if the template writes more, or less, than the conversation and the inserted turns.
    """
    unused = _unused_words(whole)
    frame = _infer_turn_format(unused, render)
    if frame is None:
        return None
    borders = {border for turn in turns for border in (turn, turn + 1) if border < len(messages)}
    exchanges = {}
    for border in sorted(borders):
        roles = [template_text.ASSISTANT, _USER]
        # mistral counts neither calls nor their results, so a user turn comes before both
        if messages[border]["role"] == _USER:
            roles.reverse()
        exchanges[border] = [{"role": role, "content": next(unused)} for role in roles]
    mixed = []
    for number, message in enumerate(messages):
        mixed += [*exchanges.get(number, ()), message]
    try:
        text = render(mixed)
    except RecordError:
        return None
    starts = {}
    seen = 0
    at = 0
    for border, exchange in exchanges.items():
        inserted = "".join(frame.render_turn(**turn) for turn in exchange)
        found = text.find(inserted, seen)
        if found < 0 or not whole.startswith(text[seen:found], at):
            return None
        at += found - seen
        starts[border] = at
        seen = found + len(inserted)
    if text[seen:] != whole[at:]:
        return None
    headers = dict.fromkeys(turns, frame.affixes[template_text.ASSISTANT][0])
    return _spans_between(turns, starts, whole, prompt=frame.prompt, headers=headers)


_USER = "user"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TurnFormat:
    """Text that a template writes for plain turns, beside their words."""

    affixes: dict[str, tuple[str, str]]
    """Text before and after the words of a turn, by its role."""
    prompt: str
    """Generation prompt after a user turn."""

    def render_turn(self, *, role: str, content: str) -> str:
        before, after = self.affixes[role]
        return before + content + after


def _infer_turn_format(unused: Iterator[str], render: Callable[..., str]) -> _TurnFormat | None:
    """Returns the frame of a template, by the beginnings of a conversation of four words.

    Returns None if a turn is written differently when others follow.
    """
    roles = (_USER, template_text.ASSISTANT, _USER, template_text.ASSISTANT)
    talk = [{"role": role, "content": next(unused)} for role in roles]
    try:
        texts = [render(talk[:number]) for number in range(1, len(talk) + 1)]
        prompted = render(talk[:3], prompt=True)
    except RecordError:
        return None
    around: dict[str, tuple[str, str]] = {}
    # the first user turn is left out: what begins the whole text stands before it
    for message, (before, after) in zip(talk[1:], itertools.pairwise(texts), strict=True):
        header, word, end = after.removeprefix(before).partition(message["content"])
        if not word or not after.startswith(before):
            return None
        if around.setdefault(message["role"], (header, end)) != (header, end):
            return None
    if not prompted.startswith(texts[2]):
        return None
    return _TurnFormat(affixes=around, prompt=prompted.removeprefix(texts[2]))


def _unused_words(text: str) -> Iterator[str]:
    """Words that no template changes, that do not occur in a text and do not contain each other."""
    tag = "Qx"
    while tag in text:
        tag = f"Q{tag}"
    return (f"{tag}{number}z" for number in itertools.count())


_CONTEXT_CHARS = 1000
"""Characters before a part in which thinking may begin that the part goes on with."""


def check_span(
    messages: Messages,
    message_numbers: Sequence[int],
    whole: str,
    span: tuple[int, int],
    render: RenderFunction,
    *,
    suggestion: str,
    opening: tuple[str, str] | None = None,
) -> None:
    """Raises: Refused where a part of a text is not what the learned messages say, and nothing before it, and an end mark.

    Args:
        learned: numbers of messages that follow each other; what stands between them is not looked at.
        opening: the generation prompt, and what the template writes before the words of a turn that has some. They are
            needed for a message without words, and found by rendering if missing.
    """
    first, last = message_numbers[0], message_numbers[-1]
    said, at = whole[slice(*span)], 0
    # copies of the whole text for each turn would take quadratic time
    text, before, message = said, whole[max(span[0] - _CONTEXT_CHARS, 0) : span[0]], messages[first]
    for number in message_numbers:
        end = template_text.find_end(said, messages[number], at)
        if end is None:
            raise RecordError(
                f"what message {number + 1} ({messages[number]['role']}) says is not where the chat template ends the prompt"
            )
        at = end
    if not template_text.visible_content(message).strip():
        # what a template writes before a call cannot be known; before a word it can, and its header is the same
        word = next(_unused_words(whole))
        message = {"role": message["role"], "content": word}
        if opening is None:
            prompt, text = (
                render(messages[:first], prompt=True)[0],
                render([*messages[:first], message])[0],
            )
        else:
            prompt, text = opening[0], opening[1] + word
        start = common_prefix_length(prompt, text)
        before, text = text[:start], text[start:]
    if not template_text.starts_with_message(message, text, before=before):
        raise RecordError(
            f"the chat template's generation prompt ends before the words of message {first + 1} ({message['role']}), so that "
            f"its header would be learned: {suggestion}"
        )
    if not said[at:].strip():
        raise RecordError(
            f"the chat template puts no end mark behind message {last + 1} ({messages[last]['role']}), so that the model would "
            f"not learn to stop: {suggestion}"
        )


def common_prefix_length(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    if other.startswith(one):
        return len(one)
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
